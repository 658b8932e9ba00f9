"""The thread that commits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.in_process import compute
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


class Panics(vd.checks.Check):
    """A check whose library panics."""

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        raise PanicException("index out of bounds")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_commit_that_panics_is_the_error_of_its_partition(tmp_path: Path):
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "rows.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "rows.parquet")), id="id")
    docs.project("kept", ["id"], asset=vd.Asset(checks=[Panics()]))
    store = Store(Location(str(tmp_path / "store")))
    with pytest.raises(vd.errors.StoreError, match="committed: PanicException: index out of"):
        compute(docs, store)
