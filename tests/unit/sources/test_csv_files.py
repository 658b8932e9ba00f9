"""CSV files: columns, types, fragments, and what is refused."""

from __future__ import annotations

import bz2
import gzip
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import RULE, bound, misfits, read, refusal, rows, split, types
from vane_dagster.sources import FragmentRule


def write(folder: Path, **files: bytes) -> str:
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def one(folder: Path, data: bytes | str, **given: Any) -> Any:
    (folder / "a.csv").write_bytes(data.encode() if isinstance(data, str) else data)
    return vd.csv(str(folder), **given)


def test_types_are_found_in_the_files(tmp_path):
    text = b"n,x,d,t,b,s\n1,1.5,2024-01-31,2024-01-31 10:00:00,true,x\n,,,,,\n"
    source = one(tmp_path, text)
    assert types(source) == {
        "n": "int64", "x": "double", "d": "date32[day]", "t": "timestamp[us]", "b": "bool",
        "s": "string",
    }  # fmt: skip
    first, second = rows(source)
    expected = (1, 1.5, date(2024, 1, 31), datetime(2024, 1, 31, 10), True, "x")
    assert tuple(first.values()) == expected
    assert set(second.values()) == {None}


def test_declared_types_replace_those_in_the_files(tmp_path):
    url = write(tmp_path, a__csv=b"zip,n\n1234,1\n", b__csv=b"zip,n\nx,2\n")
    source = vd.csv(url, types={"n": "INTEGER"})
    assert types(source) == {"zip": "string", "n": "int32"}
    assert [row["zip"] for row in rows(source)] == ["1234", "x"]
    schema = pa.schema([("n", pa.float64())])
    assert rows(vd.csv(url, schema=schema)) == [{"n": 1.0}, {"n": 2.0}]
    assert "has none of the columns 'm'" in refusal(vd.csv(url, schema={"m": "BIGINT"}))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["007"], "string"),
        (["1", "1.5"], "double"),
        (["9007199254740993", "1.5"], "string"),
        (["0.1", "0.10000000000000001"], "double"),
        (["1e400"], "string"),
        (["true", "1"], "string"),
        (["2024-02-30"], "string"),
        (["01/02/2026", "01/13/2026"], "string"),
        (["2024-01-31 10:00", "2024-01-31T10:00:00.123456"], "timestamp[us]"),
        (["2024-01-31T10:00:00Z", "2024-01-31T10:00:00+02:00"], "timestamp[us, tz=UTC]"),
        (["2024-01-31T10:00:00Z", "2024-01-31T10:00:00"], "string"),
        (["2024-01-31", "2024-01-31 10:00"], "timestamp[us]"),
    ],
)
def test_a_type_is_found_if_no_character_of_a_value_is_lost(values, kind, tmp_path):
    """In one file, in one file for each value, and in the opposite order."""
    for order in (values, values[::-1]):
        whole = "".join(
            f'{n},"{value}"\n' if "," in value else f"{n},{value}\n"
            for n, value in enumerate(order)
        )
        folders = tmp_path / f"{order is values}", tmp_path / f"{order is values}, parts"
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        (folders[0] / "a.csv").write_text(f"id,v\n{whole}")
        for n, line in enumerate(whole.splitlines()):
            (folders[1] / f"{n}.csv").write_text(f"id,v\n{line}\n")
        assert {types(vd.csv(str(folder)))["v"] for folder in folders} == {kind}
        if kind == "string":
            found = [row["v"] for row in rows(vd.csv(str(folders[1])))]
            assert found == [value or None for value in order]


