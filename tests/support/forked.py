"""Python programs, forked from a process that has imported what they need.

An interpreter that starts and imports Arrow takes a second of CPU time, and one that imports
Dagster and Ray takes three, which is longer than most tests. The parent of a forked program is the
test's process, as if it had started the program itself.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_BYTES = 2**20

_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

# Arrow imports pandas with the first array that it converts.
WORKER = ("numpy", "pandas", "vane_dagster.worker.local_worker")
DRIVER = (
    "pandas",
    "dagster",
    "dagster._core.storage.runs",
    "ray",
    "vane_dagster.orchestration.steps",
    "vane_dagster.compute.ray_backend",
    "vane_dagster.compute.local_backend",
    "vane_dagster.testing",
)
EMBEDDER = (*DRIVER, "sentence_transformers", "transformers.models.bert.modeling_bert")
EXAMPLE = (*DRIVER, "sklearn.linear_model", "sklearn.datasets", "torch")


class Forked:
    """A forked program: the part of `subprocess.Popen` that tests and the driver use."""

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
                raise subprocess.TimeoutExpired("forked program", timeout or 0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Program(Forked):
    """A forked program whose output is captured."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str,
        modules: tuple[str, ...] = DRIVER,
    ) -> None:
        self._output = os.memfd_create("stdout"), os.memfd_create("stderr")
        descriptors = {file: number for number, file in enumerate(self._output, start=1)}
        super().__init__(server(modules).start(arguments, env, descriptors, cwd).pid)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        out, err = (_read(file) for file in self._output)
        return out, err

    def __del__(self) -> None:
        for file in self._output:
            os.close(file)


def _read(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def run(
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | str,
    timeout: float,
    modules: tuple[str, ...] = DRIVER,
) -> subprocess.CompletedProcess[str]:
    program = Program(arguments, env, cwd, modules)
    out, err = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(list(arguments), program.returncode, out, err)


class ForkServer:
    """The process that is forked. It ends with the process that started it."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        # What a process sets when it connects to Ray is its own.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**env, **_VARIABLES},
                start_new_session=True,
            )

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        descriptors: Mapping[int, int],
        cwd: Path | str | None = None,
    ) -> Forked:
        """Fork a program."""
        numbers = list(descriptors.values())
        request = [list(arguments), dict(env), numbers, str(cwd or os.getcwd())]
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
                return Forked(int(self._socket.recv(64)))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[tuple[str, ...], ForkServer] = {}


def server(modules: tuple[str, ...]) -> ForkServer:
    if modules not in _servers:
        _servers[modules] = ForkServer(modules)
    return _servers[modules]


def close_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()


def _adopt_orphans(adopts: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork at each request; return in each forked process, with the arguments of its program."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _BYTES, 16)
        if not request:
            return None
        readable, writable = os.pipe()
        if (between := os.fork()) == 0:
            if os.fork() > 0:  # the program's parent ends, and the test adopts it
                os._exit(0)
            os.setsid()  # before its pid is known, so that it can be killed with its group
            os.write(writable, str(os.getpid()).encode())
            requests.close()
            os.close(readable)
            os.close(writable)
            arguments, env, numbers, cwd = json.loads(request)
            _become(env, dict(zip(descriptors, numbers)), cwd)
            return list(arguments)
        os.close(writable)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        requests.send(os.read(readable, 64))
        os.close(readable)


def _become(env: Mapping[str, str], descriptors: Mapping[int, int], cwd: str) -> None:
    """Give this process the environment, the file descriptors and the folder of its program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    free = 1 + max(descriptors.values(), default=2)
    above = {fcntl.fcntl(d, fcntl.F_DUPFD, free): number for d, number in descriptors.items()}
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in above.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    random.seed()
    sys.modules["numpy"].random.seed()


def _run(arguments: Sequence[str]) -> int:
    """Run a program as ``python`` would, and return its exit status."""
    try:
        _execute(arguments)
    except SystemExit as exited:
        if isinstance(exited.code, str):
            print(exited.code, file=sys.stderr)
            return 1
        return exited.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End the process without the teardown of modules, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # private: waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork_what_is_spawned() -> None:
    """Have this process and its forks fork what multiprocessing would spawn.

    vLLM spawns two processes for each engine, and each takes 20 s of CPU time to import it.
    """
    importlib.import_module("setproctitle").getproctitle()  # needs the environment at the start
    multiprocessing.util.spawnv_passfds = _forked  # type: ignore[assignment]  # a patch


def vllm_python(folder: Path) -> Path:
    """Write an interpreter for `vd.VLLMServer`, whose engine is forked from the server.

    As with Python itself, the engine's processes have titles and the server its command line.
    """
    script = folder / "vllm-python"
    script.write_text(f"""#!{sys.executable}
import os, runpy, sys
sys.path[0] = {os.path.dirname(__file__)!r}
import forked
forked.fork_what_is_spawned()
import setproctitle
own, set_title = os.getpid(), setproctitle.setproctitle
setproctitle.setproctitle = lambda title: os.getpid() == own or set_title(title)
sys.argv[:3] = sys.argv[2:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
""")
    script.chmod(0o755)
    return script


def _forked(path: bytes, arguments: Sequence[str | bytes], kept: Sequence[int]) -> int:
    """Fork a process with the file descriptors that a spawned one would have."""
    program = [os.fsdecode(argument) for argument in arguments]
    if "--multiprocessing-fork" not in program:  # its tracker of resources
        return _spawn(path, arguments, kept)
    if (pid := os.fork()) > 0:
        return pid
    descriptors = sorted({0, 1, 2, *kept})
    for below, above in zip(descriptors, [*descriptors[1:], os.sysconf("SC_OPEN_MAX")]):
        os.closerange(below + 1, above)
    status = 1
    try:
        if threads := os.environ.get("OMP_NUM_THREADS"):  # which is read once
            sys.modules["torch"].set_num_threads(int(threads))
        status = _run(program[program.index("-c") :])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_spawn = multiprocessing.util.spawnv_passfds


def _execute(arguments: Sequence[str]) -> None:
    first, *others = arguments
    if first == "-m":
        sys.argv[1:], sys.path[0] = others[1:], os.getcwd()
        sys.modules[others[0]].main()
        return
    is_code = first == "-c"
    main = ModuleType("__main__")
    if is_code:
        code, name = others[0], "<string>"
        sys.argv, sys.path[0] = ["-c", *others[1:]], ""
    else:
        code, name = Path(first).read_text(), first
        main.__file__ = first
        sys.argv, sys.path[0] = list(arguments), str(Path(first).parent)
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in ours if folder and folder not in sys.path]
    sys.modules["__main__"] = main
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with `python -m`
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    if "vllm" in sys.modules:
        fork_what_is_spawned()
    gc.collect()
    gc.freeze()  # a collection in a program would copy all pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _program = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(_run(_program) if _program else 0)
