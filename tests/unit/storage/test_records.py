"""Records of a stage in the store: statistics, floors, pinned schemas and quarantined rows."""

from __future__ import annotations

import base64
import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.storage.column_stats import measure
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.quarantine import fault_schema, first_faults, write_faults
from vane_dagster.storage.row_floor import raise_epoch, read_epoch
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin, read_pin
from vane_dagster.storage.store import Store

USED = pa.array([{"calls": 1, "why": "a"}, None, {"calls": 4, "why": "b"}])


def test_what_failed_rows_took_counts_too():
    table = pa.table({"used": USED.slice(0, 0)})
    assert measure(table, ["used"], {"used": ["calls"]}, {"calls": 7}) == {
        "used": {"nulls": 0, "calls": 7}
    }


@pytest.fixture
def store(tmp_path):
    return Store(StoragePath(str(tmp_path)))


def test_each_forced_run_raises_the_floor_of_its_stage_once(store):
    assert read_epoch(store, "docs", "embed") == 0
    first = raise_epoch(store, "docs", "embed", "first")
    assert first > 0
    assert raise_epoch(store, "docs", "embed", "first") == first, "a second attempt"
    second = raise_epoch(store, "docs", "embed", "second")
    assert second > first, "within a second, or if the clock was put back"
    assert (read_epoch(store, "docs", "embed"), read_epoch(store, "docs", "label")) == (second, 0)


def test_the_floor_after_a_lost_file_is_above_those_before(store, tmp_path, monkeypatch):
    now = iter([1_000, 1_000, 1_060])
    monkeypatch.setattr("time.time", lambda: next(now))
    floors = [raise_epoch(store, "docs", "embed", run) for run in ("first", "second")]
    (tmp_path / "docs/embed/row_floor.json").unlink()
    assert raise_epoch(store, "docs", "embed", "third") > max(floors)


def test_a_floor_that_cannot_be_read_is_an_error(store, tmp_path):
    raise_epoch(store, "docs", "embed", "first")
    (tmp_path / "docs/embed/row_floor.json").write_text("{")
    with pytest.raises(vd.errors.StoreError, match=r"row_floor\.json' is not readable"):
        read_epoch(store, "docs", "embed")


PLACE = ("docs", "labels", "0" * 40)


def pin(kind: pa.DataType, run: str) -> SchemaPin:
    return SchemaPin(pa.schema([("x", kind)]), 16, run, 1.5)


def file(store: Store) -> Path:
    return Path(store.root.path) / "docs" / "labels" / "schemas" / f"{'0' * 40}.json"


def test_the_names_on_disk_are_those_that_stores_have(store: Store):
    assert read_pin(store, *PLACE) is None
    kept = keep_pin(store, *PLACE, pin(pa.string(), "one"))
    assert read_pin(store, *PLACE) == kept
    record = json.loads(file(store).read_text())
    assert pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record.pop("schema")))).names == ["x"]
    assert record == {"rows": 16, "run_id": "one", "pinned_at": 1.5}


def test_a_collection_leaves_pins_alone(store: Store):
    keep_pin(store, *PLACE, pin(pa.string(), "one"))
    list(collect(store, GcPolicy(keep=0, grace=0, now=1e12)))
    assert read_pin(store, *PLACE) is not None


def test_without_hard_links_the_first_pin_wins_too(store: Store, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: str) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = pin(pa.string(), "one"), pin(pa.int64(), "two")
    assert keep_pin(store, *PLACE, first) == first
    assert keep_pin(store, *PLACE, second) == first
    assert [path.name for path in file(store).parent.iterdir()] == [file(store).name]


SCHEMA = pa.schema([("id", pa.string())])


def faults(**messages: str) -> pa.Table:
    common = {"stage": "s", "fragment": "f", "traceback": "", "attempts": 1, "run_id": "r"}
    common |= {"model": "m", "worker": "w", "at": datetime.now(UTC), "error": "EOFError"}
    records = [{"id": id, "message": text, **common} for id, text in messages.items()]
    return pa.Table.from_pylist(records, schema=fault_schema(pa.string()))


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 9])
def test_first_faults_of_several_parts(tmp_path, limit):
    folder = StoragePath(str(tmp_path))
    names = [
        write_faults(folder, "one", faults(a="", b="two\nlines")),
        "",
        write_faults(folder, "two", faults(c="x" * 900)),
    ]
    parts = [PartInfo(str(n), "d", 0, 1, faults=name) for n, name in enumerate(names)]
    manifest = Manifest(
        "p", "s", None, 0, "", "", SCHEMA, (), parts, (), {}, "r", 0.0, keys=("id",)
    )
    found = first_faults(folder, manifest.parts, limit)
    expected = ["id 'a': EOFError", "id 'b': EOFError: two lines", f"id 'c': EOFError: {'x' * 190}"]
    assert list(found) == expected[:limit]
