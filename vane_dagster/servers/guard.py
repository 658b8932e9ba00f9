"""The guard of a server: two small processes between a worker and the server that it started.

No process of the server outlives the worker, whichever process is killed with SIGKILL. The guard's
processes, an outer and an inner one, adopt orphans (``PR_SET_CHILD_SUBREAPER``), so every process
that the server starts remains their descendant, even in a session of its own.

=================  =================================================================================
killed             consequence
=================  =================================================================================
the worker         its pipe ends; the inner process kills the server and all its descendants
the outer process  its socket ends; the inner process does the same
the inner process  the kernel kills the server; the outer process kills the descendants, which it
                   has adopted
the server         the inner process reports it, and kills the server's descendants
=================  =================================================================================

The worker reads the end of the report pipe only after all of them are gone. If both processes of
the guard are killed at once, the kernel kills the server and the worker its process group; children
in other sessions are left. Outside Linux orphans are not adopted; only the server's process group
and its descendants at the time are killed.

This file is run as a script and uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_IS_LINUX = sys.platform == "linux"
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
"""Processes of Python and PyTorch that remove shared memory after those that use it have ended."""
_CLEANERS_SECONDS = 1.0
_WORKER_CHECK_SECONDS = 1.0
_INNER_SECONDS = 5.0
_KILL_SECONDS = 10.0


def log_file(prefix: str, number: int) -> str:
    """Return the path of a log file: file `number` starts at byte ``number * size`` of the log."""
    return f"{prefix}.{number}.log" if number else f"{prefix}.log"


class GuardedServer:
    """A server process with its guard: the worker's side.

    Args:
        command: The command line.
        env: All environment variables of the server.
        label: Name for people, shown on the guard's command line.
        log: Prefix of the paths of the log files.
        log_bytes: Size of a log file. The last two are kept.
        folder: Folder to remove when the worker is gone.

    Attributes:
        pid: The server's process id; None before it was started.
        guard_pids: The process ids of the guard, that of the outer process first.
        ended: Set after the server, its descendants and the guard have ended.
        error: Why the command could not be started; empty if it was.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        label: str,
        log: str,
        log_bytes: int,
        folder: str,
    ) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), folder, label],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid: int | None = None
        self.guard_pids = [self._guard.pid]
        self.ended = threading.Event()
        self.error = ""
        self._code: int | None = None
        self._lock = threading.Lock()
        self._send({"command": [*command], "env": {**env}, "log": log, "log_bytes": log_bytes})
        threading.Thread(target=self._read, name=f"reports of {label}", daemon=True).start()

    def stop(self, drain_s: float) -> None:
        """Send SIGTERM to the server, and SIGKILL to what is left after `drain_s` seconds.

        Returns at once. An earlier deadline replaces a later one.
        """
        self._send({"drain_s": drain_s})

    def wait(self, drain_s: float) -> bool:
        """Wait after `stop`, and kill a guard that does not answer.

        Args:
            drain_s: The seconds given to `stop`.

        Returns:
            Whether all processes have ended.
        """
        if self.ended.wait(drain_s + _KILL_SECONDS):
            return True
        for pid in reversed(self.guard_pids):  # the outer process kills what the inner one leaves
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            if self.ended.wait(_KILL_SECONDS):
                return True
        return False

    @property
    def has_exited(self) -> bool:
        """Whether the server has ended; processes that it started may be left."""
        return self._code is not None or self.ended.is_set()

    @property
    def outcome(self) -> str:
        """How the server has ended, for people."""
        if self.error:
            return self.error
        if self._code is None:
            return "was killed with its guard process"
        if self._code >= 0:
            return f"exited with code {self._code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-self._code).name}"
        return f"was killed by signal {-self._code}"

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has ended
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()

    def _read(self) -> None:
        """Read reports until both processes of the guard have closed the pipe."""
        assert self._guard.stdout is not None
        assert self._guard.stdin is not None
        with self._guard.stdout as reports:
            for line in reports:
                report = json.loads(line)
                self.pid = report.get("pid", self.pid)
                self._code = report.get("code", self._code)
                self.error = report.get("error", self.error)
                if "guard" in report:
                    self.guard_pids.append(report["guard"])
        self._guard.wait()
        if self.pid is not None and self._code is None:  # both processes were killed
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        with self._lock, contextlib.suppress(OSError):
            self._guard.stdin.close()
        self.ended.set()


