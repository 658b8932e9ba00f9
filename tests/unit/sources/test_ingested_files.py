"""Conversion of text files into the store: attempts, what is kept, and files that come later."""

from __future__ import annotations

import bz2
import gzip
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.ingested import bound, refusal, rows, split
from vane_dagster.sources import piece_writer
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.sources.piece_writer import PieceWriter
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.stored_tables import tables


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_rows_are_where_the_writer_says(size, tmp_path, monkeypatch):
    monkeypatch.setattr(piece_writer, "PIECE_BYTES", size)
    root = StoragePath(str(tmp_path))
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
    assert sorted(path.partition("/")[0] for path in stored) == ["files", "records"]
    written = max(info.modified for info in stored.values())

    def collected(days: float) -> list[str]:
        policy = GcPolicy(written + days * DAY, 7 * DAY, DAY)
        return [url for report in collect(store, policy) for url in report.files]

    assert collected(7.5) == []
    assert len(collected(8.5)) == 2
    assert any(name.startswith("types-") for name in store.root.names()), "they are kept"
    with pytest.raises(vd.errors.SourceError, match="It was deleted from the store"):
        source.find(spans, pa.field("text", pa.string()), "one")
    assert rows(vd.text(str(folder)).bind(store)) == [{"text": "one"}]


def test_rows_that_a_later_version_replaces_are_kept_for_runs_that_read_them(tmp_path, store):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    source = vd.text(str(folder)).bind(store)
    spans = split(source).fragments[0].spans
    made = Path(tmp_path, "store/~tables/files").rglob("*.parquet")
    for path in made:
        os.utime(path, (0, 0))  # as if it had been converted long ago
    (folder / "a.txt").write_text("other\n")
    split(vd.text(str(folder)).bind(store))
    reports = collect(store, GcPolicy(time.time(), 7 * DAY, DAY))
    assert [url for report in reports for url in report.files] == []
    assert source.find(spans, pa.field("text", pa.string()), "one")


def read(source: Any, column: str = "t") -> list[Any]:
    """The values of a column, with `ROW_ERROR` for a row that does not fit."""
    return [ROW_ERROR if row.get(ROW_ERROR) else row[column] for row in rows(source)]


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ("5", ["6", "007", "+6", "0x1F", "6.0"], [6, *[ROW_ERROR] * 4]),
        ("0.5", ["6", "1e3", "0.12345678901234567890", "12345678901234567890", "1e400"],
         [6.0, 1000.0, 0.12345678901234568, *[ROW_ERROR] * 2]),
        ("true", ["False", "1", "yes"], [False, ROW_ERROR, ROW_ERROR]),
        ("2026-01-31", [" 2026-02-01 ", "2026-02-30", "01/02/2026"], ["date", *[ROW_ERROR] * 2]),
    ],
)  # fmt: skip
def test_texts_by_which_another_type_would_have_been_found(first, later, expected, tmp_path):
    (tmp_path / "a.csv").write_text(f"i,t\n1,{first}\n")
    source = bound(vd.csv(str(tmp_path)))
    rows(source)
    (tmp_path / "b.csv").write_text("i,t\n" + "".join(f"2,{text}\n" for text in later))
    found = read(source)[1:]
    assert [each if not hasattr(each, "year") else "date" for each in found] == expected


@pytest.mark.parametrize("in_one_file", [False, True])
@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ("1", ['"7"', '"x"', '"007"', "true", "2.0", "3"],
         [7, ROW_ERROR, ROW_ERROR, ROW_ERROR, 2, 3]),
        ("true", ["false", "1", '"true"'], [False, ROW_ERROR, True]),
        ("1.5", ["2.5", '"x"', "null"], [2.5, ROW_ERROR, None]),
        ("[1]", ["[true]", "[2]", '"x"', "[]"], [ROW_ERROR, [2], ROW_ERROR, []]),
        ('{"x":1}', ['{"x":true}', '{"X":1}', '{"y":1}', '{"x":2,"y":1}', '"x"', '{"x":3}'],
         [ROW_ERROR, ROW_ERROR, ROW_ERROR, {"x": 2}, ROW_ERROR, {"x": 3}]),
        ("null", ['{"x":5}'], [ROW_ERROR]),
        ("null", ["5"], ["5"]),
        ('{"x":null}', ['{"x":5}'], [{"x": "5"}]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_in_json_fails_its_own_row_alone(
    first, later, expected, in_one_file, tmp_path
):
    (tmp_path / "a.json").write_text(f'{{"i":1,"t":{first}}}\n')
    source = bound(vd.json(str(tmp_path)))
    rows(source)
    for number, text in enumerate(later):
        name = "b.json" if in_one_file else f"b{number}.json"
        with (tmp_path / name).open("a") as file:
            file.write(f'{{"i":2,"t":{text}}}\n')
    assert read(source)[1:] == expected


def test_declared_types_are_a_part_of_the_identity_as_they_take_other_texts(tmp_path):
    (tmp_path / "a.csv").write_text("n,s\n1,a\n")
    found, number, text = (
        split(bound(vd.csv(str(tmp_path), types=types))).fragments[0].identity
        for types in (None, {"n": "BIGINT"}, {"s": "VARCHAR"})
    )
    assert number != found
    assert text == found


def test_declared_types_change_no_value(tmp_path):
    (tmp_path / "a.json").write_text('{"p":5,"f":1e39,"l":[1.105]}\n{"p":6.25,"f":1.5,"l":null}\n')
    kinds = {"p": "DECIMAL(10,2)", "f": "FLOAT", "l": "DECIMAL(10,2)[]"}
    found = [read(vd.json(str(tmp_path), types={name: kinds[name]}), name) for name in kinds]
    assert [[str(each) for each in values] for values in found] == [
        ["5.00", "6.25"], [ROW_ERROR, "1.5"], [ROW_ERROR, "None"],
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text("t\n2026-01-31 10:00:00.0005\n")
    assert read(vd.csv(str(tmp_path), types={"t": "TIMESTAMP_S"})) == [ROW_ERROR]


@pytest.mark.parametrize(("ending", "pack"), [("bz2", bz2.compress), ("gz", gzip.compress)])
def test_what_follows_a_compressed_stream_is_read_or_refused(ending, pack, tmp_path):
    file = Path(tmp_path, f"a.csv.{ending}")
    file.write_bytes(pack(b"t\n1\n") + pack(b"2\n"))
    assert read(vd.csv(str(tmp_path))) == [1, 2]
    file.write_bytes(pack(b"t\n1\n") + b"\0\1" + pack(b"2\n"))
    assert "truncated or damaged" in refusal(vd.csv(str(tmp_path)))
