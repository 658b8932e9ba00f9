"""Tables in a store: their records, what is collected, and what is needed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.errors import NewerFormatError, StoreError
from vane_dagster.sources import FragmentRule
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import FileRecord, Manifest
from vane_dagster.storage.store import Store
from vane_dagster.storage.stored_tables import (
    ArrowRows,
    ParquetRows,
    Piece,
    StoredTable,
    any_record,
    create_record,
    dumped_places,
    identity_of,
    loaded_places,
    read_record,
    stored_rows,
    table_url,
    write_record,
    write_rows,
)

DAY = 86_400.0
SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Location(str(tmp_path / "store")))


def table(*digests: str) -> StoredTable:
    places = (ParquetRows(f"rows/{digest}.parquet", 0, 3) for digest in digests)
    return StoredTable(SCHEMA, tuple(Piece(d, 3, 24, (p,)) for d, p in zip(digests, places)))


def keep(store: Store, identity: str, *digests: str) -> None:
    for digest in digests:
        write_rows(store.root, digest, pa.table({"id": [1, 2, 3]}))
    write_record(store.root, identity, "10-20", table(*digests))


def age(store: Store, days: float, below: str = "") -> None:
    then = time.time() - days * DAY
    for file in Path(store.root.path, "~tables", below).rglob("*"):
        os.utime(file, (then, then))


def collected(store: Store, keep_days: float = 7, dry_run: bool = False) -> list[str]:
    policy = GcPolicy(time.time(), keep_days * DAY, DAY, dry_run)
    found = [report for report in collect(store, policy) if report.stage == "~tables"]
    base = f"{store.root.url}/~tables/"
    return sorted(url.removeprefix(base) for report in found for url in report.files)


def commit(store: Store, identity: str) -> None:
    file = FileRecord(table_url(identity), 3, identity)
    manifest = Manifest(
        "docs", "up", None, 0, "0" * 32, "", SCHEMA, [], [], [file], {}, "run", time.time()
    )
    store.commit(manifest)


def test_places_and_records_are_read_as_written(store):
    places = (
        ParquetRows("rows/a.parquet", 5, 9),
        ArrowRows("/data/a.arrow", 100, 17, 0, 4, (("id", "key"),)),
    )
    assert loaded_places(dumped_places(places)) == places
    stored = StoredTable(SCHEMA, (Piece("a", 8, 64, places),))
    write_record(store.root, "x", "1-2", stored)
    assert any_record(store.root, "x") == stored
    assert stored.files == {"rows/a.parquet"}


def test_a_range_of_rows_crosses_places():
    stored = StoredTable(
        SCHEMA,
        (
            Piece("a", 5, 1, (ParquetRows("a", 0, 3), ParquetRows("b", 10, 12))),
            Piece("b", 4, 1, (ArrowRows("/c", 1, 1, 20, 24),)),
        ),
    )
    assert list(stored.places(2, 7)) == [
        ParquetRows("a", 2, 3),
        ParquetRows("b", 10, 12),
        ArrowRows("/c", 1, 1, 20, 22),
    ]
    assert list(stored.places(8, 1 << 62)) == [ArrowRows("/c", 1, 1, 23, 24)]


def test_the_first_to_complete_a_table_wins(store):
    assert read_record(store.root, "x") is None
    assert create_record(store.root, "x", table("a")) == table("a")
    assert create_record(store.root, "x", table("b")) == table("a")
    assert read_record(store.root, "x") == table("a")


def test_urls():
    assert identity_of(table_url("abc")) == "abc"
    assert identity_of("file:///a") is None


def test_wrong_records(store):
    folder = store.root.child("~tables", "records", "x")
    folder.write("complete.json", json.dumps({"format": 2}).encode())
    with pytest.raises(NewerFormatError):
        read_record(store.root, "x")
    folder.write("complete.json", b'{"format": 1}')
    with pytest.raises(StoreError, match=r"is not readable: 'pieces'\. Delete it"):
        read_record(store.root, "x")
    with pytest.raises(FileNotFoundError):
        any_record(store.root, "y")


def test_what_no_recent_run_needed_is_deleted(store):
    keep(store, "old", "a", "b")
    age(store, 9)
    keep(store, "new", "b", "c")
    age(store, 9, "rows")
    assert collected(store, dry_run=True) == ["records/old/10-20.json", "rows/a.parquet"]
    assert len(stored_rows(store.root)) == 3
    assert collected(store) == ["records/old/10-20.json", "rows/a.parquet"]
    assert stored_rows(store.root) == {"b.parquet", "c.parquet"}
    assert collected(store) == []


def test_new_files_without_a_record_are_kept(store):
    write_rows(store.root, "a", pa.table({"id": [1]}))
    assert collected(store) == []
    age(store, 9)
    assert collected(store) == ["rows/a.parquet"]


def test_what_a_manifest_in_force_names_is_kept(store):
    keep(store, "x", "a")
    keep(store, "y", "b")
    age(store, 30)
    commit(store, "x")
    assert collected(store) == ["records/y/10-20.json", "rows/b.parquet"]
    assert any_record(store.root, "x") == table("a")


def test_a_run_that_needs_a_table_keeps_it(store):
    rows = vd.table({"id": range(100)})
    files = rows.list_files([None], "here")[None]
    assert not isinstance(files, vd.SourceError)
    rule = FragmentRule(1_000)
    rows.bind(store).split(files, rule, "here")
    age(store, 30)
    rows.bind(store).split(files, rule, "here")
    assert collected(store) == []
