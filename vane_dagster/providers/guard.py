"""Ends what a worker has started when the worker is killed.

vLLM runs its engine in processes of its own, which don't notice that theirs was killed and hold the
GPU on. A guard is one more small process: it watches, and ends them. It is run as a file, imports
the standard library alone, and needs Linux.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_EVERY_SECONDS = 0.5
_GRACE_SECONDS = 1.0
_TRACKER = b"resource_tracker"
"""Python's own helper, which frees shared memory after the others and then ends by itself."""


def start() -> None:
    """Starts a guard over the processes that this one has, and those that it will have."""
    if os.path.isdir("/proc/self/task"):
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _begun(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


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


def _watch(parent: int) -> None:
    """Waits for a process's end, and then ends its children, and theirs."""
    begun = _begun(parent)
    known: dict[int, str] = {}
    while begun is not None and os.getppid() == parent:
        known.update(_children(parent))
        time.sleep(_EVERY_SECONDS)
    for child in list(known):
        for grandchild, when in _children(child).items():
            known.setdefault(grandchild, when)
    time.sleep(_GRACE_SECONDS)
    for pid, when in known.items():
        try:
            if _begun(pid) == when and _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
