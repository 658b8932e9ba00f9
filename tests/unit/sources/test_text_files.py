"""Text, a row a line."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import rows, split
from vane_dagster.storage.gc import GcPolicy, collect

DAY = 86_400.0


def test_a_row_a_line_without_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\ufeffthree\u2028".encode()))
    (tmp_path / "c.txt").write_bytes(b"")
    source = vd.text(str(tmp_path))
    assert [row["text"] for row in rows(source)] == ["one", "", "two", "three\u2028"]
    paths = [row["path"] for row in rows(vd.text(str(tmp_path), include_paths=True))]
    assert paths == [f"{tmp_path}/a.txt"] * 3 + [f"{tmp_path}/b.txt.gz"]


def test_an_encoding_is_declared(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(vd.errors.SourceError, match=r"a\.txt': it is not valid UTF-8"):
        rows(vd.text(str(tmp_path)))
    assert rows(vd.text(str(tmp_path), encoding="latin-1"))[1] == {"text": "ÿ"}


def test_rows_of_files_that_no_plan_uses_are_collected(tmp_path, store):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    source = vd.text(str(folder)).bind(store)
    assert rows(source) == [{"text": "one"}]
    spans = split(source).fragments[0].spans
    tables = store.root.child("~tables")
    stored = tables.entries()
    assert sorted(path.partition("/")[0] for path in stored) == ["files", "records", "records"]
    written = max(info.modified for info in stored.values())

    def collected(days: float) -> list[str]:
        policy = GcPolicy(written + days * DAY, 7 * DAY, DAY)
        return [url for report in collect(store, policy) for url in report.files]

    assert collected(7.5) == []
    assert len(collected(8.5)) == 2  # the types of the source are kept
    with pytest.raises(vd.errors.SourceError, match="It was deleted from the store"):
        source.find(spans, pa.field("text", pa.string()), "one")
    assert rows(vd.text(str(folder)).bind(store)) == [{"text": "one"}]
