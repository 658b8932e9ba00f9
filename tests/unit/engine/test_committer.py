"""The thread that commits."""

from __future__ import annotations

from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.in_process import compute
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_panics_is_the_error_of_its_partition(tmp_path: Path, monkeypatch):
    def panic(*args: object, **given: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", panic)
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "rows.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "rows.parquet")), id="id")
    docs.project("kept", ["id"]).write("out", f"{tmp_path}/out", format="delta")
    store = Store(Location(str(tmp_path / "store")))
    with pytest.raises(vd.errors.StoreError, match="committed: PanicException: index out of"):
        compute(docs, store)
