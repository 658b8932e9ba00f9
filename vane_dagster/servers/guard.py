"""The guard of a server: a small process between a worker and the server that it started.

No process of the server outlives the worker, whichever one of them is killed with SIGKILL:

===========  =======================================================================================
killed       consequence
===========  =======================================================================================
the worker   its pipe ends; the guard kills the server and all its descendants
the guard    the kernel kills the server; the worker kills its process group
the server   the guard kills its descendants, and reports it
===========  =======================================================================================

The guard adopts orphans (``PR_SET_CHILD_SUBREAPER``), so every process that the server starts
remains its descendant, even in a session of its own. The guard is not a child of the worker,
because Ray kills the child processes of a worker that it ends.

If worker and guard are killed at once, the kernel kills the server alone. Outside Linux only the
server's process group is killed.

Its process imports little, because each replica has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

_IS_LINUX = sys.platform == "linux"
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_CLEANERS = ("resource_tracker", "torch_shm_manager")
"""Processes of Python and PyTorch that remove shared memory after those that use it have ended."""
_CLEANERS_SECONDS = 1.0
_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0
_OUTPUT_SECONDS = 0.5


class GuardedServer:
    """A server process with its guard: the worker's side.

    Attributes:
        pid: The server's process id; None before it was started.
        ended: Set after the server, its descendants and the guard have ended.
        error: Why the command could not be started; empty if it was.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        label: str,
        log: Callable[[bytes], None],
        folder: str,
    ) -> None:
        self.pid: int | None = None
        self.ended = threading.Event()
        self.error = ""
        self._code: int | None = None
        self._lock = threading.Lock()
        self._launcher = subprocess.Popen(
            [sys.executable, "-I", "-c", program(main), str(os.getpid()), folder, label],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._send(json.dumps({"command": [*command], "env": {**env}}))
        self._output = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._output.start()
        threading.Thread(target=self._read, name=f"reports of {label}", daemon=True).start()

    def end(self, drain_s: float) -> None:
        """Send SIGTERM to the server, and SIGKILL to what is left after `drain_s` seconds.

        Waits until all processes have ended, except those that the kernel does not end.
        An earlier deadline replaces a later one.
        """
        self._send(str(drain_s))
        self.ended.wait(drain_s + 2 * _KILL_SECONDS)

    @property
    def outcome(self) -> str:
        """How the server has ended, for people."""
        if self.error:
            return self.error
        return "was killed with its guard process" if self._code is None else ending(self._code)

    def _send(self, line: str) -> None:
        assert self._launcher.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has ended
            self._launcher.stdin.write(line.encode() + b"\n")
            self._launcher.stdin.flush()

    def _copy(self, log: Callable[[bytes], None]) -> None:
        assert self._launcher.stderr is not None
        with self._launcher.stderr as output:
            while data := os.read(output.fileno(), 2**16):
                log(data)

    def _read(self) -> None:
        """Read reports until the guard has ended, and kill what a killed guard has left."""
        assert self._launcher.stdout is not None
        assert self._launcher.stdin is not None
        with self._launcher.stdout as reports:
            for line in reports:
                report = json.loads(line)
                self.pid = report.get("pid", self.pid)
                self._code = report.get("code", self._code)
                self.error = report.get("error", self.error)
        self._launcher.wait()
        if self._code is None and self.pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._output.join(_OUTPUT_SECONDS)
        with self._lock, contextlib.suppress(OSError):
            self._launcher.stdin.close()
        self.ended.set()


def program(function: Callable[[], None]) -> str:
    """Return code for another process of this Python that calls a function of a module."""
    at, name = function.__module__, function.__name__
    return f"import sys; sys.path[:] = {sys.path}; from {at} import {name}; {name}()"


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended, not even as a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def ending(code: int) -> str:
    """How a process with an exit code has ended, for people."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):  # some signals lack a name
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def main() -> None:
    """Be the guard."""
    folder = sys.argv[2]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server gets them from `stop`
    _control(_SET_CHILD_SUBREAPER, 1)
    orders = open(0, "rb", buffering=0)  # noqa: SIM115  # until the end
    if not (line := orders.readline()):
        return
    launch = json.loads(line)
    try:
        process = subprocess.Popen(
            launch["command"],
            env=launch["env"],
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            start_new_session=True,
            preexec_fn=functools.partial(_prepare, os.getpid()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        _report(error=f"could not be started: {type(error).__name__}: {error}")
        return
    _report(pid=process.pid)
    kill_at = float("inf")
    while (code := _reap(process.pid)) is None and (left := kill_at - time.monotonic()) > 0:
        if not select.select([orders], [], [], min(_POLL_SECONDS, left))[0]:
            continue
        if order := orders.readline():
            if kill_at == float("inf"):
                process.terminate()
            kill_at = min(kill_at, time.monotonic() + float(order))
        else:  # the worker has ended
            kill_at = 0.0
    if not _IS_LINUX:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    _end_descendants()
    if kill_at == 0.0:
        shutil.rmtree(folder, ignore_errors=True)
    _report(code=_reap(process.pid) if code is None else code)


def _report(**report: Any) -> None:
    with contextlib.suppress(OSError):  # the worker is gone
        os.write(1, json.dumps(report).encode() + b"\n")


def _control(option: int, value: int) -> None:
    if _IS_LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _prepare(parent: int) -> None:
    """Prepare the server's process before its command: its signals, and its end with its parent."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reap(server: int) -> int | None:
    """Remove ended child processes, adopted ones too."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            if reaped[0] == server:
                code = os.waitstatus_to_exitcode(reaped[1])
    return code


def _end_descendants() -> None:
    """Kill the descendants of the guard, and wait for their end."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _KILL_SECONDS:
        left = [*filter(is_alive, psutil.Process().children(recursive=True))]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                if passed > _CLEANERS_SECONDS or not _is_cleaner(process):
                    process.kill()
        time.sleep(0.01)


def _is_cleaner(process: psutil.Process) -> bool:
    return any(name in part for part in process.cmdline() for name in _CLEANERS)
