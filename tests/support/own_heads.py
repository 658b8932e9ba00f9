"""A Ray head that is not ours, and what runs on it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from support.data import read_stage, write_source
from support.heads import Cluster, head

SMALL = ("--no-monitor", "--include-log-monitor=false")


@pytest.fixture(scope="module")
def own_head() -> Iterator[Cluster]:
    """A head that was started with ``ray start``."""
    folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    try:
        with head(folder, *SMALL, RAY_prestart_worker_first_driver="0") as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a source of four partitions."""
    for key in "abcd":
        write_source(tmp_path / "src" / key, {"id": range(40)})
    return tmp_path


def outs(folder: Path, key: str) -> pa.Table:
    return read_stage(folder / "store", "docs", "out", key).sort_by("id")


DOUBLED = [2 * n for n in range(40)]
