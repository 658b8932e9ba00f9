"""The processes of a local Ray head: finding them, checking that they live, ending them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vane_dagster._private_folder import MARK
from vane_dagster.errors import ComputeError, names

GRACE_SECONDS = 1.0
KILL_SECONDS = 10.0


def birth(pid: int) -> str | None:
    """Start time of a process, as a token to compare; None for a dead process or a zombie."""
    if sys.platform == "linux":
        # Ticks since boot: psutil's time moves with the wall clock.
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def marked(mark: str) -> dict[int, str]:
    """The live processes of a head, pid to name.

    These are this user's processes with its mark; those in the same terminal sessions, since some
    of Ray's processes overwrite their environment with their title; and all their descendants.
    """
    psutil = _psutil()
    attributes = ["pid", "ppid", "name", "status", "environ", "uids"]
    table = {
        info["pid"]: info
        for info in (process.info for process in psutil.process_iter(attributes))
        if info["status"] != psutil.STATUS_ZOMBIE and info["pid"] != os.getpid()
        if info["uids"] is not None and info["uids"].real == os.getuid()
    }
    found = {pid for pid, info in table.items() if (info["environ"] or {}).get(MARK) == mark}
    sessions = {_session(pid) for pid in found} - {None, _session(os.getpid())}
    found |= {pid for pid in table if found and _session(pid) in sessions}
    while more := {pid for pid, info in table.items() if info["ppid"] in found} - found:
        found |= more
    return {pid: table[pid]["name"] for pid in found}


def drivers(mark: str, address: str) -> dict[int, str]:
    """The processes that are connected to a head and are not its own, pid to name.

    Uses the kernel's table of connections to the head's GCS, so it includes drivers that use plain
    Ray, and excludes killed drivers. The pid is 0 if the owner is not visible.
    """
    psutil = _psutil()
    _, _, port = address.rpartition(":")
    pids = {
        connection.pid or 0
        for connection in _connections(psutil)
        if connection.status == psutil.CONN_ESTABLISHED
        and connection.raddr.port == int(port)
        and connection.raddr.ip.endswith("127.0.0.1")
    }
    found = {}
    for pid in pids - set(marked(mark)) - {os.getpid()}:
        found[pid] = "unknown"
        with contextlib.suppress(psutil.Error):
            found[pid] = psutil.Process(pid).name() if pid else "unknown"
    return found


def _connections(psutil: Any) -> list[Any]:
    """The machine's TCP connections that have a remote end."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows a user only the connections of its own processes
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.net_connections("tcp")
                found += [SimpleNamespace(**c._asdict(), pid=process.pid) for c in own]
    return [connection for connection in found if connection.raddr]


def memory_of(pids: Iterable[int]) -> int:
    """Bytes held by processes; shared memory is divided among them if the kernel reports shares."""
    psutil = _psutil()
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(pid).memory_full_info()
            total += getattr(memory, "pss", memory.uss)
    return total


def command_line(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a process; empty if it has ended."""
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        return process.cmdline(), process.environ()
    except psutil.Error:
        return [], {}


def end(mark: str) -> bool:
    """End every process of a head: first SIGTERM, then SIGKILL. Return whether there was one."""
    found = _births(marked(mark))
    everything = dict(found)
    _signal(found, signal.SIGTERM)
    grace = time.monotonic() + GRACE_SECONDS
    deadline = grace + KILL_SECONDS
    while left := {**_living(everything), **_births(marked(mark))}:
        everything.update(left)
        if time.monotonic() > grace:
            _signal(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ComputeError(
                f"Processes {names(sorted(left))} of the local Ray head live on "
                f"{KILL_SECONDS:g} s after SIGKILL. Find out what holds them (a driver, a "
                "network file system) before another head is started."
            )
        time.sleep(0.05)
    return bool(found)


def _births(pids: dict[int, str]) -> dict[int, str]:
    return {pid: born for pid in pids if (born := birth(pid)) is not None}


def _living(births: dict[int, str]) -> dict[int, str]:
    return {pid: born for pid, born in births.items() if birth(pid) == born}


def _signal(births: dict[int, str], number: signal.Signals) -> None:
    for pid in _living(births):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _psutil() -> Any:
    """psutil, which Ray bundles in its own folder: located without importing ray.

    Ray reads settings from the environment at import, and those may be set later.
    """
    if importlib.util.find_spec("psutil") is None:
        ray = importlib.util.find_spec("ray")
        if ray is not None and ray.origin is not None:
            sys.path.append(str(Path(ray.origin).parent / "thirdparty_files"))
    return importlib.import_module("psutil")
