"""A local head that is killed while it starts, and later, is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.head_processes import (
    assert_nothing_left,
    driver_environment,
    lives,
    processes_of,
    python,
)
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.processes import marked


@pytest.fixture
def default(tmp_path: Path) -> Iterator[Head]:
    """Another head, which stays."""
    local = LocalHead(num_cpus=1, home=tmp_path)
    yield local.ensure()
    local.stop()


def test_a_killed_head_is_replaced_and_its_leftovers_end(default: Head, tmp_path: Path) -> None:
    """The whole life of a second head: killed while it starts, killed later, replaced, stopped."""
    local = LocalHead(num_cpus=1, home=tmp_path, name="second")
    try:
        # A starter that is killed half-way leaves processes and no record.
        code = (
            "from vane_dagster.compute.local_head import LocalHead as L; L(name='second').ensure()"
        )
        command = [sys.executable, "-c", code]
        starter = subprocess.Popen(command, env=driver_environment(tmp_path))
        while "gcs_server" not in marked(str(local.temp_dir)).values():
            assert starter.poll() is None
            time.sleep(0.05)
        starter.kill()
        starter.wait()
        assert local.find() is None
        abandoned = set(marked(str(local.temp_dir)))

        first = local.ensure()
        assert not abandoned & processes_of(local)
        assert first.pid != default.pid
        assert first.address != default.address
        assert_switching_heads(default, tmp_path)

        leftover = int(python(LEAVE_PROCESS, tmp_path).stdout)
        assert lives(leftover)
        os.kill(first.pid, signal.SIGKILL)
        while first.alive():
            time.sleep(0.01)
        dead = processes_of(local)
        assert dead
        assert local.find() is None

        second = local.ensure()
        assert second.pid != first.pid
        assert not dead & processes_of(local)
        assert not lives(leftover)
        assert Path(first.session_dir, "logs").is_dir()
        assert local.find() == second

        assert local.stop()
        assert local.find() is None
        assert_nothing_left(local)
        assert not local.stop()
        assert default.alive()
    finally:
        local.stop()


# A detached actor with a child in a session of its own, which outlives its parent.
LEAVE_PROCESS = """
    from vane_dagster.compute.local_head import LocalHead, connect
    connect(LocalHead(name="second").ensure())
    import ray
    class Leaver:
        def leave(self):
            import subprocess
            self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return self.child.pid
    leaver = ray.remote(num_cpus=0)(Leaver).options(name="leaver", lifetime="detached").remote()
    print(ray.get(leaver.leave.remote()))
"""


def assert_switching_heads(default: Head, home: Path) -> None:
    """One process may leave a head for another, with another token, but only by saying so."""
    code = """
        from vane_dagster.errors import ComputeError
        from vane_dagster.compute.local_head import LocalHead, connect
        one, two = LocalHead().ensure(), LocalHead(name="second").ensure()
        connect(one)
        try:
            connect(two)
        except ComputeError as error:
            print(error)
        import ray
        ray.shutdown()
        connect(two)
        print(ray.get_runtime_context().gcs_address == two.address)
    """
    refusal, switched = python(code, home).stdout.splitlines()
    assert f"is connected to the Ray cluster at {default.address}" in refusal
    assert "ray.shutdown()" in refusal
    assert switched == "True"
