"""Worker processes forked from one that has imported Arrow, NumPy and pandas.

An interpreter that starts and imports them takes a second of CPU time, which is longer than most
tests. The parent of a forked worker is the test's process, as if it had started the worker itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_BYTES = 2**20


class ForkedProcess:
    """The part of `subprocess.Popen` that the driver uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.005)
        return code


class ForkServer:
    """The process that is forked. It ends with the process that started it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def start(
        self, command: Sequence[str], descriptor: int, env: Mapping[str, str]
    ) -> ForkedProcess:
        """Fork a worker.

        Args:
            command: The command that would start it; its last arguments are the worker's.
            descriptor: The worker's end of its socket.
            env: The worker's environment.
        """
        request = json.dumps([command[-2:], dict(env)]).encode()
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [request], [descriptor])
                return ForkedProcess(int(self._socket.recv(64)))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _adopt_orphans(adopts: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(requests: socket.socket) -> None:
    import random

    import numpy as np
    import pandas as pd  # noqa: F401  # Arrow imports it with the first array that it converts

    from vane_dagster.worker import local_worker

    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _BYTES, 1)
        if not request:
            return
        readable, writable = os.pipe()
        if (between := os.fork()) == 0:
            if (worker := os.fork()) > 0:  # the worker's parent ends, and the test adopts it
                os.write(writable, str(worker).encode())
                os._exit(0)
            for descriptor in (requests.fileno(), readable, writable):
                os.close(descriptor)
            os.setsid()
            arguments, env = json.loads(request)
            os.environ.clear()
            os.environ.update(env)
            sys.argv[1:] = [str(descriptors[0]), *arguments]
            random.seed()
            np.random.seed()
            try:
                local_worker.main()
            finally:
                os._exit(1)
        os.close(writable)
        os.close(descriptors[0])
        os.waitpid(between, 0)
        requests.send(os.read(readable, 64))
        os.close(readable)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with `python -m`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
