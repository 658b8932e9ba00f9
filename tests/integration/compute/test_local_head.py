"""The local Ray head: one per environment, outliving its starter, on loopback, behind a token."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
from vane_dagster.compute.connection import LOOPBACK_ONLY
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


def test_two_racing_starters_get_one_head_that_outlives_their_terminals(shared: Shared) -> None:
    assert shared.reported == [shared.head.pid] * 2
    mark = str(shared.local.temp_dir)
    assert sorted(marked(mark).values()).count("gcs_server") == 1
    assert sorted(marked(mark).values()).count("raylet") == 1
    assert [os.WTERMSIG(status) for status in shared.exits] == [signal.SIGHUP] * 2
    assert shared.head.alive()
    assert shared.head.pid in processes_of(shared.local)
    words = [line.split()[0] for line in shared.shown.split("\n") if line.strip()]
    assert words == ["READY", "READY"], "a start writes nothing to the terminal"


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
    same = LocalHead(num_cpus=2, resources={"slot": 3}, home=shared.home)
    assert same.ensure() == shared.head
    with pytest.raises(ComputeError, match=r"started with --num-cpus=2 .* asks for --num-cpus=7"):
        LocalHead(num_cpus=7, home=shared.home).ensure()


def test_state_is_private_and_paths_of_sockets_fit(shared: Shared) -> None:
    for folder in (shared.local.folder, shared.local.temp_dir):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in (Path(shared.head.token_path), shared.local.folder / "head.json"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert Path(shared.head.token_path).read_text() not in (
        (shared.local.folder / "head.json").read_text() + shared.local.log_path.read_text()
    )
    sockets = list(Path(shared.head.session_dir).glob("sockets/*"))
    # Sessions are named by date and pid, and a pid has up to 7 digits.
    assert 0 < max(len(str(path)) for path in sockets) + 7 < 107


def test_every_socket_listens_on_loopback(shared: Shared) -> None:
    driven(
        """
        from vane_dagster.compute.local_head import LocalHead, connect
        connect(LocalHead().ensure())
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


def test_connect_in_any_state_of_ray_and_environment(shared: Shared) -> None:
    """Workers get the starter's environment, without its traps."""
    code = """
        import ray
        import json, os, signal
        from vane_dagster.compute.local_head import LocalHead, connect
        mine = lambda number, frame: None
        signal.signal(signal.SIGTERM, mine)
        head = LocalHead().ensure()
        connect(head)
        connect(head)
        context = ray.get_runtime_context()
        print(json.dumps([context.namespace, context.gcs_address, ray.cluster_resources()]))
        print(json.dumps(ray.get(ray.remote(lambda: [os.getcwd(), dict(os.environ)]).remote())))
        assert signal.getsignal(signal.SIGTERM) is mine
    """
    done = python(code, shared.home, {**HOSTILE, "RAY_AUTH_TOKEN": "wrong"})
    connected, ran = done.stdout.splitlines()
    namespace, address, resources = json.loads(connected)
    assert (namespace, address) == ("vane_dagster", shared.head.address)
    assert (resources["CPU"], resources["slot"]) == (2, 3)
    folder, environment = json.loads(ran)
    assert folder == str(shared.local.folder)
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == os.environ["HOME"]
    assert "PYTHONPATH" not in environment
    assert not {item for item in HOSTILE.items() if environment.get(item[0]) == item[1]}
    assert done.stderr == ""


def test_a_head_is_alive_while_both_of_its_processes_accept_connections(
    shared: Shared, tmp_path: Path
) -> None:
    """What cannot be read is no head."""
    other = LocalHead(home=shared.home, name="record")
    other.folder.mkdir()
    record = other.folder / "head.json"
    record.write_text(json.dumps(dataclasses.asdict(shared.head)))
    assert other.find() == shared.head
    for gone in ({"address": f"127.0.0.1:{free_port()}"}, {"session_dir": str(tmp_path)}):
        dead = dataclasses.replace(shared.head, **gone)
        record.write_text(json.dumps(dataclasses.asdict(dead)))
        assert other.find() is None
    for text in ("{", "[]", "{}", '{"settings": [], "unknown": 1}'):
        record.write_text(text)
        assert other.find() is None