def _main() -> None:
    """Be the outer process."""
    worker, folder = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server gets them from `stop`
    orders = _Orders()
    while not (first := orders.read()):
        if orders.ended:
            return
    _adopt_orphans()
    outer, inner = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        outer.close()
        try:
            _Inner(first[0], first[1:], orders, inner, folder).run()
        except BaseException:
            _report({"error": f"its guard process failed: {traceback.format_exc()}"})
        finally:
            os._exit(0)
    inner.close()
    with selectors.DefaultSelector() as selector:
        selector.register(outer, selectors.EVENT_READ)
        alone_since = None
        while not selector.select(_WORKER_CHECK_SECONDS):
            # The pipe does not end with the worker if a process that it forked holds it too.
            if os.getppid() != worker:
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > _INNER_SECONDS:
                    break
                with contextlib.suppress(OSError):  # the inner process has just ended
                    outer.shutdown(socket.SHUT_WR)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _end_descendants()
    if os.getppid() != worker:
        shutil.rmtree(folder, ignore_errors=True)


class _Inner:
    """The inner process: the parent of the server.

    Args:
        launch: The first order: the command, its environment and its log.
        further: Orders that arrived with it.
        orders: The pipe from the worker.
        outer: The socket that ends with the outer process.
        folder: Folder to remove when the worker is gone.
    """

    def __init__(
        self,
        launch: Mapping[str, Any],
        further: list[dict[str, Any]],
        orders: _Orders,
        outer: socket.socket,
        folder: str,
    ) -> None:
        self._launch, self._orders, self._outer = launch, orders, outer
        self._folder = folder
        self._further = further
        self._log = _Log(launch["log"], launch["log_bytes"])
        self._kill_at: float | None = None
        self._is_terminated = False

    def run(self) -> None:
        """Start the server, and return after it and its descendants have ended."""
        os.setsid()
        _adopt_orphans()
        wakeup = _signalled()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        try:
            process = subprocess.Popen(
                self._launch["command"],
                env=self._launch["env"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=functools.partial(_prepare, os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            _report({"error": f"could not be started: {type(error).__name__}: {error}"})
            return
        os.close(output)
        self._pid = process.pid
        _report({"pid": process.pid, "guard": os.getpid()})
        self._obey(self._further)
        with selectors.DefaultSelector() as selector:
            for file in (0, self._outer, self._output, wakeup):
                selector.register(file, selectors.EVENT_READ)
            while (code := _reap(process.pid)) is None:
                timeout = None if self._kill_at is None else self._kill_at - time.monotonic()
                if timeout is not None and timeout <= 0:
                    os.kill(process.pid, signal.SIGKILL)
                    timeout = None
                for key, _ in selector.select(timeout):
                    self._handle(key.fileobj, selector, wakeup)
        process.returncode = code
        _report({"code": code})
        _end_descendants(process.pid, self._copy_output)
        self._copy_output()
        if self._orders.ended:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _handle(self, file: Any, selector: selectors.BaseSelector, wakeup: socket.socket) -> None:
        if file == 0:
            self._obey(self._orders.read())
            if self._orders.ended:
                self._kill_at = 0.0
                selector.unregister(0)
        elif file is self._outer:
            self._kill_at = 0.0
            selector.unregister(self._outer)
        elif file == self._output:
            if not self._copy_output():
                selector.unregister(self._output)
        else:
            wakeup.recv(4096)

    def _obey(self, orders: list[dict[str, Any]]) -> None:
        for order in orders:
            kill_at = time.monotonic() + order["drain_s"]
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
            if not self._is_terminated:
                self._is_terminated = True
                os.kill(self._pid, signal.SIGTERM)

    def _copy_output(self) -> bool:
        """Copy what the server has printed to the log; False at the end of its output."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 2**16):
                self._log.write(data)
            return False
        return True


class _Orders:
    """The orders from the worker, a JSON object a line on standard input."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        data = os.read(0, 2**16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class _Log:
    """Log files of equal size, of which the last two are kept.

    Args:
        prefix: Prefix of their paths.
        size: Bytes of a file.
    """

    def __init__(self, prefix: str, size: int) -> None:
        self._prefix, self._size = prefix, size
        self._number = 0
        folder, name = os.path.split(prefix)
        for found in os.listdir(folder):
            number = found[len(name) + 1 : -len(".log")]
            if found.startswith(name + ".") and number.isdigit():
                self._number = max(self._number, int(number))
        self._open()

    def write(self, data: bytes) -> None:
        """Append output. What cannot be written, as on a full disk, is dropped."""
        view = memoryview(data)
        with contextlib.suppress(OSError):
            while view:
                if self._written >= self._size:
                    os.close(self._file)
                    self._number += 1
                    self._open()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(log_file(self._prefix, self._number - 2))
                count = os.write(self._file, view[: self._size - self._written])
                self._written += count
                view = view[count:]

    def _open(self) -> None:
        path = log_file(self._prefix, self._number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        found = os.fstat(self._file)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}")
        self._written = found.st_size


def _report(report: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the worker is gone
        os.write(1, json.dumps(report).encode() + b"\n")


def _signalled() -> socket.socket:
    """Return a socket that is readable when a child process has ended."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    return receiver


_libc = ctypes.CDLL(None, use_errno=True) if _IS_LINUX and __name__ == "__main__" else None


def _control(option: int, value: int) -> None:
    if _libc is not None and _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def _adopt_orphans() -> None:
    _control(_SET_CHILD_SUBREAPER, 1)


def _prepare(parent: int) -> None:
    """Prepare the server's process before its command: signals, and its end with its parent."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reap(server: int) -> int | None:
    """Remove ended child processes, adopted ones too.

    Args:
        server: Process id of the server.

    Returns:
        The exit code of the server as of `subprocess`; None if it is not among them.
    """
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == server:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_descendants(group: int = 0, meanwhile: Callable[[], Any] | None = None) -> None:
    """Kill all descendants of this process, and return when none is left.

    Args:
        group: A process group to kill too; 0 for none.
        meanwhile: Called while waiting for them.
    """
    spare_until = float("inf")
    pause = 0.001
    while True:
        _reap(0)
        found = _descendants(group)
        if not found:
            return
        if not (others := {pid for pid in found if not _is_cleaner(pid)}):
            spare_until = min(spare_until, time.monotonic() + _CLEANERS_SECONDS)
        for pid in others if time.monotonic() < spare_until else found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if meanwhile is not None:
            meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_cleaner(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read(4096)
        return any(name in command for name in _CLEANERS)
    return False


def _descendants(group: int) -> set[int]:
    """Return the descendants of this process, ended ones too, and the members of a group."""
    table = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found = {pid for pid, (_, of) in table.items() if group and of == group}
    left = [os.getpid(), *found]
    while left:
        for pid in children.get(left.pop(), ()):
            if pid not in found:
                found.add(pid)
                left.append(pid)
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the process group of each process."""
    found = {}
    if _IS_LINUX:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                    found[int(name)] = int(fields[1]), int(fields[2])
    else:
        command = ["ps", "-A", "-o", "pid=,ppid=,pgid="]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as listing:
            for line in listing.communicate()[0].splitlines():
                pid, parent, of = map(int, line.split())
                found[pid] = parent, of
        found.pop(listing.pid, None)
    return found


if __name__ == "__main__":
    _main()
