"""A local head stops once no driver was connected for its idle time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import write_source
from support.heads import HEAD
from vane_dagster.cli.main import main
from vane_dagster.compute import local_heads
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.local_heads import running_heads
from vane_dagster.compute.processes import marked


def test_a_driver_waits_while_the_head_is_being_stopped(tmp_path: Path) -> None:
    """And then finds it gone, rather than connect to a head that ends under it."""
    local = LocalHead(home=tmp_path, name="stopping")
    local.folder.mkdir()
    found: list[Head | None] = [HEAD]
    driver = threading.Thread(target=lambda: found.append(local.connect(start=False)))
    record = dataclasses.asdict(dataclasses.replace(HEAD, pid=os.getpid()))
    (local.folder / "head.json").write_text(json.dumps(record))

    def nobody_else() -> bool:
        driver.start()
        driver.join(0.2)
        assert driver.is_alive()
        return True

    assert local.stop_if(nobody_else)
    driver.join(30)
    assert found == [HEAD, None]


# A real head

DRIVER = """
import sys, vane_dagster as vd
idle = float(sys.argv[1]) or None
vd.LocalCluster(name="idle", num_cpus=1, idle_minutes=idle).connect()
print("IN", flush=True)
sys.stdin.read(1)
"""


class Driver:
    """A process that is connected until it is stopped."""

    def __init__(self, home: Path, idle_minutes: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(idle_minutes)],
            env={**os.environ, "VANE_DAGSTER_HOME": str(home)},
            stdin=-1,
            stdout=-1,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "IN\n"

    def end(self) -> None:
        self.process.communicate("x", timeout=60)


def watcher_of(local: LocalHead) -> int:
    """The pid of a head's watcher."""
    found = []
    for pid in marked(local.mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "idle_watcher" in command:
            found.append(pid)
    (pid,) = found
    return pid


def last_used(local: LocalHead) -> float:
    use = local.use()
    assert use is not None
    return use.last_used


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_idle_head_ends_and_the_next_run_starts_another(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path, name="idle")
    try:
        one = Driver(tmp_path, 0.01)
        first = local.find()
        assert first is not None
        watcher = watcher_of(local)
        begun = last_used(local)
        until(lambda: last_used(local) > begun + 1.2)  # twice the idle time
        assert first.alive()  # a driver is connected

        # A watcher that was killed is replaced by the next driver, and 0 is never.
        os.kill(watcher, signal.SIGKILL)
        until(lambda: not local.is_watched())
        two = Driver(tmp_path, 0)
        assert not local.is_watched()
        two.end()
        three = Driver(tmp_path, 0.01)
        assert local.is_watched()
        one.end()
        assert local.find() == first
        three.end()

        until(lambda: not first.alive())
        until(lambda: marked(local.mark) == {})
        assert local.read() is None
        assert "stopped the head at" in local.watcher_log.read_text()
        assert Path(first.session_dir, "logs").is_dir()

        Driver(tmp_path, 60).end()
        second = local.find()
        assert second is not None
        assert second.pid != first.pid
        (listed,) = running_heads(tmp_path)
        assert listed.resources["CPU"] == 1
        shown = CliRunner().invoke(
            main, ["cluster", "list", "--json"], env={"VANE_DAGSTER_HOME": str(tmp_path)}
        )
        (record,) = json.loads(shown.stdout)
        assert (record["name"], record["idle_minutes"], record["drivers"]) == ("idle", 60, [])
        assert record["stops_at"] == pytest.approx(last_used(local) + 3600)
        assert record["idle_seconds"] >= 0
    finally:
        local.stop()
    assert marked(local.mark) == {}  # the watcher ends with its head


def test_a_run_warns_of_a_head_that_competes(
    tmp_path: Path, cluster: vd.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.connect()
    head = cluster._head().find()
    monkeypatch.setattr(local_heads.os, "cpu_count", lambda: 2)
    other = dataclasses.replace(head, name="other", prefix="/env/other", address="127.0.0.1:1")
    folder = Path(os.environ["VANE_DAGSTER_HOME"]) / "other"
    folder.mkdir()
    (folder / "head.json").write_text(json.dumps(dataclasses.asdict(other)))
    try:
        path = write_source(tmp_path / "src", {"id": [1], "text": ["A"]})
        texts = vd.Pipeline("texts", source=vd.parquet(str(path)), id="id")
        texts.project("same", {"id": "id"})
        compute = vd.RayCompute(cluster=cluster, idle_timeout=7200)
        store = vd.FragmentStore(root=str(tmp_path / "store"))
        with dg.DagsterInstance.ephemeral() as instance:
            result = dg.materialize(
                [texts.build_assets()],
                resources={"compute": compute, "store": store},
                instance=instance,
            )
            logged = [r.user_message for r in instance.all_logs(result.run_id) if r.level == 30]
    finally:
        (folder / "head.json").unlink()
    (warning,) = [text for text in logged if "claims the same CPUs" in text]
    assert "Ray head 'other' of /env/other at 127.0.0.1:1" in warning
    (warning,) = [text for text in logged if "idle_timeout" in text]
    assert "idle_minutes=60" in warning
