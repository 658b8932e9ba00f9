"""Call a function that serves a model, as PyTriton's functions do, in a process of its own.

``python triton_runner.py CLOUDPICKLE PAYLOAD HTTP_PORT GRPC_PORT METRICS_PORT [MODEL_PATH]``

CLOUDPICKLE is the folder of the package cloudpickle with which PAYLOAD, a file, was written; see
`stamped`. Temporary files are made in the folder of PAYLOAD. The function is called in the main
thread, so that it may handle SIGTERM, as ``fn(ports, model_path)``, or as ``fn(ports)`` without a
model path.

The interpreter may be that of another environment, which has none of this package's dependencies:
nvidia-pytriton needs numpy below 2. So this file uses the standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence


def stamped(pickled: bytes) -> bytes:
    """Return a payload: a pickled function with the version of Python that pickled it."""
    return f"{_python_version()}\n".encode() + pickled


def main(arguments: Sequence[str]) -> None:
    """Call the function."""
    cloudpickle, payload, *ports = arguments[:5]
    # What it prints must be in the log when it crashes.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text stream
    try:
        function = _load(cloudpickle, payload)
        _let_triton_find_python()
        _keep_files_in(os.path.dirname(payload))
        function([int(port) for port in ports], *arguments[5:])
    except ModuleNotFoundError as error:
        traceback.print_exc()
        raise SystemExit(
            f"{error}. Install it in the environment of {sys.executable}, where the server runs, "
            "or name another interpreter with TritonServer(python=...)"
        ) from error


def _python_version() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def _load(cloudpickle: str, path: str) -> Callable[..., object]:
    with open(path, "rb") as file:
        version, pickled = file.read().split(b"\n", 1)
    if version.decode() != _python_version():
        raise SystemExit(
            f"The server's function was pickled by Python {version.decode()}, and a pickled "
            f"function can be loaded only by the same version; {sys.executable} is Python "
            f"{_python_version()}. Let TritonServer(python=...) name the interpreter of an "
            f"environment with Python {version.decode()}"
        )
    _import_package("cloudpickle", cloudpickle)
    function: Callable[..., object] = pickle.loads(pickled)
    return function


def _import_package(name: str, folder: str) -> None:
    """Import one package from its folder, without the packages beside it."""
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _let_triton_find_python() -> None:
    """Add this interpreter's shared library to the search path of processes that load it.

    Triton's Python backend embeds the first libpython that the dynamic linker finds, which may be
    that of another build.
    """
    folder = os.path.join(sys.base_prefix, "lib")
    if os.path.exists(os.path.join(folder, f"libpython{_python_version()}.so.1.0")):
        paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)


def _keep_files_in(folder: str) -> None:
    """Let temporary files be made in a folder that is removed after the process was killed too."""
    os.environ["TMPDIR"] = os.environ["PYTRITON_HOME"] = folder


if __name__ == "__main__":
    # Python puts the folder of a script first: a user's `import process` must not find ours.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    main(sys.argv[1:])
