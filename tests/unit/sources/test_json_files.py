"""JSON lines: columns, types, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import vane_dagster as vd
from support.ingested import misfits, refusal, rows, types
from vane_dagster.sources import FragmentRule


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
    assert types(source)["a"] == "string"
    assert [row["a"] for row in rows(source)] == ["1", "2", "x"]
    written(tmp_path, b'{"a":[1]}\n', "e.json")
    assert "column 'a' has values without a common type" in refusal(source)


def test_declared_columns_are_those_of_the_source(tmp_path):
    url = written(tmp_path, b'{"a":1,"b":2}\n{"b":{"c":3}}\n')
    schema = {"b": "VARCHAR", "a": "TINYINT", "later": "DATE"}
    assert rows(vd.json(url, schema=schema)) == [
        {"b": "2", "a": 1, "later": None},
        {"b": '{"c": 3}', "a": None, "later": None},
    ]
    assert types(vd.json(url, schema=schema))["a"] == "int8"
    assert [row["z"] for row in rows(vd.json(url, types={"z": "VARCHAR"}))] == [None, None]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BIGINT", "true"),
        ("DATE", '"2024-01-31 10:00:00"'),
        ("TIMESTAMP", '"2024-01-31T10:00:00+02:00"'),
        ("DECIMAL(20,2)", "19.999"),
        ("DOUBLE", "9007199254740993"),
        ("DOUBLE[]", "[0.5, 9007199254740993]"),
    ],
)
def test_a_value_that_does_not_fit_is_the_error_of_its_row(kind, value, tmp_path):
    lines = [f'{{"id": {n}, "v": null}}' for n in range(40)]
    lines[30] = f'\n{{"id": 30, "v": {value}}}'
    source = vd.json(written(tmp_path, "\n".join(lines).encode()), types={"v": kind})
    (message,) = misfits(source)
    assert f"'file://{tmp_path}/a.jsonl', row 30, counted from 0: column 'v'" in message
    assert "null_values" not in message
    assert value not in message.replace(str(tmp_path), "")
    assert [row["id"] for row in rows(source, FragmentRule(25))] == list(range(40))


def test_strings_and_mixed_values_are_text(tmp_path):
    lines = b'{"t":"2024-01-31 10:00:00","m":1,"b":12345678901234567890123}\n{"m":"x","b":1}\n'
    source = vd.json(written(tmp_path, lines + b'{"m":{"y":[true,null]},"e":{}}\n'))
    assert set(types(source).values()) == {"string"}
    first, second, third = rows(source)
    assert first["t"] == "2024-01-31 10:00:00"
    assert [row["m"] for row in (first, second, third)] == ["1", "x", '{"y": [true, null]}']
    assert (first["b"], second["b"], third["e"]) == ("12345678901234567890123", "1", "{}")


def test_whole_numbers_among_fractions_lose_nothing(tmp_path):
    lines = b'{"v":1.5}\n{"v":9007199254740992}\n'
    source = vd.json(written(tmp_path, lines))
    assert types(source) == {"v": "double"}
    assert [row["v"] for row in rows(source)] == [1.5, 2.0**53]
    written(tmp_path, b'{"v":9007199254740993}\n', "b.jsonl")
    source = vd.json(str(tmp_path))
    first, second, third = (row["v"] for row in rows(source))
    assert (first, float(second), third) == ("1.5", 2.0**53, "9007199254740993")


LONG = b'{"a":1}\n' * 100


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[{"a":1}]', "for a double: line 1; expected an object a line"),
        (b'{"a":1}\n5\n', "for a double: line 2; expected an object a line"),
        (b'{"a":1}\n null \r\n{"a":1}\n', "for a double: line 2; expected an object a line"),
        (b'{"a":1}\n\n{"a":\n', "for a double: line 3; expected an object a line"),
        (b'{"a":1}\n{"a":"\xe9"}\n', "it is not valid UTF-8"),
        (b'{"a":1} {"a":2}\n', "for a double: line 1; expected an object a line"),
        (b'{"a":1}\n{"a":\n2}\n', "for a double: line 2, line 3; expected an object a line"),
        (b'{"a":1e400}\n', "for a double: line 1; expected an object a line"),
        (b'{"a":1,"A":2}\n', "columns 'a' and 'A' are the same name to SQL"),
        (b"", "has no row to find columns in"),
        (LONG + b'{"a":\n' + LONG, "for a double: line 101; expected an object a line"),
        (LONG + b"[1]\n" + LONG, "line 101"),
        (b'{"a":\n' * 3 + LONG + b"5\n" * 9, "line 1, line 2, line 3, line 104, "),
        (b"5\n" * 12, "line 9, line 10 and 2 more; expected an object a line. Fix the file: jq"),
        (LONG + b'{"a":"\xe9"}\n' + LONG, "it is not valid UTF-8"),
        (b'{"a":1}\n{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line "),
    ],
    ids=lambda value: value[-20:] if isinstance(value, bytes) else value,
)
def test_bad_files_are_refused(data, expected, tmp_path, monkeypatch):
    if data.startswith(LONG):  # the line is behind the first block
        monkeypatch.setattr("vane_dagster.sources.text_stream.BLOCK", 64)
    source = vd.json(written(tmp_path, data))
    with pytest.raises((vd.errors.SourceError, vd.errors.SchemaError)) as caught:
        rows(source)
    assert f"'file://{tmp_path}/a.jsonl'" in str(caught.value)
    assert expected in str(caught.value)


def test_booleans_among_numbers_stay_booleans(tmp_path):
    text = b'{"v":[1.5]}\n{"v":[true]}\n{"v":[2],"x":{}}\n'
    found = [row["v"] for row in rows(vd.json(written(tmp_path, text)))]
    assert [json.loads(value) for value in found] == [[1.5], [True], [2]]
    assert found[1] == "[true]"


def test_lists_that_the_fast_reader_truncates_are_read(tmp_path):
    text = b'{"k":false}\n{"k":[true]}\n{"k":{}}\n{"k":[]}\n{"l":[]}\n{"l":[null,null]}\n'
    found = rows(vd.json(written(tmp_path, text)))
    assert [row["k"] for row in found[:4]] == ["false", "[true]", "{}", "[]"]
    assert [row["l"] for row in found[4:]] == [[], [None, None]]
