"""Avro files: types of their schemas, types that differ, and what is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pytest

import vane_dagster as vd
from support.ingested import misfits, refusal, rows, types
from vane_dagster.sources import FragmentRule


def write(path: Path, fields: dict[str, Any], *records: Any) -> None:
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }
    with open(path, "wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), records, codec="deflate")


def test_types_are_those_of_the_files(tmp_path):
    nested = {"type": "record", "name": "In", "fields": [{"name": "x", "type": "float"}]}
    fields = {
        "id": "long",
        "n": ["null", "int"],
        "on": "boolean",
        "raw": "bytes",
        "day": {"type": "int", "logicalType": "date"},
        "at": {"type": "long", "logicalType": "timestamp-micros"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "kind": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]},
        "key": {"type": "string", "logicalType": "uuid"},
        "tags": {"type": "array", "items": "string"},
        "counts": {"type": "map", "values": "long"},
        "inner": ["null", nested],
    }
    at = datetime.datetime(2024, 1, 31, 10, tzinfo=datetime.timezone.utc)
    row = {
        "id": 1, "n": None, "on": True, "raw": b"\0", "day": at.date(), "at": at,
        "price": Decimal("1.50"), "kind": "B", "key": UUID(int=5), "tags": ["a", "b"],
        "counts": {"a": 1}, "inner": {"x": 0.5},
    }  # fmt: skip
    write(tmp_path / "a.avro", fields, row, {**row, "id": 2, "n": 7, "inner": None})
    source = vd.avro(str(tmp_path))
    assert list(types(source).values()) == [
        "int64", "int32", "bool", "binary", "date32[day]", "timestamp[us, tz=UTC]",
        "decimal128(9, 2)", "string", "string", "list<item: string>", "map<string, int64>",
        "struct<x: float>",
    ]  # fmt: skip
    first, second = rows(source, FragmentRule(1))
    assert first == {**row, "key": str(UUID(int=5)), "counts": [("a", 1)]}
    assert (second["id"], second["n"], second["inner"]) == (2, 7, None)


def test_files_may_differ_in_types_that_have_a_common_one(tmp_path):
    write(tmp_path / "a.avro", {"id": "long", "v": "int"}, {"id": 1, "v": 1})
    write(tmp_path / "b.avro", {"id": "long", "v": "long"}, {"id": 2, "v": 2**40})
    assert [row["v"] for row in rows(vd.avro(str(tmp_path)))] == [1, 2**40]
    (message,) = misfits(vd.avro(str(tmp_path), types={"v": "INTEGER"}))
    assert "b.avro', row 1: column 'v' has a value that is no INTEGER" in message


@pytest.mark.parametrize("kind", [["int", "string"], ["null", "int", "string"]])
def test_unions_are_refused(kind, tmp_path):
    write(tmp_path / "a.avro", {"v": kind}, {"v": 1})
    assert "a.avro': it cannot be read as Avro" in refusal(vd.avro(str(tmp_path)))


def test_a_damaged_file_is_refused(tmp_path):
    write(tmp_path / "a.avro", {"v": "string"}, *({"v": "x" * 50} for _ in range(100)))
    data = (tmp_path / "a.avro").read_bytes()
    for damaged in (data[:-40], b"", b"no Avro"):
        (tmp_path / "a.avro").write_bytes(damaged)
        assert "a.avro': it cannot be read as Avro" in refusal(vd.avro(str(tmp_path)))
