"""Processes of local heads, and programs that use one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import vane_dagster
from support import forked
from support.pool_models import alive as lives
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked

ROOT = Path(next(iter(vane_dagster.__path__))).parent


def python(
    code: str, home: Path, environment: Mapping[str, str] = {}, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, as a driver of the head whose state lies in `home`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**driver_environment(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def driver_environment(home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**clean, "VANE_DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT)}


def cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"from vane_dagster.cli.main import main; main({['cluster', *arguments]})"
    return forked.run(["-c", code], driver_environment(home), ROOT, 120)


def processes_of(local: LocalHead) -> set[int]:
    """Return a head's processes, found unlike by the code under test: by its folder's name."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if str(local.temp_dir) in command:
            found.add(int(entry.name))
    sessions = set(filter(None, map(session_of, found)))
    everything = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return found | {pid for pid in everything if lives(pid) and session_of(pid) in sessions}


def session_of(pid: int) -> int | None:
    """The session of a process; None if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def assert_nothing_left(local: LocalHead) -> None:
    assert processes_of(local) == set()
    assert marked(str(local.temp_dir)) == {}
    assert not local.temp_dir.exists()
