"""The local Ray head: one per environment, outliving its starter, on loopback, behind a token."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import textwrap
from pathlib import Path

import psutil

from support import forked
from support.head_processes import (
    assert_nothing_left,
    cli,
    driver_environment,
    processes_of,
    python,
)
from support.pool_models import until
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked

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


def read_until(terminal: int, word: str) -> str:
    """What a terminal shows up to the end of the line that holds `word`."""
    shown = ""
    while word not in shown or not shown.endswith("\n"):
        shown += os.read(terminal, 1000).decode()
    return shown


def listening_sockets(pids: set[int]) -> list[tuple[str, str]]:
    """The address and the command of each socket that processes listen on."""
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        for opened in process.net_connections(kind="inet"):
            if opened.status == psutil.CONN_LISTEN:
                found.append((opened.laddr.ip, " ".join(process.cmdline())))
    return found


FIND = """
    import sys, time
    from vane_dagster.compute.local_head import LocalHead
    began = time.perf_counter()
    head = LocalHead().ensure()
    print(head.pid, time.perf_counter() - began, "ray" in sys.modules)
"""

HOLD = """
from vane_dagster.compute.local_head import LocalHead, connect
connect(LocalHead().ensure())
import ray
class Actor:
    def ping(self): pass
held = ray.remote(num_cpus=0)(Actor).options(name="held", lifetime="detached").remote()
ray.get(held.ping.remote())
"""

CONNECT = """
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


def test_a_head_from_its_start_to_its_end(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path)
    starters = [on_terminal(STARTER, tmp_path) for _ in range(2)]
    try:
        # Two racing starters get one head. It writes nothing to their terminals, and outlives them.
        texts = [read_until(terminal, "READY") for _, terminal in starters]
        for _, terminal in starters:
            os.close(terminal)
        ends = [os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid, _ in starters]
        assert ends == [signal.SIGHUP] * 2
        head = local.find()
        assert head is not None
        lines = [line for line in "".join(texts).splitlines() if line.strip()]
        assert lines == [f"READY {head.pid}"] * 2
        mark = str(local.temp_dir)
        for name in ("gcs_server", "raylet"):
            assert [*marked(mark).values()].count(name) == 1
        assert head.pid in processes_of(local)

        # The next process finds it at once, without Ray.
        pid, seconds, imported = python(FIND, tmp_path).stdout.split()
        assert (int(pid), imported) == (head.pid, "False")
        assert float(seconds) < 0.2

        # Its state is private, and the paths of its sockets fit.
        record, token = local.folder / "head.json", Path(head.token_path)
        for path, mode in (
            (local.folder, 0o700), (local.temp_dir, 0o700), (token, 0o600), (record, 0o600),
        ):  # fmt: skip
            assert path.stat().st_mode & 0o777 == mode
        assert token.read_text() not in record.read_text() + local.log_path.read_text()
        sockets = list(Path(head.session_dir).glob("sockets/*"))
        # Sessions are named by date and pid, and a pid has up to 7 digits.
        assert 0 < max(len(str(path)) for path in sockets) + 7 < 107

        # Every socket listens on loopback, and `stop` knows every process that holds one.
        forked.run(["-c", HOLD], driver_environment(tmp_path), tmp_path, timeout=120)
        agents = ("dashboard_agent_listen_port", "metrics_export_port", "runtime_env_agent_port")
        session = Path(head.session_dir)
        until(lambda: all([*session.glob(f"{name}_*")] for name in agents), "Ray's agents listen")
        listening = listening_sockets(processes_of(local))
        titles = {title.split()[0].rpartition("/")[2] for _, title in listening}
        # A dashboard agent too, with ray[default].
        assert {"gcs_server", "raylet", "ray::Actor", "ray::RuntimeEnvAgent"} <= titles
        assert {ip for ip, _ in listening} <= LOOPBACK
        assert not any("ray.util.client.server" in title for _, title in listening)
        assert set(listening_sockets(set(marked(mark)))) == set(listening)

        # Drivers connect in any environment; workers get the starter's, without its traps.
        done = python(CONNECT, tmp_path, {**HOSTILE, "RAY_AUTH_TOKEN": "wrong"})
        assert done.stderr == ""
        connected, ran = map(json.loads, done.stdout.splitlines())
        assert connected[:2] == ["vane_dagster", head.address]
        assert (connected[2]["CPU"], connected[2]["slot"]) == (2, 3)
        folder, environment = ran
        assert folder == str(local.folder)
        assert [environment[n] for n in ("PATH", "HOME")] == [
            os.environ[n] for n in ("PATH", "HOME")
        ]
        assert "PYTHONPATH" not in environment
        assert not {item for item in HOSTILE.items() if environment.get(item[0]) == item[1]}

        # An operator sees it, and stops it.
        listed = json.loads(cli(tmp_path, "list", "--json").stdout)
        (state,) = [each for each in listed if each["address"] == head.address]
        assert state["drivers"] == []
        assert state["options"] == ["--num-cpus=2", '--resources={"slot": 3}']
        assert state["processes"] >= 5
        stopped = cli(tmp_path, "stop", "--address", head.address)
        assert f"'default' of {sys.prefix} at {head.address} was stopped" in stopped.stdout
        assert local.find() is None
        assert_nothing_left(local)
    finally:
        local.stop()
