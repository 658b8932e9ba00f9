"""Text, a row a line."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, ReadContext
from vane_dagster.sources.record_files import RecordSource
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.source_indexes import SourceIndex, source_indexes
from vane_dagster.storage.store import Store

DAY = 86_400.0


def rows(source: RecordSource, most: int = 1000) -> list[dict[str, Any]]:
    files = source.required(source.list_files([None], "here")[None], None, "here")
    table = source.split(files, FragmentRule(most), "here")
    found = [source.read(each, table.schema, ReadContext("here")) for each in table.fragments]
    return [row for each in found for row in each.to_pylist()]


def test_a_row_a_line_without_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\ufeffthree\u2028".encode()))
    (tmp_path / "c.txt").write_bytes(b"")
    source = vd.text(str(tmp_path))
    assert [row["text"] for row in rows(source)] == ["one", "", "two", "three\u2028"]
    paths = [row["path"] for row in rows(vd.text(str(tmp_path), include_paths=True))]
    assert paths == [f"{tmp_path}/a.txt"] * 3 + [f"{tmp_path}/b.txt.gz"]


def test_bytes_that_are_no_text_name_the_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n" * 50 + b"\xff\n" + b"two\n" * 50)
    with pytest.raises(vd.SourceError, match=r"a\.txt', line 51: it is not valid UTF-8"):
        rows(vd.text(str(tmp_path)), 20)
    assert rows(vd.text(str(tmp_path), encoding="latin-1"))[50] == {"text": "ÿ"}
    (tmp_path / "a.txt").write_bytes("é".encode("utf-16")[:-1])
    with pytest.raises(vd.SourceError, match=r"is not valid utf-16\. Set encoding="):
        rows(vd.text(str(tmp_path), encoding="utf-16"))


def test_indexes_that_no_plan_uses_are_collected(tmp_path):
    root = Location(str(tmp_path))
    index = SourceIndex(root, "a" * 40)
    assert index.entries() == {}
    index.keep({"x": [1]})
    (modified,) = (info.modified for info in source_indexes(root).entries().values())
    index.keep({"x": [1]})
    assert index.entries() == {"x": [1]}
    assert [i.modified for i in source_indexes(root).entries().values()] == [modified]

    def collected(days: float, dry_run: bool = False) -> list[str]:
        policy = GcPolicy(modified + days * DAY, 7 * DAY, DAY, dry_run)
        return [url for report in collect(Store(root), policy) for url in report.files]

    assert collected(7.5) == []
    assert (
        collected(8.5, dry_run=True) == collected(8.5) == [f"{root.url}/~indexes/{'a' * 40}.json"]
    )
    assert index.entries() == {}
