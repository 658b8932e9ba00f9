"""What makes a unit test: it starts no process, and has no Dagster instance."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.testing  # noqa: F401 - NumPy 2.0 starts a process at the import
import pytest
import threadpoolctl

threadpoolctl.threadpool_info()  # versions before 3.7 start a process at the first call

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_started() -> Iterator[None]:
    import dagster as dg

    def refused(*args: Any, **given: Any) -> NoReturn:
        pytest.fail("A unit test starts no process and has no Dagster instance: move it to a tier")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refused)
        patch.setattr(os, "fork", refused)
        patch.setattr(dg.DagsterInstance, "__init__", refused)
        patch.setattr(os, "fsync", lambda file: None)  # no test loses power
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in the test's folder."""
    from vane_dagster.storage.filesystem import StoragePath
    from vane_dagster.storage.store import Store

    return Store(StoragePath(str(tmp_path / "store")))
