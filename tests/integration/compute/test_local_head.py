"""The local Ray head: one per environment, outliving its starter, on loopback, behind a token."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import ray
from click.testing import CliRunner

from support import forked
from support.head_processes import (
    assert_nothing_left,
    driver_environment,
    lives,
    processes_of,
    python,
)
from support.heads import free_port
from support.pool_models import until
from vane_dagster.cli.main import main
from vane_dagster.compute import connection, local_head, processes
from vane_dagster.compute.connection import LOOPBACK_ONLY, connect
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.processes import drivers, marked
from vane_dagster.errors import ComputeError

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

# What a careless environment holds: none of it may break the head, or reach its workers.
HOSTILE = {
    "RAY_ADDRESS": "192.0.2.99:6379",
    "RAY_AUTH_MODE": "disabled",
    "RAY_NAMESPACE": "elsewhere",
    "RAY_JOB_ID": "0badc0de",
    "RAY_TMPDIR": "/nowhere",
}

STARTER = """
    from vane_dagster.compute.local_head import LocalHead
    print("READY", LocalHead(num_cpus=2, resources={"slot": 3}).ensure().pid, flush=True)
    input()
"""


def on_terminal(code: str, home: Path) -> tuple[int, int]:
    """Starts code as the leader of a terminal's session; its pid and our end of the terminal."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**driver_environment(home), **HOSTILE}
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execve(sys.executable, command, environment)
    return pid, terminal


