"""Ends what a worker has started when the worker is killed, and frees what that leaves behind.

vLLM runs its engine in processes of its own, which don't notice that theirs was killed and hold the
GPU on; and shared memory of killed processes stays. A guard is one more small process: it watches,
ends them, and removes their shared memory. It is run as a file, imports the standard library alone,
and needs Linux.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_EVERY_SECONDS = 0.5
_GRACE_SECONDS = 1.0
_ENDING_SECONDS = 10.0
_SHARED = "/dev/shm/psm_"
"""How multiprocessing.shared_memory calls its segments."""
_TRACKER = b"resource_tracker"
"""Python's own helper, which frees shared memory after the others and then ends by itself."""


def start(folder: str) -> None:
    """Starts a guard over the processes that this one has, and those that it will have.

    It is in a session of its own and no child: workers are killed with their session, and Ray's
    workers end their children.

    Args:
        folder: A folder that is removed in the end.
    """
    if os.path.isdir("/proc/self/task"):
        own = os.getpid()
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(own), str(_begun(own)), folder],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _begun(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state == "Z" else fields[18]


def _children(pid: int) -> dict[int, str]:
    """The children of a process, and when they began."""
    found = {}
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            children = [int(child) for child in Path(path).read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            begun = _begun(child)
            if begun is not None and child != os.getpid():
                found[child] = begun
    return found


def _shared(pid: int) -> set[str]:
    """The segments of shared memory that a process has open."""
    found = set()
    for path in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            found.add(os.readlink(path))
        except OSError:  # it is closed, or the process has ended
            continue
    return {name for name in found if name.startswith(_SHARED) and not name.endswith(" (deleted)")}


def _watch(parent: int, begun: str, folder: str) -> None:
    """Waits for a process's end, and then ends its children and theirs, and frees their memory."""
    known: dict[int, str] = {}
    shared: set[str] = set()
    while _begun(parent) == begun:
        known = {pid: when for pid, when in known.items() if _begun(pid) == when}
        known.update(_children(parent))
        for child in list(known):
            known.update(_children(child))
        for pid in known:
            shared |= _shared(pid)
        shared = {name for name in shared if os.path.exists(name)}
        time.sleep(_EVERY_SECONDS)
    for child in list(known):
        known.update(_children(child))
    time.sleep(_GRACE_SECONDS)
    for pid, when in known.items():
        try:
            if _begun(pid) == when and _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue
    until = time.monotonic() + _ENDING_SECONDS
    while time.monotonic() < until and any(_begun(pid) == when for pid, when in known.items()):
        time.sleep(_EVERY_SECONDS)
    for name in shared:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if not os.fork():  # whom it was started by waits for this one alone
        _watch(int(sys.argv[1]), *sys.argv[2:])
