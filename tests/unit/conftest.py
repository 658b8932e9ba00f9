"""What makes a unit test: it starts no process, and has no Dagster instance."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.testing  # noqa: F401 - NumPy 2.0 starts a process at the import
import pytest
import threadpoolctl

threadpoolctl.threadpool_info()  # versions before 3.7 start a process at the first call

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import dagster as dg

    def refused(*args: Any, **given: Any) -> NoReturn:
        pytest.fail("A unit test starts no process and has no Dagster instance: move it to a tier")

    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(dg.DagsterInstance, "__init__", refused)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in the test's folder."""
    from vane_dagster.storage.filesystem import Location
    from vane_dagster.storage.store import Store

    return Store(Location(str(tmp_path / "store")))
