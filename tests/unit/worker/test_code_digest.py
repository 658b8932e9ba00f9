"""The digest of the package's code, which a driver and the processes that outlive it share."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.code_digest import code_digest, disagreement, versions
from vane_dagster.worker.ray_actor import HostActor

PACKAGE = Path(vd.__file__).parent


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied") / PACKAGE.name
    return Path(shutil.copytree(PACKAGE, folder))


def test_a_copy_has_the_same_digest_and_caches_do_not_count(copied: Path) -> None:
    (copied / "notes.txt").write_text("not code")
    assert code_digest(copied) == code_digest(PACKAGE)


@pytest.mark.parametrize("name", ["worker/host.py", "__init__.py"])
def test_an_edit_of_any_file_counts(copied: Path, name: str) -> None:
    file, before = copied / name, code_digest(copied)
    text = file.read_text()
    file.write_text(f"{text}# edited\n")
    assert code_digest(copied) != before
    file.write_text(text)
    assert code_digest(copied) == before


def test_a_worker_of_other_versions_loads_nothing() -> None:
    nobody: Any = None
    report = HostActor.load(nobody, LoadCall(None, versions={**versions(), "pyarrow": "1.0"}), b"")
    assert report.fault is not None
    assert report.fault.kind == "ComputeError"
    assert f"node {socket.gethostname()}: the driver has " in report.fault.message
    assert f"'pyarrow': '{pa.__version__}'" in report.fault.message.partition("workers there")[2]
    assert disagreement(versions()) == disagreement({}) == ""
