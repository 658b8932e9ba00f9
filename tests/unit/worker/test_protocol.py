"""Records between drivers and workers, and the digest of the code that both must have."""

from __future__ import annotations

import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.errors import (
    DamagedPartError,
    VaneError,
)
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.code_digest import code_digest, disagreement, versions
from vane_dagster.worker.ray_actor import HostActor
from vane_dagster.worker.reports import ERRORS, Fault


@pytest.mark.parametrize("kind", ERRORS)
def test_a_fault_raises_the_error_of_its_kind(kind: str) -> None:
    arrived = pickle.loads(pickle.dumps(Fault(kind, "what happened", "Traceback: here")))
    error = arrived.error()
    assert type(error) is ERRORS[kind]
    assert str(error) == "what happened\n\nTraceback: here"


def test_an_error_of_a_class_that_the_driver_lacks_is_a_general_one() -> None:
    assert type(Fault("OurSchemaError", "x").error()) is VaneError


def test_a_damaged_part_keeps_its_name() -> None:
    error = Fault("DamagedPartError", "is gone", part="0-1.parquet").error()
    assert isinstance(error, DamagedPartError)
    assert error.part == "0-1.parquet"


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
    assert f"'pyarrow': '{pa.__version__}'" in report.fault.message.partition("the workers have")[2]
    assert "Restart the driver if it was started before an upgrade" in report.fault.message
    assert disagreement(versions()) == disagreement({}) == ""
