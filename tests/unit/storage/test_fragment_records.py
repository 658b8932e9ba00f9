"""Fragments in manifests: records of one file are as they were, those of many have a new format."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa

from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord, Manifest

SINGLE = FragmentRecord("u", 0, 3, "i", 9)
MANY = FragmentRecord("u", 0, 5, "j", 9, (FileSpan("u", 0, 2), FileSpan("v", 0, 3)))
MANIFEST = Manifest(
    pipeline="p", stage="s", partition=None, generation=0, plan="0", definition="1",
    schema=pa.schema([("id", pa.int64())]), fragments=[SINGLE], parts=[],
    files=[FileRecord("u", 1, "v")], upstream={}, run_id="r", committed_at=1.0,
)  # fmt: skip


def test_a_fragment_of_one_file_is_written_as_before():
    record = json.loads(MANIFEST.dumps())
    assert record["format"] == 2
    assert record["fragments"] == [{"url": "u", "start": 0, "stop": 3, "identity": "i", "bytes": 9}]
    assert "source" not in record


def test_a_fragment_of_many_files_comes_back():
    manifest = replace(MANIFEST, fragments=[SINGLE, MANY])
    record = json.loads(manifest.dumps())
    assert record["format"] == 3
    assert record["fragments"][1]["files"] == [
        {"url": "u", "start": 0, "stop": 2},
        {"url": "v", "start": 0, "stop": 3},
    ]
    assert Manifest.loads(manifest.dumps()) == replace(manifest, fragments=[SINGLE, MANY])


def test_the_kind_of_a_source_that_is_not_parquet_comes_back():
    manifest = replace(MANIFEST, source="jsonl")
    record = json.loads(manifest.dumps())
    assert (record["format"], record["source"]) == (3, "jsonl")
    assert Manifest.loads(manifest.dumps()).source == "jsonl"


def test_how_ids_were_computed_comes_back():
    found = replace(MANIFEST, id_rule='{"row": true}')
    record = json.loads(found.dumps())
    assert (record["format"], record["id_rule"]) == (3, '{"row": true}')
    assert Manifest.loads(found.dumps()) == found
