"""Conversion of files into the store: attempts, and what is kept of them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.ingested import bound, refusal, rows
from vane_dagster.sources import piece_writer
from vane_dagster.sources.piece_writer import PieceWriter
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.stored_tables import tables


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_rows_are_where_the_writer_says(size, tmp_path, monkeypatch):
    monkeypatch.setattr(piece_writer, "PIECE_BYTES", size)
    root = Location(str(tmp_path))
    values = [[1, 2], [3], ["x"], [4, 5], ["y"]]
    with PieceWriter(root, "files") as writer:
        places = [writer.write(pa.table({"n": each})) for each in values]
    for place, expected in zip(places, values):
        file = pq.read_table(tables(root).file(place.name))
        assert file["n"].to_pylist()[place.start : place.stop] == expected


def test_files_are_converted_once(tmp_path, monkeypatch):
    """Also those beside a bad one, and without it when it is mended."""
    for name, text in (("a", "id\n1\n"), ("b", "id,id\n1,2\n"), ("c", "id\n3\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    source, read = bound(vd.csv(str(tmp_path))), []
    convert = type(source).convert

    def counted(self, stream):
        read.append(stream.url[-5])
        return convert(self, stream)

    monkeypatch.setattr(type(source), "convert", counted)
    assert "b.csv': the header has the column 'id' twice" in refusal(source)
    (tmp_path / "b.csv").write_text("id\n2\n")
    assert [row["id"] for row in rows(source)] == [1, 2, 3]
    assert sorted(read) == ["a", "b", "b", "c"]
    (tmp_path / "d.csv").write_text("id\n4\n")
    (tmp_path / "c.csv").write_text("id\n3\n5\n")
    assert [row["id"] for row in rows(source)] == [1, 2, 3, 5, 4]
    assert sorted(read[4:]) == ["c", "d"]


def test_rows_that_were_deleted_from_the_store_are_converted_again(tmp_path, store):
    (tmp_path / "a.csv").write_text("id\n1\n")
    source = vd.csv(str(tmp_path / "a.csv")).bind(store)
    assert rows(source) == [{"id": 1}]
    folder = store.root.child("~tables", "files")
    folder.delete(list(folder.entries()))
    assert rows(source) == [{"id": 1}]
