"""A local head stops once no driver was connected for its idle time; its watcher is replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.forked import Program
from support.pool_models import until
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked

DRIVER = """
import os, sys, time, vane_dagster as vd
idle, here = float(sys.argv[1]) or None, sys.argv[2]
vd.LocalCluster(name="idle", num_cpus=1, idle_minutes=idle).connect()
open(here, "w").close()
while os.path.exists(here):
    time.sleep(0.05)
"""


class Driver:
    """A process that is connected until its file is removed."""

    def __init__(self, home: Path, idle_minutes: float) -> None:
        self.here = home / f"driver-{idle_minutes}"
        env = {**os.environ, "VANE_DAGSTER_HOME": str(home)}
        self.process = Program(["-c", DRIVER, str(idle_minutes), str(self.here)], env, home)
        until(self.here.exists, "it is connected", 60)

    def end(self) -> None:
        self.here.unlink()
        self.process.communicate(timeout=60)


def watchers(local: LocalHead) -> list[int]:
    """The pids of a head's watchers: at most one."""
    found = []
    for pid in marked(local.mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "idle_watcher" in command:
            found.append(pid)
    return found


def last_used(local: LocalHead) -> float:
    use = local.use()
    assert use is not None
    return use.last_used


def test_an_idle_head_ends_and_the_next_run_starts_another(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path, name="idle")
    try:
        one = Driver(tmp_path, 0.2)  # on a busy machine, time to connect
        LocalHead(home=tmp_path, name="idle", num_cpus=1, idle_minutes=0.01).ensure()
        first = local.find()
        assert first is not None
        (watcher,) = watchers(local)
        begun = last_used(local)
        until(lambda: last_used(local) > begun + 1.2, "it is used")  # twice the idle time
        assert first.alive()  # a driver is connected

        # A watcher that was killed is replaced by the next driver, and 0 is never.
        os.kill(watcher, signal.SIGKILL)
        until(lambda: not watchers(local), "the watcher ends")
        two = Driver(tmp_path, 0)
        assert not watchers(local)
        two.end()
        three = Driver(tmp_path, 0.01)
        assert len(watchers(local)) == 1
        one.end()
        assert local.find() == first
        three.end()

        until(lambda: not first.alive(), "the head ends", 60)
        until(lambda: marked(local.mark) == {}, "its processes end")
        assert local.read() is None
        assert "stopped the head at" in local.watcher_log.read_text()
        assert Path(first.session_dir, "logs").is_dir()

        Driver(tmp_path, 60).end()
        second = local.find()
        assert second is not None
        assert second.pid != first.pid
    finally:
        local.stop()
    assert marked(local.mark) == {}  # the watcher ends with its head
