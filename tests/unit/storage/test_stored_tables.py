"""Tables in a store: their records, what is collected, and what is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from vane_dagster.sources import FragmentRule
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import FileRecord, FileSpan, Manifest
from vane_dagster.storage.store import Store
from vane_dagster.storage.stored_tables import (
    COMPLETE,
    ParquetRows,
    Piece,
    StoredTable,
    clipped,
    create_record,
    dumped_places,
    places_of,
    read_record,
    table_url,
    write_record,
)

DAY = 86_400.0
SCHEMA = pa.schema([pa.field("id", pa.int64())])


def table(*names: str) -> StoredTable:
    places = (ParquetRows(f"made/{name}.parquet", 0, 3) for name in names)
    return StoredTable(SCHEMA, tuple(Piece(d, 3, 24, (p,)) for d, p in zip(names, places)))


def keep(store: Store, identity: str, *names: str) -> None:
    for name in names:
        store.root.child("~tables", "made").write(f"{name}.parquet", b"made")
    write_record(store.root, identity, COMPLETE, table(*names))


def files(store: Store) -> set[str]:
    return set(store.root.child("~tables", "made").entries())


def age(store: Store, days: float, below: str = "") -> None:
    then = time.time() - days * DAY
    for file in Path(store.root.path, "~tables", below).rglob("*"):
        os.utime(file, (then, then))


def collected(store: Store, dry_run: bool = False) -> list[str]:
    policy = GcPolicy(time.time(), 7 * DAY, DAY, dry_run)
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
        ParquetRows("made/a.parquet", 5, 9),
        ParquetRows("made/b.parquet", 0, 4),
    )
    detail = dumped_places(10, places)
    assert tuple(places_of(FileSpan("x", 10, 18, detail))) == places
    some = places_of(FileSpan("x", 13, 15, detail))
    assert list(some) == [ParquetRows("made/a.parquet", 8, 9), places[1]._replace(stop=1)]
    stored = StoredTable(SCHEMA, (Piece("a", 8, 64, places),))
    write_record(store.root, "x", COMPLETE, stored)
    assert read_record(store.root, "x") == stored
    assert stored.files == {"made/a.parquet", "made/b.parquet"}


def test_a_range_of_rows_crosses_places():
    places = [ParquetRows("a", 0, 3), ParquetRows("b", 10, 12), ParquetRows("c", 20, 24)]
    assert list(clipped(places, 2, 7)) == [
        ParquetRows("a", 2, 3),
        ParquetRows("b", 10, 12),
        ParquetRows("c", 20, 22),
    ]
    assert list(clipped(places, 8, 1 << 62)) == [ParquetRows("c", 23, 24)]


def test_the_first_to_complete_a_table_wins(store):
    assert read_record(store.root, "x") is None
    assert create_record(store.root, "x", table("a")) == table("a")
    assert create_record(store.root, "x", table("b")) == table("a")
    assert read_record(store.root, "x") == table("a")


def test_what_no_recent_run_needed_is_deleted(store):
    keep(store, "old", "a", "b")
    age(store, 9)
    keep(store, "new", "b", "c")
    age(store, 9, "made")
    assert collected(store, dry_run=True) == ["made/a.parquet", "records/old/complete.json"]
    assert len(files(store)) == 3
    assert collected(store) == ["made/a.parquet", "records/old/complete.json"]
    assert files(store) == {"b.parquet", "c.parquet"}
    assert collected(store) == []


def test_what_a_manifest_in_force_names_is_kept(store):
    keep(store, "x", "a")
    keep(store, "y", "b")
    age(store, 30)
    commit(store, "x")
    assert collected(store) == ["made/b.parquet", "records/y/complete.json"]
    assert read_record(store.root, "x") == table("a")


def test_a_run_that_needs_a_table_keeps_it(store):
    rows = vd.table({"id": range(100)})
    listed = rows.list_files([None], "here")[None]
    assert not isinstance(listed, vd.errors.SourceError)
    rule = FragmentRule(1_000)
    rows.bind(store).split(listed, rule, "here")
    age(store, 30)
    rows.bind(store).split(listed, rule, "here")
    assert collected(store) == []