def test_types_are_those_of_the_first_run(tmp_path, store):
    """A later file changes none; its values that do not fit are errors of their rows."""
    folder = tmp_path / "src"
    folder.mkdir()
    write(folder, a__csv=b"id,n,e\n1,1,\n")
    assert types(vd.csv(str(folder)).bind(store)) == {"id": "int64", "n": "int64", "e": "string"}
    write(folder, b__csv=b"n,id,e,new\n2,2,05,x\n1.5,3,6,y\n")
    source = vd.csv(str(folder)).bind(store)
    found = [(row["id"], row["n"], row["e"]) for row in rows(source)]
    assert found == [(1, 1, None), (2, 2, "05"), (3, None, "6")]
    (message,) = misfits(source)
    assert "b.csv', row 1, counted from 0: column 'n' has a value that is not of " in message
    kinds = {"n": "DOUBLE", "new": "VARCHAR", "e": "BIGINT"}
    again = [tuple(row.values())[1:] for row in rows(vd.csv(str(folder), types=kinds).bind(store))]
    assert again == [(1, None, None), (2, 5, "x"), (1.5, 6, "y")]


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (b"3,c\n4,d\n", "has none of the columns 'id', 'v'"),
        (b"ID,v\n3,c\n", "columns 'id' and 'ID' are the same name to SQL"),
    ],
)
def test_a_later_file_with_another_header_is_refused(later, expected, tmp_path, store):
    folder = tmp_path / "src"
    folder.mkdir()
    write(folder, a__csv=b"id,v\n1,a\n")
    rows(vd.csv(str(folder)).bind(store))
    write(folder, b__csv=later)
    with pytest.raises((vd.errors.SourceError, vd.errors.SchemaError)) as caught:
        rows(vd.csv(str(folder)).bind(store))
    assert f"'file://{folder}/b.csv'" in str(caught.value)
    assert expected in str(caught.value)


def test_files_without_a_row_pin_no_types(tmp_path, store):
    write(tmp_path, a__csv=b"id,n\n")
    source = vd.csv(str(tmp_path), allow_empty=True)
    assert rows(source.bind(store)) == []
    write(tmp_path, b__csv=b"id,n\n1,2\n")
    assert rows(source.bind(store)) == [{"id": 1, "n": 2}]


def test_types_are_found_in_all_partitions_of_the_run(tmp_path):
    for key, value in (("a", "1"), ("b", "x")):
        (tmp_path / key).mkdir()
        write(tmp_path / key, a__csv=f"v\n{value}\n".encode())
    source = bound(vd.csv(f"{tmp_path}/{{partition_key}}"))
    listed = source.list_files(["a", "b"], "here")
    for key in ("a", "b"):
        table = source.split(listed[key], RULE, "here", key)
        assert table.schema.field("v").type == pa.string()


@pytest.mark.parametrize("declared", ["schema", "types"])
def test_a_declared_column_that_no_file_of_a_partition_has_is_null(declared, tmp_path, store):
    """Also if the types of the others were found without it."""
    write(tmp_path, a__csv=b"id\n1\n", b__csv=b"id,c\n2,x\n")
    url = f"{tmp_path}/{{partition_key}}.csv"
    split(vd.csv(url), partition="a", store=store)
    source = vd.csv(url, **{declared: {"id": "BIGINT", "c": "VARCHAR"}}).bind(store)
    found = {key: read(source, partition=key).to_pylist() for key in "ab"}
    assert found == {"a": [{"id": 1, "c": None}], "b": [{"id": 2, "c": "x"}]}
    assert split(source, partition="b").warnings == ()
    (warning,) = split(source, partition="a").warnings
    assert warning.startswith("here, partition 'a': no file has 'c' of schema= or types=")


@pytest.mark.parametrize("declared", ["schema", "types"])
@pytest.mark.parametrize("url", ["{partition_key}.csv", "*.csv"])
def test_a_declared_column_that_no_file_of_the_source_has_is_an_error(declared, url, tmp_path):
    write(tmp_path, a__csv=b"id,amount\n1,2\n", b__csv=b"id,b\n2,x\n")
    source = vd.csv(
        f"{tmp_path}/{url}", **{declared: {"id": "BIGINT", "amout": "DOUBLE", "b": "VARCHAR"}}
    )
    with pytest.raises(vd.errors.SourceError) as raised:
        split(bound(source), partition="a" if "{" in url else None)
    assert str(raised.value).endswith(
        "schema= or types= is wrong: the source has no column 'amout'; it has 'id', 'amount', 'b'. "
        "Did you mean 'amount'?"
    )


