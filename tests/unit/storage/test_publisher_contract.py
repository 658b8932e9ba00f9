"""The contract of publishers, over each format of the package."""

from __future__ import annotations

import uuid
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from support.iceberg_tables import catalog_in, opened
from support.published import docs

# F403: all tests of the contract run here, over each format.
from support.publisher_contract import *  # noqa: F403
from support.publisher_contract import Published
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

KEYS = ["p", "q"]


def row(number: int, **columns: str) -> pa.Table:
    return pa.table({"id": [number], **{name: [value] for name, value in columns.items()}})


@pytest.fixture(params=["parquet", "delta", "iceberg", "lance"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    """An empty target of each format in turn."""
    out, given = str(tmp_path / "out"), {}
    if request.param == "iceberg":
        given = {"catalog": catalog_in(tmp_path / "catalog"), "table": "db.t"}
    if request.param != "parquet":
        given["partition_column"] = "key"
    spec = docs(tmp_path, columns=["id"], keys=KEYS, format=request.param, **given)["out"].spec

    def read() -> list[int]:
        if request.param == "parquet":
            files = [p for p in Path(out).rglob("*.parquet") if "_vane" not in str(p)]
            return [n for file in files for n in pq.ParquetFile(file).read()["id"].to_pylist()]
        if request.param == "delta":
            return DeltaTable(out).to_pyarrow_table()["id"].to_pylist()
        if request.param == "lance":
            return lance.dataset(out).to_table()["id"].to_pylist()
        return opened(given["catalog"]).load_table("db.t").scan().to_arrow()["id"].to_pylist()

    def add(number: int) -> None:
        if request.param == "parquet":
            pq.write_table(row(number), f"{out}/p/{uuid.uuid4()}.parquet")
        elif request.param == "delta":
            write_deltalake(out, row(number, key="other"), mode="append")
        elif request.param == "lance":
            lance.write_dataset(row(number, key="other"), out, mode="append")
        else:
            opened(given["catalog"]).load_table("db.t").append(row(number, key="other"))

    return Published(Store(Location(str(tmp_path / "store"))), spec.publisher, read, add)