def driven(
    code: str, home: Path, environment: Mapping[str, str] = {}, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run code in a forked driver of the head whose state lies in `home`; it has imported Ray."""
    given = {**driver_environment(home), **environment}
    done = forked.run(["-c", textwrap.dedent(code)], given, home, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


def cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``vane-dagster cluster`` in a forked process."""
    code = f"from vane_dagster.cli.main import main; main({['cluster', *arguments]})"
    return driven(code, home, check=False)


def read_until(terminal: int, word: str) -> str:
    """What a terminal shows up to the end of the line that holds `word`."""
    shown = ""
    while word not in shown or not shown.endswith("\n"):
        shown += os.read(terminal, 1000).decode()
    return shown


@dataclasses.dataclass
class Shared:
    """One head for most tests, started by two processes at once, each on its own terminal."""

    home: Path
    local: LocalHead
    head: Head
    reported: list[int]
    shown: str
    exits: list[int]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    home = tmp_path_factory.mktemp("home")
    local = LocalHead(home=home)
    starters = [on_terminal(STARTER, home) for _ in range(2)]
    try:
        shown = [read_until(terminal, "READY") for _, terminal in starters]
        for _, terminal in starters:
            os.close(terminal)
        exits = [os.waitpid(pid, 0)[1] for pid, _ in starters]
        head = local.find()
        assert head is not None
        reported = [int(text.split("READY")[1].split()[0]) for text in shown]
        yield Shared(home, local, head, reported, "".join(shown), exits)
        stopped = cli(home, "stop", "--address", head.address)
        assert f"'default' of {sys.prefix} at {head.address} was stopped" in stopped.stdout
        assert local.find() is None
    finally:
        local.stop()
    assert_nothing_left(local)


def test_two_racing_starters_get_one_head(shared: Shared) -> None:
    assert shared.reported == [shared.head.pid] * 2
    mark = str(shared.local.temp_dir)
    assert sorted(marked(mark).values()).count("gcs_server") == 1
    assert sorted(marked(mark).values()).count("raylet") == 1


def test_head_outlives_the_terminals_of_its_starters(shared: Shared) -> None:
    assert [os.WTERMSIG(status) for status in shared.exits] == [signal.SIGHUP] * 2
    assert shared.head.alive()
    assert shared.head.pid in processes_of(shared.local)


def test_start_writes_nothing_to_the_terminal(shared: Shared) -> None:
    lines = shared.shown.split("\n")
    assert [line.split()[0] for line in lines if line.strip()] == ["READY", "READY"]


def test_the_next_process_finds_the_head_at_once(shared: Shared) -> None:
    code = """
        import sys, time
        from vane_dagster.compute.local_head import LocalHead
        began = time.perf_counter()
        head = LocalHead().ensure()
        print(head.pid, time.perf_counter() - began, "ray" in sys.modules)
    """
    pid, seconds, imported = python(code, shared.home).stdout.split()
    assert int(pid) == shared.head.pid
    assert float(seconds) < 0.2
    assert imported == "False"


def test_state_is_private(shared: Shared) -> None:
    for folder in (shared.local.folder, shared.local.temp_dir):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in (Path(shared.head.token_path), shared.local.folder / "head.json"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert Path(shared.head.token_path).read_text() not in (
        (shared.local.folder / "head.json").read_text() + shared.local.log_path.read_text()
    )


def test_socket_paths_fit(shared: Shared) -> None:
    sockets = list(Path(shared.head.session_dir).glob("sockets/*"))
    assert sockets
    # Sessions are named by date and pid, and a pid has up to 7 digits.
    assert max(len(str(path)) for path in sockets) + 7 < 107


def test_every_socket_listens_on_loopback(shared: Shared) -> None:
    driven(
        """
        from vane_dagster.compute.local_head import LocalHead, connect
        connect(LocalHead().ensure(), namespace="sockets")
        import ray
        class Actor:
            def ping(self): pass
        held = ray.remote(num_cpus=0)(Actor).options(name="held", lifetime="detached").remote()
        ray.get(held.ping.remote())
        """,
        shared.home,
    )
    agents = ("dashboard_agent_listen_port", "metrics_export_port", "runtime_env_agent_port")
    session = Path(shared.head.session_dir)
    until(lambda: all(list(session.glob(f"{name}_*")) for name in agents), "Ray's agents listen")
    listening = listening_sockets(processes_of(shared.local))
    titles = {title.split()[0].rpartition("/")[2] for _, title in listening}
    assert {"gcs_server", "raylet", "ray::Actor"} <= titles
    assert "ray::RuntimeEnvAgent" in titles  # a dashboard agent too, with ray[default]
    assert {ip for ip, _ in listening} <= LOOPBACK
    assert not any("ray.util.client.server" in title for _, title in listening)
    # The same by the code's own list: `stop` knows every process that holds a socket.
    assert set(listening_sockets(set(marked(str(shared.local.temp_dir))))) == set(listening)


def listening_sockets(pids: set[int]) -> list[tuple[str, str]]:
    """The address and the command of each socket that processes listen on."""
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        for opened in process.net_connections(kind="inet"):
            if opened.status == psutil.CONN_LISTEN:
                found.append((opened.laddr.ip, " ".join(process.cmdline())))
    return found


def test_token_is_needed(shared: Shared, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("f" * 64)
    code = f"import ray; ray.init(address={shared.head.address!r}); print('IN', end=' ')"
    base = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    without = python(code, shared.home, base, check=False)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}
    with_wrong = python(code, shared.home, base | token, check=False)
    token["RAY_AUTH_TOKEN_PATH"] = shared.head.token_path
    with_right = python(code, shared.home, base | token)
    assert with_right.stdout.startswith("IN")
    for refused in (without, with_wrong):
        assert refused.returncode != 0
        assert "IN" not in refused.stdout
        assert "InvalidAuthToken" in refused.stderr


@pytest.mark.parametrize("first", ["import ray", "pass"])
def test_connect_in_any_state_of_ray_and_environment(shared: Shared, first: str) -> None:
    code = f"""
        {first}
        import signal
        from vane_dagster.compute.local_head import LocalHead, connect
        mine = lambda number, frame: None
        signal.signal(signal.SIGTERM, mine)
        head = LocalHead().ensure()
        connect(head, namespace="here")
        connect(head)
        import ray
        context = ray.get_runtime_context()
        print(ray.get(ray.remote(lambda: "ran").remote()), context.namespace, context.gcs_address)
        assert signal.getsignal(signal.SIGTERM) is mine
    """
    done = python(code, shared.home, {**HOSTILE, "RAY_AUTH_TOKEN": "wrong"})
    assert done.stdout.split() == ["ran", "here", shared.head.address]
    assert done.stderr == ""


def test_connect_from_a_thread(shared: Shared) -> None:
    code = """
        import threading
        from vane_dagster.compute.local_head import LocalHead, connect
        thread = threading.Thread(target=connect, args=[LocalHead().ensure()])
        thread.start(); thread.join()
        import ray
        print(ray.is_initialized())
    """
    assert driven(code, shared.home).stdout == "True\n"


def test_connect_fails_at_once_where_nothing_answers(shared: Shared) -> None:
    ray.shutdown()  # from the head of tests before
    gone = dataclasses.replace(shared.head, address=f"127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(ComputeError, match=f"{gone.address}' cannot be reached"):
        connect(gone)
    assert time.monotonic() - began < 1


def test_workers_get_the_starters_environment_without_its_traps(shared: Shared) -> None:
    code = """
        import json, os
        from vane_dagster.compute.local_head import LocalHead, connect
        connect(LocalHead().ensure())
        import ray
        print(json.dumps(ray.get(ray.remote(lambda: [os.getcwd(), dict(os.environ)]).remote())))
        print(json.dumps(ray.cluster_resources()))
    """
    lines = driven(code, shared.home).stdout.splitlines()
    folder, environment = json.loads(lines[0])
    assert folder == str(shared.local.folder)
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == os.environ["HOME"]
    assert "PYTHONPATH" not in environment
    assert not {item for item in HOSTILE.items() if environment.get(item[0]) == item[1]}
    resources = json.loads(lines[1])
    assert (resources["CPU"], resources["slot"]) == (2, 3)


def test_other_settings_than_the_running_heads_are_an_error(shared: Shared) -> None:
    same = LocalHead(num_cpus=2, resources={"slot": 3}, home=shared.home)
    assert same.ensure() == shared.head
    with pytest.raises(ComputeError, match=r"started with --num-cpus=2 .* asks for --num-cpus=7"):
        LocalHead(num_cpus=7, home=shared.home).ensure()


def test_a_head_is_alive_while_both_of_its_processes_accept_connections(
    shared: Shared, tmp_path: Path
) -> None:
    other = LocalHead(home=shared.home, name="record")
    other.folder.mkdir()
    record = other.folder / "head.json"
    record.write_text(json.dumps(dataclasses.asdict(shared.head)))
    assert other.find() == shared.head
    for gone in ({"address": f"127.0.0.1:{free_port()}"}, {"session_dir": str(tmp_path)}):
        dead = dataclasses.replace(shared.head, **gone)
        record.write_text(json.dumps(dataclasses.asdict(dead)))
        assert other.find() is None
        assert not record.exists()
    assert shared.head.alive()


def test_find_leaves_a_stale_record_to_whoever_holds_the_lock(shared: Shared) -> None:
    other = LocalHead(home=shared.home, name="locked")
    other.folder.mkdir()
    record = other.folder / "head.json"
    dead = dataclasses.replace(shared.head, session_dir="/nowhere")
    record.write_text(json.dumps(dataclasses.asdict(dead)))
    with LocalHead(home=shared.home, name="locked")._flock():
        assert other.find() is None
        assert record.exists()
    assert other.find() is None
    assert not record.exists()


def test_an_unreadable_record_is_no_head(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path)
    local.folder.mkdir(parents=True)
    for text in ("{", "[]", "{}", '{"settings": [], "unknown": 1}'):
        (local.folder / "head.json").write_text(text)
        assert local.find() is None


def test_drivers_are_seen_whatever_they_connect_by(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain Ray driver counts from when it is connected until it ends, killed or not."""
    code = f"import ray; ray.init({shared.head.address!r}); print('IN', flush=True); input()"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": shared.head.token_path}
    environment = {**driver_environment(shared.home), **LOOPBACK_ONLY, **token}
    mark = str(shared.local.temp_dir)
    assert drivers(mark, shared.head.address) == {}
    plain = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=-1, stdout=-1, text=True
    )
    try:
        assert plain.stdout is not None
        while "IN" not in (line := plain.stdout.readline()):
            assert line
        assert set(drivers(mark, shared.head.address)) == {plain.pid}
        with monkeypatch.context() as mac:
            mac.setattr(psutil, "net_connections", lambda kind: (_ for _ in ()).throw(DENIED))
            assert set(drivers(mark, shared.head.address)) == {plain.pid}
        listed = json.loads(cli(shared.home, "list", "--json").stdout)
        (mine,) = [one for one in listed if one["address"] == shared.head.address]
        assert [driver["pid"] for driver in mine["drivers"]] == [plain.pid]
        assert mine["idle_seconds"] is None
    finally:
        plain.kill()
        plain.communicate()
    until(lambda: not drivers(mark, shared.head.address), "the driver is gone")


DENIED = psutil.AccessDenied()


def test_heads_are_listed_with_what_they_claim(shared: Shared) -> None:
    done = cli(shared.home, "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (head,) = json.loads(done.stdout)
    assert head["environment"] == sys.prefix
    assert (head["address"], head["pid"]) == (shared.head.address, shared.head.pid)
    assert (head["name"], head["cpus"], head["gpus"]) == ("default", 2, 0)
    assert head["processes"] >= 5
    assert head["memory_bytes"] > 100e6
    assert head["drivers"] == []
    # It is not watched, so nobody knows since when it is idle.
    assert [head[n] for n in ("idle_seconds", "idle_minutes", "stops_at")] == [None] * 3
    shown = cli(shared.home, "list").stdout.splitlines()
    assert shown[0].split()[:4] == ["NAME", "ENVIRONMENT", "ADDRESS", "PID"]
    assert shown[1].split()[:3] == ["default", sys.prefix, shared.head.address]

    state = json.loads(cli(shared.home, "status", "--json").stdout)
    assert state["running"]
    assert state["total"]["slot"] == state["free"]["slot"] == 3
    text = cli(shared.home, "status").stdout
    assert shared.head.address in text
    assert "  slot: 3 of 3" in text.splitlines()


def test_no_head_is_an_empty_list(tmp_path: Path) -> None:
    assert json.loads(cli(tmp_path, "list", "--json").stdout) == []
    assert "No local head is running" in cli(tmp_path, "list").stdout
    down = cli(tmp_path, "status", "--json")
    assert (down.returncode, json.loads(down.stdout)["running"]) == (1, False)
    assert "nothing to stop" in cli(tmp_path, "stop", "--all").stdout


def test_a_head_is_stopped_by_its_address(shared: Shared) -> None:
    wrong = cli(shared.home, "stop", "--address", "127.0.0.1:1")
    assert wrong.returncode == 1
    assert f"has the address '127.0.0.1:1'; running: '{shared.head.address}'" in wrong.stderr
    both = cli(shared.home, "stop", "--address", "127.0.0.1:1", "--all")
    assert both.returncode == 2
    empty = cli(shared.home, "stop", "--name", "")
    assert "nothing to stop" in empty.stdout  # and not the default head
    assert shared.head.alive()


@pytest.mark.parametrize(
    ("command", "options"), [(["cluster", "status"], []), (["pools"], ["--json"])]
)
def test_a_head_whose_gcs_hangs_is_an_error(
    shared: Shared, command: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()  # from the head of tests before
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(shared.home))
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    os.kill(shared.head.pid, signal.SIGSTOP)
    try:
        done = CliRunner().invoke(main, [*command, *options])
    finally:
        os.kill(shared.head.pid, signal.SIGCONT)
    assert done.exit_code == 1
    message = json.loads(done.stdout)["error"] if options else done.stderr
    assert f"{shared.head.address}' cannot be reached: no response within 0.3 s" in message
    assert f"`vane-dagster cluster stop --address {shared.head.address}`" in message


def test_stop_on_the_command_line_ends_leftovers_and_nothing_else(shared: Shared) -> None:
    half = LocalHead(home=shared.home, name="half")
    half.folder.mkdir()
    environment = {**os.environ, processes.MARK: str(half.temp_dir)}
    leftover = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    try:
        ended = cli(shared.home, "stop", "--name", "half")
        assert "leftover processes of it were ended" in ended.stdout
        assert leftover.wait(timeout=5) == -signal.SIGTERM
        again = cli(shared.home, "stop", "--name", "half")
        assert again.returncode == 0
        assert "nothing to stop" in again.stdout
        assert shared.head.alive()
    finally:
        leftover.kill()


def test_a_failing_start_says_why(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path, resources={"CPU": 1.0})
    with pytest.raises(ComputeError) as caught:
        local.ensure()
    message = str(caught.value)
    assert "`CPU` cannot be a custom resource" in message
    assert "Traceback" not in message
    assert "\n" not in message
    assert str(local.log_path) in message
    assert local.log_path.is_file()
    assert local.find() is None
    local.stop()
    assert_nothing_left(local)


def test_a_head_that_dies_as_it_starts_is_an_error(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path)
    local.folder.mkdir()
    (local.temp_dir / "r").mkdir(parents=True)
    (local.temp_dir / "r" / "ray_current_cluster").write_text("127.0.0.1:6379")
    with pytest.raises(ComputeError, match="died right after its start"):
        local._describe()
    local.stop()


def test_a_start_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_head, "START_SECONDS", 0.2)
    local = LocalHead(home=tmp_path)
    with pytest.raises(
        ComputeError, match=r"not ready after 0.2 s. Ray says: nothing \(asked for: "
    ):
        local.ensure()
    local.stop()
    assert_nothing_left(local)


def test_a_head_that_would_listen_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalHead(num_cpus=1, home=tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def elsewhere() -> None:
        environment = {**os.environ, processes.MARK: str(local.temp_dir)}
        started.append(subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True))
        (local.temp_dir / "r").mkdir()
        (local.temp_dir / "r" / "ray_current_cluster").write_text("192.0.2.1:6379")

    monkeypatch.setattr(local, "_launch", elsewhere)
    with pytest.raises(ComputeError, match=r"expected 127\.0\.0\.1: it was ended at once"):
        local.ensure()
    assert started[0].wait(timeout=5) == -signal.SIGTERM
    assert local.find() is None
    local.stop()
    assert_nothing_left(local)


def test_ray_keeps_to_the_loopback_address_with_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a head listens on the machine's own address: the switch is what counts."""
    from ray._private import ray_constants, services

    assert {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"} == LOOPBACK_ONLY
    for is_on, loopback in (("1", False), ("0", True)):
        monkeypatch.setenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, is_on)
        value = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)
        monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", value)
        found = services.resolve_ip_for_localhost("127.0.0.1")
        assert (found == "127.0.0.1") == loopback


def test_identity_differs_by_name_home_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(**options: str) -> tuple[Path, Path]:
        # The options are of many types.
        local = LocalHead(home=options.pop("home", tmp_path), **options)  # type: ignore[arg-type]  # a dict
        return local.folder, local.temp_dir

    places = [place(), place(name="other"), place(home=str(tmp_path / "home"))]
    for module, attribute in ((sys, "prefix"), (platform, "node")):
        with monkeypatch.context() as changed:
            value = "elsewhere" if attribute == "prefix" else lambda: "elsewhere"
            changed.setattr(module, attribute, value)
            places.append(place())
    assert place() == places[0]
    assert len({folder for folder, _ in places}) == len({temp for _, temp in places}) == 5


def test_a_state_folder_that_cannot_be_created_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    local = LocalHead(home=tmp_path / "file" / "state")
    expected = rf"state folder {local.folder} .* cannot be used: .*Set VANE_DAGSTER_HOME to"
    for use in (local.connect, local.ensure):
        with pytest.raises(ComputeError, match=expected):
            use()


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    local = LocalHead(home=tmp_path)
    local.folder.mkdir()
    monkeypatch.setattr("fcntl.flock", no_locks)
    expected = rf"{local.folder}/\w+ cannot be locked: No locks available. Set VANE_DAGSTER_HOME to"
    for use in (local.ensure, local.connect, local.stop):
        with pytest.raises(ComputeError, match=expected):
            use()


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path)
    (tmp_path / "trap").mkdir()
    local.temp_dir.symlink_to(tmp_path / "trap")
    try:
        with pytest.raises(ComputeError, match="is not private: it is a symbolic link"):
            local.ensure()
        assert list((tmp_path / "trap").iterdir()) == []
    finally:
        local.temp_dir.unlink()


def test_processes_that_will_not_end_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KILL_SECONDS", -processes.GRACE_SECONDS)
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    stubborn = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; read x"], env=environment, stdin=-1
    )
    try:
        while stubborn.pid not in marked(str(tmp_path)):
            time.sleep(0.01)
        with pytest.raises(ComputeError, match=rf"Processes {stubborn.pid}.* live on"):
            processes.end(str(tmp_path))
    finally:
        stubborn.kill()
        stubborn.communicate()


def test_a_process_that_lost_its_mark_is_known_by_its_session(tmp_path: Path) -> None:
    """As Ray's agents do, which overwrite their environment with their title."""
    script = "(env -i sleep 60 & echo $!); read x"
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    leader = subprocess.Popen(
        ["sh", "-c", script],
        env=environment,
        stdin=-1,
        stdout=-1,
        start_new_session=True,
        text=True,
    )
    try:
        assert leader.stdout is not None
        orphan = int(leader.stdout.readline())
        assert set(marked(str(tmp_path))) == {leader.pid, orphan}
        assert processes.end(str(tmp_path))
        assert not lives(orphan)
    finally:
        leader.kill()
        leader.communicate()
