"""Pinned schemas in the store."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin, read_pin
from vane_dagster.storage.store import Store

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
