"""JSON lines: columns, types, and what is refused."""

from __future__ import annotations

import gzip
import json
from datetime import date, time
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, ReadContext, SourceTable
from vane_dagster.sources.record_files import RecordSource

CONTEXT = ReadContext("here")


def split(source: RecordSource, rows: int = 1000) -> SourceTable:
    files = source.required(source.list_files([None], "here")[None], None, "here")
    return source.split(files, FragmentRule(rows), "here")


def rows(source: RecordSource, most: int = 1000) -> list[dict[str, Any]]:
    table = split(source, most)
    found = [source.read(each, table.schema, CONTEXT) for each in table.fragments]
    return [row for each in found for row in each.to_pylist()]


def types(source: RecordSource) -> dict[str, str]:
    schema = split(source).schema
    return dict(zip(schema.names, map(str, schema.types)))


def written(folder: Path, data: bytes, name: str = "a.jsonl") -> str:
    (folder / name).write_bytes(data)
    return str(folder)


def test_columns_are_found_in_the_files(tmp_path):
    text = b'{"n":1,"x":1.5,"o":{"a":[1]},"s":"x","e":null}\n\n{"n":2,"new":true}\n'
    source = vd.json(written(tmp_path, text))
    assert types(source) == {
        "n": "int64", "x": "double", "o": "struct<a: list<item: int64>>", "s": "string",
        "e": "string", "new": "bool",
    }  # fmt: skip
    first, second = rows(source)
    assert first == {"n": 1, "x": 1.5, "o": {"a": [1]}, "s": "x", "e": None, "new": None}
    assert second == {"n": 2, "x": None, "o": None, "s": None, "e": None, "new": True}


def test_files_may_have_different_columns(tmp_path):
    written(tmp_path, b'{"a":1,"o":{"x":1}}\n')
    written(tmp_path, gzip.compress(b'{"a":2,"o":{"y":"z"}}\n'), "b.ndjson.gz")
    written(tmp_path, b"", "c.json")
    source = vd.json(str(tmp_path))
    expected = [{"a": 1, "o": {"x": 1, "y": None}}, {"a": 2, "o": {"x": None, "y": "z"}}]
    assert rows(source) == expected
    written(tmp_path, b'{"a":"x"}\n', "d.json")
    with pytest.raises(vd.SourceError, match=r"d\.json.*types= or schema="):
        rows(source)
    assert [row["a"] for row in rows(vd.json(str(tmp_path), types={"a": "VARCHAR"}))] == [
        "1",
        "2",
        "x",
    ]


def test_declared_columns_are_those_of_the_source(tmp_path):
    url = written(tmp_path, b'{"a":1,"b":2}\n{"b":{"c":3}}\n')
    schema = {"b": "VARCHAR", "a": "TINYINT", "later": "DATE"}
    assert rows(vd.json(url, schema=schema)) == [
        {"b": "2", "a": 1, "later": None},
        {"b": '{"c":3}', "a": None, "later": None},
    ]
    assert types(vd.json(url, schema=schema))["a"] == "int8"
    with pytest.raises(vd.SourceError, match="no file has the column 'z'"):
        rows(vd.json(url, types={"z": "VARCHAR"}))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BIGINT", "1.5"),
        ("BIGINT", '"xyzzy"'),
        ("BIGINT", "true"),
        ("DOUBLE", "true"),
        ("DATE", '"2024-01-31 10:00:00"'),
        ("TIMESTAMP", '"2024-01-31T10:00:00+02:00"'),
        ("STRUCT(a BIGINT)", '{"a": 1.5}'),
        ("BIGINT[]", "[1.5]"),
        ("BIGINT[2]", "[1.5, 2]"),
        ("MAP(VARCHAR, BIGINT)", '{"a": 1.5}'),
        ("STRUCT(a STRUCT(b TIME)[])", '{"a": [{"b": "10:00:00.1234567"}]}'),
        ("BOOLEAN", "20"),
        ("BOOLEAN", "0.5"),
        ("DOUBLE", "9007199254740993"),
        ("DOUBLE", "1e400"),
        ("DOUBLE[]", "[0.5, 9007199254740993]"),
        ("TIME", '"24:00:00"'),
        ("TIMESTAMPTZ", '"2024-01-31T10:00:00.1234567Z"'),
    ],
)
def test_a_value_that_does_not_fit_names_file_line_and_column(kind, value, tmp_path):
    lines = [f'{{"id": {n}, "v": null}}' for n in range(40)]
    lines[30] = f'\n{{"id": 30, "v": {value}}}'
    source = vd.json(written(tmp_path, "\n".join(lines).encode()), types={"v": kind})
    with pytest.raises(vd.SourceError) as caught:
        rows(source, 25)
    message = str(caught.value)
    assert f"'file://{tmp_path}/a.jsonl', line 32: column 'v'" in message
    assert value not in message.replace(str(tmp_path), "")


