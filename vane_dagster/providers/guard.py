"""Ends a killed worker's descendants, and frees the shared memory that they leave behind.

vLLM runs its engine in separate processes. They do not notice that their parent was killed, and
keep holding the GPU. The shared memory of killed processes also remains. A guard is a small process
with two threads. One watches the worker and ends its descendants. The other is Python's resource
tracker: processes register each shared memory segment with it on creation, and it frees those that
remain. The tracker that a worker would start itself is killed with the worker's session. It
requires Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil

from vane_dagster.servers.guard import is_alive, program

_EVERY_SECONDS = 0.5
_GRACE_SECONDS = 1.0


def start(folder: str) -> None:
    """Start a guard for the current and future descendants of this process.

    The guard runs in its own session and is not a child: workers are killed together with their
    session, and Ray's workers end their children.
    """
    if sys.platform != "linux":
        return
    read_end, write_end = os.pipe()
    subprocess.run(
        [sys.executable, "-I", "-c", program(main), str(os.getpid()), folder, str(read_end)],
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


def _watch(worker: psutil.Process, folder: str) -> None:
    """Wait for a process to exit, then end its descendants and remove the folder."""
    known: set[psutil.Process] = set()
    while is_alive(worker):
        with suppress(psutil.NoSuchProcess):
            known.update(worker.children(recursive=True))
        known = set(filter(is_alive, known))
        time.sleep(_EVERY_SECONDS)
    for process in list(known):
        with suppress(psutil.NoSuchProcess):
            known.update(process.children(recursive=True))
    time.sleep(_GRACE_SECONDS)
    for process in known:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the guard of a process, a folder and the reading end of a pipe: the arguments."""
    worker, folder, read_end = psutil.Process(int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    caller = os.getpid()
    if os.fork():  # the worker waits only for the caller
        return
    while os.getppid() == caller:
        time.sleep(0.01)
    threading.Thread(target=_watch, args=(worker, folder)).start()
    resource_tracker.main(read_end)
