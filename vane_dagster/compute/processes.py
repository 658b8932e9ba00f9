"""The processes of a local Ray head: finding and ending them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import psutil

from vane_dagster._private_folder import MARK
from vane_dagster.errors import ComputeError, names
from vane_dagster.servers.guard import is_alive

GRACE_SECONDS = 1.0
KILL_SECONDS = 10.0


def marked(mark: str) -> dict[int, str]:
    """The live processes of a head, pid to name."""
    return {process.pid: name for process, name in _marked(mark).items()}


def _marked(mark: str) -> dict[Any, str]:
    """The live processes of a head, which psutil compares by pid and start time, and their names.

    These are this user's processes with its mark; those in the same terminal sessions, since some
    of Ray's processes overwrite their environment with their title; and all their descendants.
    """
    attributes = ["ppid", "name", "status", "environ", "uids"]
    # Not `process_iter(attributes)`, whose `info` another thread's call replaces.
    table = {
        process.pid: (process, info)
        for process in psutil.process_iter()
        if process.pid != os.getpid() and (info := _info(process, attributes)) is not None
        if info["status"] != psutil.STATUS_ZOMBIE
        if info["uids"] is not None and info["uids"].real == os.getuid()
    }
    pids = {pid for pid, (_, info) in table.items() if (info["environ"] or {}).get(MARK) == mark}
    sessions = {_session(pid) for pid in pids} - {None, _session(os.getpid())}
    pids |= {pid for pid in table if pids and _session(pid) in sessions}
    while more := {pid for pid, (_, info) in table.items() if info["ppid"] in pids} - pids:
        pids |= more
    return {process: info["name"] for process, info in map(table.__getitem__, pids)}


def _info(process: Any, attributes: list[str]) -> dict[str, Any] | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return dict(process.as_dict(attributes))
    return None


def drivers(mark: str, address: str) -> set[int]:
    """The processes that are connected to a head and are not its own.

    Uses the kernel's table of connections to the head's GCS, so it includes drivers that use plain
    Ray, and excludes killed drivers. The pid is 0 if the owner is not visible.
    """
    _, _, port = address.rpartition(":")
    pids = {
        connection.pid or 0
        for connection in _connections()
        if connection.status == psutil.CONN_ESTABLISHED
        and connection.raddr.port == int(port)
        and connection.raddr.ip.endswith("127.0.0.1")
    }
    return pids - set(marked(mark)) - {os.getpid()}


def _connections() -> list[Any]:
    """The machine's TCP connections that have a remote end."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows a user only the connections of its own processes
        connections = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.net_connections("tcp")
                connections += [SimpleNamespace(**c._asdict(), pid=process.pid) for c in own]
    return [connection for connection in connections if connection.raddr]


def end(mark: str) -> bool:
    """End every process of a head: first SIGTERM, then SIGKILL. Return whether there was one."""
    processes = set(_marked(mark))
    is_found = bool(processes)
    grace = time.monotonic() + GRACE_SECONDS
    _signal(processes, signal.SIGTERM)
    while processes := {each for each in processes if is_alive(each)} | set(_marked(mark)):
        if time.monotonic() > grace:
            _signal(processes, signal.SIGKILL)
        if time.monotonic() > grace + KILL_SECONDS:
            raise ComputeError(
                f"Processes {names(sorted(p.pid for p in processes))} of the local Ray head are "
                f"alive {KILL_SECONDS:g} s after SIGKILL. Find out what holds them (a driver, a "
                "network file system) before another head is started."
            )
        time.sleep(0.05)
    return is_found


def _signal(processes: Iterable[Any], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