def test_nested_values_are_converted_as_others(tmp_path):
    kind = "STRUCT(d DATE, m MAP(VARCHAR, DOUBLE), f INTEGER[2], l STRUCT(t TIME, b BOOLEAN)[])"
    values = [
        {"d": "2024-1-31", "m": {"a": 1, "b": None}, "f": [1, 2], "l": [{"t": "9:05"}, None]},
        None,
        {"d": None, "m": {}, "f": None, "l": []},
        {"d": "2024-02-01", "m": None, "f": [None, 4], "l": [{"t": None, "b": True}, {"b": 0}]},
    ]
    text = "".join(json.dumps({"v": value}) + "\n" for value in values)
    source = vd.json(written(tmp_path, text.encode()), types={"v": kind})
    assert [row["v"] for row in rows(source)] == [
        {"d": date(2024, 1, 31), "m": [("a", 1.0), ("b", None)], "f": [1, 2],
         "l": [{"t": time(9, 5), "b": None}, None]},
        None,
        {"d": None, "m": [], "f": None, "l": []},
        {"d": date(2024, 2, 1), "m": None, "f": [None, 4],
         "l": [{"t": None, "b": True}, {"t": None, "b": False}]},
    ]  # fmt: skip


def test_whole_numbers_among_fractions_lose_nothing(tmp_path):
    lines = b'{"v":1.5}\n{"v":9007199254740992}\n'
    source = vd.json(written(tmp_path, lines))
    assert types(source) == {"v": "double"}
    assert [row["v"] for row in rows(source)] == [1.5, 2.0**53]
    source = vd.json(written(tmp_path, lines + b'{"v":9007199254740993}\n'))
    with pytest.raises(vd.SourceError, match="line 3: column 'v' has a value that DOUBLE"):
        rows(source)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[{"a":1}]', "is a JSON array, expected JSON lines"),
        (b'{"a":1}\n5\n', ", line 2: it is a number; expected an object a line"),
        (b'{"a":1}\n\n{"a":\n', ", line 3: it is not valid JSON"),
        (b'{\n"a":1}\n', ", line 1: it is not valid JSON; expected an object a line"),
        (b'{"a":1}{"a":2}\n', ", line 1: it is not valid JSON"),
        (b'{"a":1}\n{"a":"\xe9"}\n', ", line 2: it is not valid UTF-8"),
        (b'{"a":1,"a":2}\n', ", line 1: an object has a key twice"),
        (b'{"a":1,"A":2}\n', "has the keys 'a' and 'A'"),
        (b'{"a":1,"A":2}\n', "Rename one in the file, or declare the one to read by schema="),
        (b'{"o":[{"x":1}]}\n{"o":[{"X":2}]}\n', "has the keys 'o.x' and 'o.X'"),
        (b"", "has no row to find columns in"),
        (b"{}\n", "has no row to find columns in"),
    ],
)
def test_bad_files_are_refused(data, expected, tmp_path):
    source = vd.json(written(tmp_path, data))
    with pytest.raises(vd.SourceError) as caught:
        rows(source)
    assert f"'file://{tmp_path}/a.jsonl'" in str(caught.value)
    assert expected in str(caught.value)


def test_bad_lines_behind_the_head_are_refused(tmp_path):
    good = b'{"a":1}\n' * 600_000
    for bad, expected in (
        (b'{"a":\n', "line 600001: it is not valid JSON"),
        (b"[1]\n", "line 600001"),
        (b'{"a":"\xe9"}\n', "line 600001: it is not valid UTF-8"),
    ):
        source = vd.json(written(tmp_path, good + bad + good))
        with pytest.raises(vd.SourceError, match=expected):
            rows(source, 500_000)


def test_lines_longer_than_duckdbs_buffers_are_read(tmp_path):
    text = b'{"s":"' + b"x" * 20_000_000 + b'","n":1}\n{"n":2}\n'
    source = vd.json(written(tmp_path, text), schema={"n": "BIGINT"})
    assert [row["n"] for row in rows(source)] == [1, 2]


def test_other_encodings(tmp_path):
    url = written(tmp_path, '{"a":"é"}\n'.encode("utf-16"))
    assert rows(vd.json(url, encoding="utf-16")) == [{"a": "é"}]
