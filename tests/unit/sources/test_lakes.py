"""Rows of Delta, Iceberg and Lance tables: versions, filters, types, and what identifies them."""

from __future__ import annotations

import datetime
import decimal
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import vane_dagster as vd
from support import delta_tables, iceberg_tables
from support.in_process import InProcessCompute
from support.ingested import read, refusal, rows, split
from vane_dagster.sources import FragmentRule


def made(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


class Delta:
    version = "version"
    no_such_version = "Check the version"

    def __init__(self, root: Path) -> None:
        self.url = f"{root}/lake table"
        self.name = self.url

    def source(self, **given: Any) -> Any:
        return vd.delta(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        write_deltalake(self.url, table, mode="append", **given)

    def files(self) -> list[str]:
        actions = delta_tables.log_actions(Path(self.url), "add")
        return [f"file://{self.url}/{action['path']}" for action in actions]

    def delete(self, positions: Any) -> None:
        path = self.files()[0].rpartition("/")[2]
        delta_tables.delete_positions(Path(self.url), path, positions)

    def add_column(self, name: str) -> None:
        self.append(made([100], **{name: ["e"]}), schema_mode="merge")

    def now(self) -> Any:
        return DeltaTable(self.url).version()


class Lance(Delta):
    no_such_version = "does not exist, or does not have the given version"

    def source(self, **given: Any) -> Any:
        return vd.lance(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        lance.write_dataset(table, self.url, mode="append", **given)

    def files(self) -> list[str]:
        fragments = lance.dataset(self.url).get_fragments()
        return [f"{self.url}/data/{each.metadata.files[0].path}" for each in fragments]

    def delete(self, positions: Any) -> None:
        lance.dataset(self.url).delete(f"id in ({', '.join(map(str, positions))})")

    def add_column(self, name: str) -> None:
        lance.dataset(self.url).add_columns({name: "'e'"})

    def now(self) -> Any:
        return lance.dataset(self.url).version


class Iceberg(Delta):
    version = "snapshot"
    no_such_version = "has no snapshot 17"

    def __init__(self, root: Path) -> None:
        self.catalog = iceberg_tables.catalog_in(root / "lake")
        self.opened = iceberg_tables.opened(self.catalog)
        self.name = "test.db.docs"

    @property
    def table(self) -> Any:
        return self.opened.load_table("db.docs")

    def source(self, **given: Any) -> Any:
        return vd.iceberg(self.catalog, "db.docs", **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        self.opened.create_table_if_not_exists("db.docs", table.schema).append(table)

    def files(self) -> list[str]:
        files = [task.file for task in self.table.scan().plan_files()]
        return [file.file_path for file in sorted(files, key=lambda f: f.lower_bounds[1])]

    def delete(self, positions: Any) -> None:
        iceberg_tables.delete_positions(self.table, self.files()[0], positions)

    def add_column(self, name: str) -> None:
        from pyiceberg.types import StringType

        with self.table.update_schema() as update:
            update.add_column(name, StringType())

    def now(self) -> Any:
        return self.table.current_snapshot().snapshot_id


FORMATS = {"delta": Delta, "iceberg": Iceberg, "lance": Lance}


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return FORMATS[request.param](tmp_path)


def ids(source: Any, partition: str | None = None) -> list[int]:
    found: list[int] = read(source, FragmentRule(10), partition)["id"].to_pylist()
    return sorted(found)


def identities(source: Any, partition: str | None = None) -> set[str]:
    return {each.identity for each in split(source, partition=partition).fragments}


def test_a_version_is_read_as_it_was(lake):
    missing = f"table {lake.name!r} does not exist, or does not have the given version"
    assert missing in refusal(lake.source())
    lake.append(made([]))
    assert "has no rows" in refusal(lake.source())
    assert ids(lake.source(allow_empty=True)) == []
    lake.append(made(range(5)))
    named = [lake.now(), "release"]
    if isinstance(lake, Iceberg):
        lake.table.manage_snapshots().create_tag(lake.now(), "release").commit()
    elif isinstance(lake, Lance):
        lance.dataset(lake.url).tags.create("release", lake.now())
    else:
        time.sleep(0.05)
        then = datetime.datetime.now(datetime.UTC)
        named = [lake.now(), then, then.isoformat()]
        time.sleep(0.05)
    lake.append(made(range(5, 10)))
    sources = [lake.source(**{lake.version: version}) for version in named]
    assert [ids(source) for source in sources] == [list(range(5))] * len(named)
    assert len({frozenset(identities(source)) for source in sources}) == 1
    assert ids(lake.source()) == list(range(10))
    assert lake.no_such_version in refusal(lake.source(**{lake.version: 17}))
    if isinstance(lake, Lance):
        lance.dataset(lake.url).tags.update("release", lake.now())
        assert ids(lake.source(version="release")) == list(range(10))


def test_commits_compute_the_files_that_they_change(lake, tmp_path):
    given: Any = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    docs = vd.Pipeline("docs", source=lake.source(), id="id", fragment_rows=10)
    clean = docs.project("clean", ["n", "text"])
    left = [i for i in range(25) if i not in (0, 3, 24)]
    for change, expected in (
        (lambda: lake.append(made(range(25))), [*range(25)]),
        (lambda: lake.append(made(range(100, 125))), [*range(25), *range(100, 125)]),
        (lambda: lake.delete([0, 3, 24]), [*left, *range(100, 125)]),
    ):
        change()
        assert docs.plan(store=given["store"]).stages[0].fragments == 3
        docs.run(**given)
        assert docs.plan(store=given["store"]).is_up_to_date
        assert sorted(vd.load(clean, store=given["store"])["id"].to_pylist()) == expected
    step = vd.trace(docs["clean"], 20, store=given["store"]).steps[0]
    assert (step.url, step.row) == (lake.files()[0], left.index(20))
    assert vd.trace(clean, 120, store=given["store"]).steps[0].row == 20


def test_partitions_by_filter(lake):
    lake.append(made(range(20), day=["it's"] * 10 + ["b"] * 10))
    lake.append(made(range(100, 105), day=["it's"] * 5))
    by_day = "day = '{partition_key}'"
    source = lake.source(filter=by_day, allow_empty=True)
    assert ids(source, "it's") == [*range(10), *range(100, 105)]
    assert ids(source, "b") == list(range(10, 20))
    assert ids(source, "none") == []

    # A commit to another partition of the table leaves this one as it is.
    before = [identities(source, key) for key in ("it's", "b")]
    lake.append(made(range(200, 205), day=["b"] * 5))
    assert identities(source, "it's") == before[0]
    assert len(identities(source, "b") - before[1]) == 1

    narrowed = f"{by_day} AND (n < 30 OR n > 1020) AND text <> 'text 1'"
    assert ids(lake.source(filter=narrowed), "it's") == [0, 2, 103, 104]
    wider = lake.source(filter="id < 5 OR day = '{partition_key}'")
    assert ids(wider, "b") == [*range(5), *range(10, 20), *range(200, 205)]
    text = refusal(lake.source(filter="dya = 'b'"))
    assert "Did you mean 'day'?" in text or "Check the filter" in text


def test_rows_of_all_types(lake, tmp_path):
    columns = {
        "id": pa.array([1, 2], pa.int64()),
        "n": pa.array([1, None], pa.int32()),
        "at": pa.array([datetime.datetime(2026, 1, 1)] * 2, pa.timestamp("us", "UTC")),
        "day": pa.array([datetime.date(2026, 1, 1), None]),
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        "raw": pa.array([b"abc", None]),
        "tags": pa.array([["a", "b"], []]),
        "deep": pa.array([[{"a": 1, "b": "x"}], None]),
    }
    if isinstance(lake, Lance):
        columns["vector"] = pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2))
        columns["kind"] = pa.array(["a", "b"]).dictionary_encode()
    else:
        columns["more"] = pa.array([[("k", 1.5)], None], pa.map_(pa.string(), pa.float64()))
    table = pa.table(columns)
    if isinstance(lake, Iceberg):  # pyiceberg 0.12 writes empty lists for null ones of structs
        pq.write_table(table, tmp_path / "file.parquet")
        created = lake.opened.create_table("db.docs", table.schema)
        created.add_files([f"file://{tmp_path}/file.parquet"])
    else:
        lake.append(table)
    found = read(lake.source())
    assert found.to_pylist() == table.to_pylist()
    if isinstance(lake, Lance):
        assert found.schema.field("vector").type == pa.list_(pa.float32(), 2)


def test_delta_partition_columns_are_columns_of_their_types(tmp_path):
    lake, moment = Delta(tmp_path), datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
    named = {
        "day": pa.array([datetime.date(2024, 1, 1), None]),
        "word": pa.array(["it's/x y%", ""]),
        "flag": pa.array([True, None]),
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(5, 2)),
        "real": pa.array([0.1, None], pa.float64()),
        "zoned": pa.array([moment, None], pa.timestamp("us", "UTC")),
        "size": pa.array([7, None], pa.int16()),
    }
    lake.append(made([1, 2], **named), partition_by=list(named))
    found = read(lake.source()).sort_by("id").select(list(named))
    assert found.schema.types == [values.type for values in named.values()]
    expected = {name: values.to_pylist() for name, values in named.items()}
    expected["word"] = ["it's/x y%", None]  # Delta's partitions have no empty texts
    assert found.to_pydict() == expected
    assert ids(lake.source(filter="size = 7 AND zoned < '2025-01-01'")) == [1]


def test_a_filter_over_deleted_rows_of_a_delta_table(tmp_path):
    lake = Delta(tmp_path)
    lake.append(made(range(25)))
    lake.delete([2, 4, 11, 20])
    assert ids(lake.source(filter="n % 20 = 0")) == [0, 6, 8, 10, 12, 14, 16, 18, 22, 24]


@pytest.mark.parametrize("storage_version", ["2.1", "2.2"])
def test_blobs_of_lance_are_bytes(tmp_path, storage_version):
    blob = pa.field("raw", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([("id", pa.int64()), blob])
    large = [bytes([i]) * (5 << 17) for i in range(30)]
    table = pa.table({"id": list(range(31)), "raw": [*large, None]}, schema=schema)
    lake = Lance(tmp_path)
    lake.append(table, data_storage_version=storage_version)
    assert FragmentRule(1).bytes == 64 << 20
    rule = FragmentRule(1_000, bytes=8 << 20)
    assert len(split(lake.source(), rule).fragments) == 3
    assert [row["raw"] for row in rows(lake.source())] == [*large, None]
