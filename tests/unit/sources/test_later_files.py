"""Files whose values do not have the types that the first run has found, or that are declared."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.ingested import bound, refusal, rows
from vane_dagster.sources.base import ROW_ERROR


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


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ("1", ['"7"', "true", "2.0"], [ROW_ERROR, ROW_ERROR, 2]),
        ("[1]", ["[true]", "[2]"], [ROW_ERROR, [2]]),
        ('{"x":1}', ['{"x":true}', '{"X":1}', '{"y":1}', '{"x":2,"y":1}'],
         [ROW_ERROR, ROW_ERROR, ROW_ERROR, {"x": 2}]),
        ("null", ['{"x":5}', "5"], [ROW_ERROR, "5"]),
        ('{"x":null}', ['{"x":5}'], [{"x": "5"}]),
    ],
)  # fmt: skip
def test_values_of_other_types_in_json(first, later, expected, tmp_path):
    (tmp_path / "a.json").write_text(f'{{"i":1,"t":{first}}}\n')
    source = bound(vd.json(str(tmp_path)))
    rows(source)
    for number, text in enumerate(later):
        (tmp_path / f"b{number}.json").write_text(f'{{"i":2,"t":{text}}}\n')
    assert read(source)[1:] == expected


def test_declared_types_change_no_value(tmp_path):
    (tmp_path / "a.json").write_text('{"p":5,"f":1e39,"l":[1.105]}\n{"p":6.25,"f":1.5,"l":null}\n')
    kinds = {"p": "DECIMAL(10,2)", "f": "FLOAT", "l": "DECIMAL(10,2)[]"}
    found = [read(vd.json(str(tmp_path), types={name: kinds[name]}), name) for name in kinds]
    assert [[str(each) for each in values] for values in found] == [
        ["5.00", "6.25"], [ROW_ERROR, "1.5"], [ROW_ERROR, "None"],
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text("t\n2026-01-31 10:00:00.5\n")
    assert read(vd.csv(str(tmp_path), types={"t": "TIMESTAMP_S"})) == [ROW_ERROR]


@pytest.mark.parametrize(("ending", "pack"), [("bz2", bz2.compress), ("gz", gzip.compress)])
def test_what_follows_a_compressed_stream_is_read_or_refused(ending, pack, tmp_path):
    file = Path(tmp_path, f"a.csv.{ending}")
    file.write_bytes(pack(b"t\n1\n") + pack(b"2\n"))
    assert read(vd.csv(str(tmp_path))) == [1, 2]
    file.write_bytes(pack(b"t\n1\n") + b"\0\1" + pack(b"2\n"))
    assert "truncated or damaged" in refusal(vd.csv(str(tmp_path)))