MORNING = datetime(2024, 1, 31, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BIGINT", "1.5"),
        ("DATE", "2024-01-31 10:00:00"),
        ("DATE", "31.01.2024"),
        ("TIMESTAMP", "2024-01-31T10:00:00+02:00"),
        ("DECIMAL(10,2)", "1.005"),
        ("BOOLEAN", "yes"),
        ("DOUBLE", "-1e400"),
        ("DOUBLE", "1,5"),
    ],
)
def test_a_value_that_does_not_fit_is_the_error_of_its_row(kind, value, tmp_path):
    body = "".join(f'{n};"a\nb";\n' for n in range(50))
    text = f'id;s;v\n{body}50;"c";"{value}"\n{body}'
    source = one(tmp_path, text, types={"v": kind})
    (message,) = misfits(source)
    kind = kind.replace("TZ", " WITH TIME ZONE")
    where = f"'file://{tmp_path}/a.csv', row 50, counted from 0: column 'v'"
    assert f"{where} has a value that is not of type {kind}" in message
    assert "null_values=" in message
    assert "types={'v': 'VARCHAR'}" in message
    assert value not in message
    assert [row["id"] for row in rows(source)] == [*range(50), 50, *range(50)]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("BIGINT", " 5 ", 5),
        ("VARCHAR", "007", "007"),
        ("DOUBLE", "+0.1", 0.1),
        ("BOOLEAN", "1", True),
        ("TIMESTAMPTZ", "2024-01-31 10:00+02", MORNING),
        ("DECIMAL(10,2)", "1.5", Decimal("1.50")),
        # Without a declared type, it is found.
        ("timestamp[us, tz=UTC]", "2024-01-31T10:00:00+02:00", MORNING),
        ("string", "31.01.2024 10:00", "31.01.2024 10:00"),
    ],
)
def test_a_value_of_a_type_is_read(kind, value, expected, tmp_path):
    is_declared = kind.isupper()
    given = {"types": {"v": kind}} if is_declared else {}
    source = one(tmp_path, f'id;v\n1;{value}\n2;""\n', **given)
    assert is_declared or types(source)["v"] == kind
    empty = "" if kind in ("VARCHAR", "string") else None
    assert [row["v"] for row in rows(source)] == [expected, empty]


@pytest.mark.parametrize(
    ("data", "given", "expected"),
    [
        (b"1,2\n", {"header": ["a", "b"]}, {"a": 1, "b": 2}),
        (b"1,2\n", {"header": False, "schema": dict.fromkeys("ab", "INT")}, {"a": 1, "b": 2}),
        (b"made today\n\na,b\n1,2\n", {"skip_rows": 1}, {"a": 1, "b": 2}),
        (b"a,b\n1,NA\n", {"null_values": ["NA"]}, {"a": 1, "b": None}),
        (b"a,b\n'1,5',2\n", {"quote": "'"}, {"a": "1,5", "b": 2}),
        (b'a,b\n"x,2\n', {"quote": None}, {"a": '"x', "b": 2}),
        (b'a,b\n"x\\"y",2\n', {"escape": "\\"}, {"a": 'x"y', "b": 2}),
        (b'a,b\n5" pipe,2\n', {}, {"a": '5" pipe', "b": 2}),
        ("a,b\né,2\n".encode("utf-16"), {"encoding": "utf-16"}, {"a": "é", "b": 2}),
        (b"note\ra,b\r1,2\r3,4\r", {"skip_rows": 1}, [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        (b"v\nx\n\nz\n", {}, [{"v": "x"}, {"v": None}, {"v": "z"}]),
        (b"v\n9007199254740993", {}, {"v": 2**53 + 1}),  # a short last line is no open quote
        (
            b"\n\nx\n\ny",
            {"header": False},
            [{"column0": each} for each in (None, None, *"x", None, *"y")],
        ),
        (b",a,\n0,1,\n", {}, {"column0": 0, "a": 1, "column2": None}),
        (b"t\n", {"allow_empty": True}, []),
        ("t\n\ufeffx\n".encode(), {}, {"t": "\ufeffx"}),
    ],
)
def test_dialects(data, given, expected, tmp_path):
    source = one(tmp_path, data, **given)
    expected = expected if isinstance(expected, list) else [expected]
    assert rows(source) == rows(source, FragmentRule(1)) == expected


def test_paths_are_a_column_if_wanted(tmp_path):
    url = write(tmp_path, a__csv=b"id\n1\n2\n", b__csv=b"id\n3\n")
    source = vd.csv(url, include_paths=True)
    paths = [f"{url}/{name}.csv" for name in "aab"]
    for columns in (None, ["path"]):
        assert read(source, columns=columns)["path"].to_pylist() == paths
    write(tmp_path, c__csv=b"id,path\n1,x\n")
    assert "already have a column 'path'" in refusal(source)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.csv.gz", gzip.compress),
        ("a.csv.bz2", bz2.compress),
        ("a.csv.zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed_files_are_cut_too(name, pack, tmp_path):
    data = b"id\n" + b"".join(b"%d\n" % n for n in range(5000))
    packed = pack(data)
    (tmp_path / name).write_bytes(packed)
    source = vd.csv(str(tmp_path))
    assert [f.stop for f in split(source).fragments] == [1000, 2000, 3000, 4000, 5000]
    assert [row["id"] for row in rows(source)] == list(range(5000))
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    assert "It is truncated or damaged. Write it again" in refusal(source)


LONG = b"a,b\n" + b"1,xyz\n" * 100


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "it is empty"),
        (b'"a,b\n1,2\n', "it has no header that can be parsed"),
        (b"a,a\n1,2\n", "has the column 'a' twice"),
        (b"a,b\n1,2\n3\n", ": row 1, counted from 0, has 1 fields, expected 2"),
        (b'a,b\n1,"x\ny"\n3,4,5\n', ": row 1, counted from 0, has 3 fields, expected 2"),
        (b"a,b\n1,\xe9\n", "it is not valid UTF-8. Set encoding="),
        (LONG + b'1,"x\n2,y\n', ": row 100, counted from 0: a quote is not closed"),
        (LONG + b"3,4,5\n", "row 100, counted from 0, has 3 fields, expected 2"),
        (b'a,b\n1,xyz\n1,"x"" y""\n2,y', "a quote is not closed"),
    ],
)
def test_bad_files_are_refused(data, expected, tmp_path, monkeypatch):
    if data.startswith(LONG):  # the row is behind the first block
        monkeypatch.setattr("vane_dagster.sources.text_stream.BLOCK", 64)
    message = refusal(one(tmp_path, data))
    assert f"'file://{tmp_path}/a.csv'" in message
    assert expected in message


