"""A real PyTriton for tests: an environment with nvidia-pytriton, and Triton's own program.

``VANE_TEST_PYTRITON_PYTHON`` names an interpreter that has nvidia-pytriton. Without it, an
environment is made in the user's cache folder, once.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

VERSION = "0.7.0"
VARIABLE = "VANE_TEST_PYTRITON_PYTHON"
PYTHON = "{}.{}".format(*sys.version_info[:2])

# Triton's Python backend embeds an interpreter, and functions are pickled by the tests' version.
_IS_SUITABLE = f"""
import ctypes, ensurepip, sys, venv
assert sys.version_info[:2] == {sys.version_info[:2]}, sys.version
ctypes.CDLL("libpython{PYTHON}.so.1.0")
"""
_SITE = "import pytriton, os; print(os.path.dirname(os.path.dirname(pytriton.__file__)))"


@pytest.fixture(scope="session")
def pytriton() -> str:
    """The path of an interpreter with nvidia-pytriton; skips the test where there is none."""
    if named := os.environ.get(VARIABLE):
        _run(named, "-c", "import pytriton.triton")
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vane-dagster-tests"
    folder = cache / f"nvidia-pytriton-{VERSION}-python-{PYTHON}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _make(folder)
    return str(folder / "bin" / "python")


def _make(folder: Path) -> None:
    base = _suitable(["/usr/bin/python3", sys._base_executable])
    shutil.rmtree(folder, ignore_errors=True)
    _run(base, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    try:
        _run(python, "-m", "pip", "install", "--quiet", f"nvidia-pytriton=={VERSION}")
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        pytest.skip(f"nvidia-pytriton cannot be installed here: {' '.join(last)}")
    (folder / "complete").touch()


def _suitable(interpreters: Sequence[str]) -> str:
    for python in interpreters:
        if os.path.exists(python):
            tried = subprocess.run([python, "-c", _IS_SUITABLE], capture_output=True, check=False)
            if tried.returncode == 0:
                return python
    pytest.skip(
        f"no Python {PYTHON} with the modules venv and ensurepip and the shared library "
        f"libpython{PYTHON}.so; on Debian: apt-get install python{PYTHON}-venv libpython{PYTHON}"
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def pytriton_client(pytriton: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with PyTriton's client for the tests' own environment, which has numpy 2.

    It has the packages of PyTriton's environment that the tests' environment lacks.
    """
    folder = tmp_path_factory.mktemp("client")
    for package in Path(_run(pytriton, "-c", _SITE)).iterdir():
        name = package.name.partition(".")[0]
        if name.isidentifier() and package.suffix != ".dist-info" and not _has(name):
            (folder / package.name).symlink_to(package)
    return folder


def _has(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


@pytest.fixture(scope="session")
def tritonserver(pytriton: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of Triton's program with its Python backend, as in NVIDIA's containers.

    nvidia-pytriton bundles the program. The backend needs the stub for this version of Python
    beside it, and embeds the interpreter that is first on the PATH.
    """
    bundled = Path(_run(pytriton, "-c", _SITE)) / "pytriton" / "tritonserver"
    folder = tmp_path_factory.mktemp("triton")
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    stub = bundled / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    for file in (*(bundled / "backends" / "python").iterdir(), stub):
        (backend / file.name).symlink_to(file)
    library = _run(pytriton, "-c", "import sys; print(sys.base_prefix)") + "/lib"
    program = folder / "tritonserver"
    program.write_text(
        "#!/bin/sh\n"
        f'export PATH={shlex.quote(os.path.dirname(pytriton))}:"$PATH"\n'
        f"export LD_LIBRARY_PATH={shlex.quote(library)}\n"
        f"exec {bundled}/bin/tritonserver --backend-directory {backend.parent} "
        '"$@"\n'
    )
    program.chmod(0o755)
    return str(program)