def test_drivers_are_seen_whatever_they_connect_by(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain Ray driver counts from when it is connected until it ends, killed or not."""
    code = f"import ray; ray.init({shared.head.address!r}); print('IN', flush=True); input()"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": shared.head.token_path}
    environment = {**driver_environment(shared.home), **LOOPBACK_ONLY, **token}
    mark = str(shared.local.temp_dir)
    assert drivers(mark, shared.head.address) == set()
    command = [sys.executable, "-c", code]
    with ended(subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)) as plain:
        while "IN" not in (line := plain.stdout.readline()):
            assert line
        assert drivers(mark, shared.head.address) == {plain.pid}
        with monkeypatch.context() as mac:
            mac.setattr(psutil, "net_connections", lambda kind: (_ for _ in ()).throw(DENIED))
            assert drivers(mark, shared.head.address) == {plain.pid}
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
    assert head["drivers"] == []
    shown = cli(shared.home, "list").stdout.splitlines()
    assert shown[0].split()[:4] == ["NAME", "ENVIRONMENT", "ADDRESS", "PID"]
    assert shown[1].split()[:3] == ["default", sys.prefix, shared.head.address]

    state = json.loads(cli(shared.home, "status", "--json").stdout)
    assert state["running"]
    assert state["total"]["slot"] == state["free"]["slot"] == 3
    text = cli(shared.home, "status").stdout
    assert shared.head.address in text
    assert "  slot: 3 of 3" in text.splitlines()


def test_no_head_is_an_empty_list_and_a_head_is_stopped_by_its_address(
    shared: Shared, tmp_path: Path
) -> None:
    assert json.loads(cli(tmp_path, "list", "--json").stdout) == []
    assert "No local head is running" in cli(tmp_path, "list").stdout
    down = cli(tmp_path, "status", "--json")
    assert (down.returncode, json.loads(down.stdout)["running"]) == (1, False)
    assert "nothing to stop" in cli(tmp_path, "stop", "--all").stdout
    wrong = cli(shared.home, "stop", "--address", "127.0.0.1:1")
    assert wrong.returncode == 1
    assert f"has the address '127.0.0.1:1'; running: '{shared.head.address}'" in wrong.stderr
    assert cli(shared.home, "stop", "--address", "127.0.0.1:1", "--all").returncode == 2
    assert shared.head.alive()


def test_a_head_whose_gcs_hangs_is_an_error(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()  # from the head of tests before
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(shared.home))
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    os.kill(shared.head.pid, signal.SIGSTOP)
    try:
        done = CliRunner().invoke(main, ["pools", "--json"])
    finally:
        os.kill(shared.head.pid, signal.SIGCONT)
    assert done.exit_code == 1
    message = json.loads(done.stdout)["error"]
    assert f"{shared.head.address}' cannot be reached: no response within 0.3 s" in message
    assert f"`vane-dagster cluster stop --address {shared.head.address}`" in message


def test_stop_on_the_command_line_ends_leftovers_and_nothing_else(shared: Shared) -> None:
    half = LocalHead(home=shared.home, name="half")
    half.folder.mkdir()
    with ended(marked_process(str(half.temp_dir), "sleep", "60")) as leftover:
        done = cli(shared.home, "stop", "--name", "half")
        assert "leftover processes of it were ended" in done.stdout
        assert leftover.wait(timeout=5) == -signal.SIGTERM
        assert shared.head.alive()


def started_wrongly(local: LocalHead) -> str:
    """The message of a start that fails, of which nothing is left."""
    with pytest.raises(ComputeError) as caught:
        local.ensure()
    assert local.find() is None
    local.stop()
    assert_nothing_left(local)
    return str(caught.value)


def test_a_failing_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalHead(home=tmp_path, resources={"CPU": 1.0})
    message = started_wrongly(local)
    assert "`CPU` cannot be a custom resource" in message
    assert "Traceback" not in message
    assert "\n" not in message
    assert str(local.log_path) in message
    assert local.log_path.is_file()

    monkeypatch.setattr(local_head, "START_SECONDS", 0.2)
    hangs = started_wrongly(LocalHead(home=tmp_path / "hangs"))
    assert "not ready after 0.2 s. Ray says: nothing (asked for: " in hangs


def test_a_head_that_would_listen_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalHead(num_cpus=1, home=tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def elsewhere() -> None:
        started.append(marked_process(str(local.temp_dir), "sleep", "60"))
        (local.temp_dir / "r").mkdir()
        (local.temp_dir / "r" / "ray_current_cluster").write_text("192.0.2.1:6379")

    monkeypatch.setattr(local, "_launch", elsewhere)
    assert "expected 127.0.0.1: it was ended at once" in started_wrongly(local)
    assert started[0].wait(timeout=5) == -signal.SIGTERM


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_state_folder_that_cannot_be_used_names_the_setting(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be created; and its file system has no locks."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if has_locks:
        (tmp_path / "file").touch()
        local = LocalHead(home=tmp_path / "file" / "state")
        expected = rf"state folder {local.folder} .* cannot be used: .*"
    else:
        local = LocalHead(home=tmp_path)
        local.folder.mkdir()
        monkeypatch.setattr("fcntl.flock", no_locks)
        expected = rf"{local.folder}/\w+ cannot be locked: No locks available. "
    for use in (local.connect, local.ensure, *([] if has_locks else [local.stop])):
        with pytest.raises(ComputeError, match=f"{expected}Set VANE_DAGSTER_HOME to"):
            use()


def marked_process(mark: str, *command: str, **given: Any) -> subprocess.Popen[Any]:
    """A process that runs as one of the head with a mark."""
    environment = {**os.environ, processes.MARK: mark}
    return subprocess.Popen(command, env=environment, start_new_session=True, **given)


def test_a_process_that_lost_its_mark_is_known_by_its_session(tmp_path: Path) -> None:
    """As Ray's agents do, which overwrite their environment with their title."""
    script = "(env -i sleep 60 & echo $!); read x"
    pipes = {"stdin": -1, "stdout": -1, "text": True}
    with ended(marked_process(str(tmp_path), "sh", "-c", script, **pipes)) as leader:
        orphan = int(leader.stdout.readline())
        assert set(marked(str(tmp_path))) == {leader.pid, orphan}
        assert processes.end(str(tmp_path))
        assert not lives(orphan)


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[Any]:
    """A process that is killed at the end."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