def test_a_source_declares_its_columns_before_a_run(tmp_path):
    url = write(tmp_path, a__csv=b"id,n,e\n1,5,\n")
    source = vd.csv(url, types={"n": "DOUBLE"}, include_paths=True)
    kinds = {"id": pa.int64(), "n": pa.float64(), "e": pa.string(), "path": pa.string()}
    assert source.schema("here") == pa.schema(kinds)
    assert vd.csv(url, schema={"n": "DOUBLE"}).schema("here") == pa.schema({"n": pa.float64()})


def test_a_file_that_is_replaced_after_it_was_listed_is_not_read(tmp_path):
    source = bound(vd.csv(write(tmp_path, a__csv=b"id,s\n" + b"1,x\n" * 20)))
    files = source.required(source.list_files([None], "here")[None], None, "here")
    write(tmp_path, a__csv=b"id,s\n1,x\n")
    with pytest.raises(vd.errors.SourceError, match=r"a\.csv' was replaced after it was listed"):
        source.split(files, FragmentRule(10), "here")


def test_options_that_change_rows_change_fragments(tmp_path):
    url = write(tmp_path, a__csv=b"a,b\n1,2\n")
    seen = set()
    for given in (
        {},
        {"types": {"a": "VARCHAR"}},
        {"schema": {"a": "BIGINT"}},
        {"null_values": ["1"]},
        {"include_paths": True},
        {"quote": None},
    ):
        source = vd.csv(url, **given)
        seen.add((split(source).fragments[0].identity, source.splitting))
    assert len({identity for identity, _ in seen}) == len({text for _, text in seen}) == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"schema": {"a": "INT"}, "types": {"a": "INT"}}, "schema and types are both given"),
        ({"header": ["a"], "schema": {"a": "INT"}}, "header and schema both name the columns"),
        ({"quote": "ab"}, "quote is 'ab'; expected one ASCII character"),
        ({"delimiter": ""}, "delimiter is ''; expected one ASCII character"),
        ({"skip_rows": -1}, "skip_rows is -1"),
        ({"encoding": "klingon"}, "encoding is 'klingon'"),
    ],
)
def test_wrong_arguments_are_refused(given, expected):
    with pytest.raises(vd.errors.DefinitionError, match=r"^vd\.csv: ") as caught:
        vd.csv("/data", **given)
    assert expected in str(caught.value)


@pytest.mark.parametrize("kind", [vd.tensor("float32", (2, 2)), "STRUCT(a INT)", "INT[]"])
def test_types_that_no_text_has_are_refused(kind):
    with pytest.raises(
        vd.errors.SchemaError, match="declare VARCHAR, and convert it in the pipeline"
    ):
        vd.csv("/data", types={"x": kind})
