"""The contract of publishers, over each format of the package."""

from __future__ import annotations

import uuid
from itertools import product
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from support.iceberg_tables import catalog_in, opened
from support.published import docs

# F403: all tests of the contract run here, over each format.
from support.publisher_contract import *  # noqa: F403  # the contract's tests
from support.publisher_contract import Published
from support.store_contract import interrupted_after
from vane_dagster.errors import SchemaError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import ManifestName
from vane_dagster.storage.store import Store

KEYS = ["p", "q"]


def named(param: tuple[str, int | None]) -> str:
    format, target = param
    return f"{format} merged" if target else format


def row(number: int, **columns: str) -> pa.Table:
    return pa.table({"id": [number], **{name: [value] for name, value in columns.items()}})


@pytest.fixture(params=product(["parquet", "delta", "iceberg", "lance"], [None, 3000]), ids=named)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    """An empty target of each format in turn, with files as they are and merged ones."""
    format, target = request.param
    out, given = str(tmp_path / "out"), {"format": format, "target_file_bytes": target}
    if format == "iceberg":
        given |= {"catalog": catalog_in(tmp_path / "catalog"), "table": "db.t"}
    if format != "parquet":
        given["partition_column"] = "key"
    spec = docs(tmp_path, columns=["id"], keys=KEYS, **given)["out"].spec

    def iceberg() -> Any:
        return opened(given["catalog"]).load_table("db.t")

    def read(version: Any) -> list[int]:
        if format == "parquet":
            files = [p for p in Path(out).rglob("*.parquet") if "_vane" not in str(p)]
            return [n for file in files for n in pq.ParquetFile(file).read()["id"].to_pylist()]
        if format == "delta":
            return DeltaTable(out, version).to_pyarrow_table()["id"].to_pylist()
        if format == "lance":
            return lance.dataset(out, version).to_table()["id"].to_pylist()
        return iceberg().scan(snapshot_id=version).to_arrow()["id"].to_pylist()

    def add(number: int) -> None:
        if format == "parquet":
            pq.write_table(row(number), f"{out}/p/{uuid.uuid4()}.parquet")
        elif format == "delta":
            write_deltalake(out, row(number, key="other"), mode="append")
        elif format == "lance":
            lance.write_dataset(row(number, key="other"), out, mode="append")
        else:
            iceberg().append(row(number, key="other"))

    def remove(number: int) -> None:
        tables = {"delta": DeltaTable, "lance": lance.dataset, "iceberg": lambda _: iceberg()}
        if format in tables:
            tables[format](out).delete(f"id = {number}")

    def versions() -> list[Any]:
        if format == "delta":
            return [commit["version"] for commit in DeltaTable(out).history()][::-1]
        if format == "lance":
            return [each["version"] for each in lance.dataset(out).versions()]
        if format == "iceberg":
            return [snapshot.snapshot_id for snapshot in iceberg().snapshots()]
        return []

    store = Store(Location(str(tmp_path / "store")))
    return Published(store, spec.publisher, read, add, remove, versions)


@pytest.mark.parametrize("published", [("lance", None), ("lance", 3000)], indirect=True)
def test_a_fragment_with_several_files_is_replaced_by_new_ones(published, tmp_path, monkeypatch):
    """A column that others have rewritten is in a second file of the fragment."""

    def killed() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(published.store, "commit", interrupted_after(0, None))
            made = published.manifest("p", {"b": [1, 2], "c": [3]}, "2")
            assert not isinstance(published.commit("p", made), ManifestName)
        return files()

    def files() -> list[list[str]]:
        fragments = lance.dataset(tmp_path / "out").get_fragments()
        return [[file.path for file in each.metadata.files] for each in fragments]

    published.publish("q", {"a": [9]})
    first = killed()
    for kind in (pa.large_string(), pa.string()):
        lance.dataset(tmp_path / "out").alter_columns({"path": "key", "data_type": kind})
    changed = files()
    assert all(len(each) > 1 for each in changed)
    second = killed()
    assert published.ids == [1, 2, 3, 9]
    own = [each for each in second if each not in changed]
    assert len(own) == len(first) - 1
    old = {file for each in changed for file in each}
    assert not [file for each in own for file in each if file in old]
    assert killed() == second
    published.publish("p", {"b": [1, 2], "c": [3]}, "2")
    assert files() == second
    assert published.ids == [1, 2, 3, 9]


@pytest.mark.parametrize(
    "published", [("delta", None), ("iceberg", None), ("lance", None)], indirect=True
)
def test_a_table_with_other_columns_is_refused(published):
    published.publish("p", {"a": [1]})
    for schema, words in (
        (pa.schema([("id", pa.string())]), "column 'id' is string here, but "),
        (pa.schema([("id", pa.int64()), ("n", pa.int64())]), "here, but no column in the "),
        (pa.schema([]), "column 'id' is no column here, but "),
    ):
        with pytest.raises(SchemaError, match=words):
            published.publisher("p").check(schema, "here")
