"""An environment with Ray Serve for tests, beside that of the tests.

Serve's packages change what Ray's dashboard does in every head, so they are installed into a folder
of their own, which only this environment imports from.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import ray

from support.paths import REPOSITORY, TESTS


@pytest.fixture(scope="session")
def serve_python() -> str:
    """The path of an interpreter with Ray Serve; skips the test where there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vane-dagster-tests"
    version = "{}.{}".format(*sys.version_info[:2])
    folder = cache / f"ray-serve-{ray.__version__}-python-{version}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(folder)
            (folder / "complete").touch()
    return _environment(folder)


def _install(folder: Path) -> None:
    """Install what `ray[serve]` needs beyond the packages of the tests."""
    folder.mkdir()
    frozen = _pip("freeze", "--all").splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in frozen if "==" in line and "@" not in line))
    wanted = f"ray[serve]=={ray.__version__}"
    plan: Any = json.loads(
        _pip("install", "--dry-run", "--report", "-", wanted, "-c", str(constraints))
    )
    named = [each["metadata"] for each in plan["install"]]
    missing = [f"{each['name']}=={each['version']}" for each in named]
    if missing:
        _pip("install", "--no-deps", "--target", str(folder / "packages"), *missing)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"Ray Serve cannot be installed here: {' '.join(last)}")
    return done.stdout


def _environment(folder: Path) -> str:
    """Make an environment with the tests' packages and Serve's; return its interpreter."""
    made = folder / "environment"
    if not (made / "bin" / "python").exists():
        venv.create(made, with_pip=False)
    own = next(path for path in sys.path if path.endswith("site-packages"))
    version = "python{}.{}".format(*sys.version_info[:2])
    lines = [
        f"import sys; sys.path[1:1] = [{str(REPOSITORY)!r}, {str(TESTS)!r}]",
        f"import site; site.addsitedir({own!r})",
        str(folder / "packages"),
    ]
    (made / "lib" / version / "site-packages" / "tests.pth").write_text("\n".join(lines))
    return str(made / "bin" / "python")
