"""Ends a killed worker's descendants, and frees the shared memory that they leave behind.

vLLM runs its engine in separate processes. They do not notice that their parent was killed, and
keep holding the GPU. The shared memory of killed processes also remains. A guard is a pair of small
processes. One watches the worker and ends its descendants. The other is Python's resource tracker:
processes register each shared memory segment with it on creation, and it frees those that remain.
The tracker that a worker would start itself is killed with the worker's session. This file is
executed as a script, imports only the standard library, and requires Linux.
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
    """Start a guard for the current and future descendants of this process.

    The guard runs in its own session and is not a child: workers are killed together with their
    session, and Ray's workers end their children.
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
    """Register this process's segments with a tracker, as multiprocessing does when it spawns."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        tracker._fd = write_end
    else:  # it already has a tracker, with its own segments
        os.close(write_end)


def _begun(pid: int) -> str | None:
    """Return the start time of a process in kernel clock ticks; None if it has exited."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state == "Z" else fields[18]


def _children(pid: int) -> dict[int, str]:
    """Return the children of a process and their start times."""
    found = {}
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            children = [int(child) for child in Path(path).read_text().split()]
        except OSError:  # the thread has exited
            continue
        for child in children:
            begun = _begun(child)
            if begun is not None and child != os.getpid():
                found[child] = begun
    return found


def _watch(parent: int, begun: str, folder: str) -> None:
    """Wait for a process to exit, then end its children and grandchildren and remove the folder."""
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
            with suppress(ProcessLookupError):  # it has exited meanwhile
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parent, begun, folder, read_end = sys.argv[1:]
    if not os.fork():  # the caller waits only for this process
        if os.fork():
            os.close(int(read_end))
            _watch(int(parent), begun, folder)
        else:
            resource_tracker.main(int(read_end))
