"""Ends what a worker has started when the worker is killed, and frees what that leaves behind.

vLLM runs its engine in processes of its own, which don't notice that theirs was killed and hold the
GPU on; and shared memory of killed processes stays. A guard is a pair of small processes. One
watches and ends them. The other is Python's own resource tracker, which is told of each segment as
it is made and frees what is left: the one that a worker would start is killed with its session. The
file is run as it is, imports the standard library alone, and needs Linux.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_EVERY_SECONDS = 0.5
_GRACE_SECONDS = 1.0


def start(folder: str) -> None:
    """Starts a guard over the processes that this one has, and those that it will have.

    It is in a session of its own and no child: workers are killed with their session, and Ray's
    workers end their children.

    Args:
        folder: A folder that is removed in the end.
    """
    if not os.path.isdir("/proc/self/task"):
        return
    own = os.getpid()
    read_end, write_end = os.pipe()
    command = [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(own),
        str(_begun(own)),
        folder,
        str(read_end),
    ]
    subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[read_end],
    )
    os.close(read_end)
    _use_tracker(write_end)


def _use_tracker(write_end: int) -> None:
    """Has this process tell a tracker of what it makes, as a process that is spawned is made to."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        tracker._fd = write_end
    else:  # it has one of its own, which knows of segments already
        os.close(write_end)


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


def _watch(parent: int, begun: str, folder: str) -> None:
    """Waits for a process's end, and then ends its children and theirs."""
    known: dict[int, str] = {}
    while _begun(parent) == begun:
        known = {pid: when for pid, when in known.items() if _begun(pid) == when}
        known.update(_children(parent))
        for child in list(known):
            known.update(_children(child))
        time.sleep(_EVERY_SECONDS)
    for child in list(known):
        known.update(_children(child))
    time.sleep(_GRACE_SECONDS)
    for pid, when in known.items():
        if _begun(pid) == when:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parent, begun, folder, read_end = sys.argv[1:]
    if not os.fork():  # whom it was started by waits for this one alone
        if os.fork():
            os.close(int(read_end))
            _watch(int(parent), begun, folder)
        else:
            resource_tracker.main(int(read_end))
