"""Ids that are computed while rows are read."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster.sources import (
    FileSpan,
    FragmentRecord,
    FragmentRule,
    Source,
)
from vane_dagster.sources.base import SourceTable
from vane_dagster.sources.row_ids import IdRule, row_of, rule_of, with_ids

DATA = {"doc": ["a", "a", "b|", "b|"], "page": [1, 2, 1, 2], "text": ["w", "x", "y", "z"]}
DOC_PAGE = IdRule("id", ("doc", "page"))


@dataclass
class Identified:
    source: Source
    rule: IdRule

    def split(self, rows: int = 10) -> SourceTable:
        files = self.source.required(self.source.list_files([None], "here")[None], None, "here")
        table = self.source.split(files, FragmentRule(rows), "here")
        found = with_ids(table, self.rule, "here")
        self.bound = self.rule.of(table.schema)
        return found

    def read(self, fragment: FragmentRecord, schema: pa.Schema) -> pa.Table:
        return self.bound.read(self.source.for_workers(), fragment, schema, "here")

    def find(self, spans: Any, id: str) -> Any:
        return self.bound.find(self.source, spans, pa.field(self.rule.name, pa.string()), id)


def source(folder: Path, rule: IdRule, data: Mapping[str, Any] = DATA) -> Identified:
    write_source(folder, data)
    return Identified(vd.parquet(str(folder)), rule)


def test_ids_of_several_columns(tmp_path):
    own = source(tmp_path, DOC_PAGE)
    table = own.split()
    assert table.schema.field(0) == pa.field("id", pa.string())
    (fragment,) = table.fragments
    for names in (["id"], ["text", "id"], ["id", "page"], ["text"]):
        wanted = pa.schema([table.schema.field(name) for name in names])
        rows = own.read(fragment, wanted)
        expected = {"id": ["a|1", "a|2", "b\\||1", "b\\||2"], **DATA}
        assert rows.to_pydict() == {name: expected[name] for name in names}


def test_ids_of_row_numbers(tmp_path):
    own = source(tmp_path, vd.row_id())
    first, second = own.split(rows=2).fragments
    schema = pa.schema([("row_id", pa.string()), ("text", pa.string())])
    rows = own.read(second, schema)
    url = f"file://{tmp_path}/a.parquet"
    assert rows.to_pydict() == {"row_id": [f"{url}#2", f"{url}#3"], "text": ["y", "z"]}
    alone = own.read(first, schema.remove(1))
    assert alone.to_pydict() == {"row_id": [f"{url}#0", f"{url}#1"]}


def test_row_numbers_in_a_group_of_small_files(tmp_path):
    for name in ("a", "b"):
        write_source(tmp_path, DATA, f"{name}.parquet")
    own = Identified(vd.parquet(str(tmp_path), small_files="group"), vd.row_id())
    (fragment,) = own.split(rows=1000).fragments
    rows = own.read(fragment, pa.schema([("row_id", pa.string())]))
    names = [id.rpartition("/")[2] for id in rows["row_id"].to_pylist()]
    assert names == [f"{name}.parquet#{row}" for name in "ab" for row in range(4)]
    by_columns = Identified(vd.parquet(str(tmp_path), small_files="group"), DOC_PAGE)
    (fragment,) = by_columns.split(rows=1000).fragments
    rows = by_columns.read(fragment, pa.schema([("id", pa.string())]))
    assert rows["id"].to_pylist() == ["a|1", "a|2", "b\\||1", "b\\||2"] * 2
    hit = by_columns.find(list(fragment.spans)[1:], "a|2")
    assert hit == (fragment.spans[1], 1)


def test_a_row_is_found_without_reading(tmp_path):
    own = source(tmp_path, vd.row_id())
    own.split()
    url = f"file://{tmp_path}/a.parquet"
    spans = [FileSpan(url, 0, 2), FileSpan(url, 2, 4)]
    (tmp_path / "a.parquet").unlink()
    assert own.find(spans, f"{url}#3") == (spans[1], 3)
    assert own.find(spans, f"{url}#4") is None


def test_a_row_is_found_by_the_columns_of_its_id(tmp_path):
    own = source(tmp_path, DOC_PAGE)
    spans = [span for f in own.split(rows=2).fragments for span in f.spans]
    assert own.find(spans, "b\\||2") == (spans[1], 3)
    assert own.find(spans, "b||2") is None


def test_the_rule_and_its_types_identify_rows(tmp_path):
    write_source(tmp_path, DATA)
    plain = vd.parquet(str(tmp_path))
    rules = [
        DOC_PAGE,
        IdRule("id", ("page", "doc")),
        IdRule("id", ("doc",)),
        vd.row_id("id"),
    ]
    files = plain.required(plain.list_files([None], "here")[None], None, "here")
    (fragment,) = plain.split(files, FragmentRule(10), "here").fragments
    own = [Identified(plain, rule).split().fragments[0] for rule in rules]
    assert len({each.identity for each in (fragment, *own)}) == 5
    assert len({rule.record for rule in rules}) == 4
    rule = DOC_PAGE.of(pa.schema([("doc", pa.string()), ("page", pa.float32())]))
    assert rule.record == '{"columns": ["doc", "page"], "types": ["string", "float"]}'
    assert rule_of(rule.record, "id") == rule == pickle.loads(pickle.dumps(rule))
    narrow = source(tmp_path / "n", DOC_PAGE, DATA).split().fragments[0]
    wider = {**DATA, "page": pa.array(DATA["page"], pa.float32())}
    other = source(tmp_path / "n", DOC_PAGE, wider).split().fragments[0]
    assert narrow.identity != other.identity


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            IdRule("id", ("doc", "sheet")),
            "the source has no column 'sheet'; it has 'doc', 'page'",
        ),
        (
            IdRule("Text", ("doc", "page")),
            "the source has a column 'text'.*: id={",
        ),
        (
            vd.row_id("text"),
            r"a column 'text'.*or vd.row_id\(name\), or use that column: id='text'",
        ),
        (IdRule("id", ("doc", "words")), "column 'words' of the id is list<item: string>"),
    ],
)
def test_ids_that_do_not_fit_the_source(tmp_path, rule, message):
    own = source(tmp_path, rule, {**DATA, "words": [["a"]] * 4})
    known = own.source.schema("here")
    for check in (own.split, lambda: rule.schema(known, "here")):
        with pytest.raises(vd.errors.SchemaError, match=message):
            check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"id is \[\]; expected the name of the id column, a list of several columns"),
        ({"doc", "page"}, "id is {.*}; expected"),
        (["doc", "doc"], "'doc', 'doc' of the id 'id' are the same column"),
        (
            ["doc", "id"],
            "'id', 'id' of the id 'id' are the same column.*id={'id_text': \\['doc', 'id'\\]}",
        ),
        (vd.row_id, r"id is <function row_id .*; expected .* or vd.row_id\(\) if no column"),
    ],
)
def test_ids_that_are_refused_where_they_are_declared(given, message):
    with pytest.raises(vd.errors.DefinitionError, match=rf"^pipeline 'docs': .*{message}"):
        vd.Pipeline("docs", source=vd.parquet("x"), id=given)


def test_the_id_of_a_pipeline():
    plain = vd.parquet("x")
    one = vd.Pipeline("docs", source=plain, id=["doc"])
    assert (one.id, one.id_rule) == ("doc", None)
    several = vd.Pipeline("docs", source=plain, id=("doc", "page"))
    assert (several.id, several.id_rule, several.source) == ("id", DOC_PAGE, plain)
    assert vd.Pipeline("docs", source=plain, id=vd.row_id()).id == "row_id"
    assert str(several).startswith("docs: rows of x, by 'id', made of 'doc', 'page'")


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("s3://b/a#b.parquet#17", ("s3://b/a#b.parquet", 17)),
        ("a#0", ("a", 0)),
        ("a#017", None),
        ("a#" + "1" * 5000, None),
    ],
)
def test_file_and_row_of_an_id(id, place):
    assert row_of(id) == place


def test_row_ids_hold_no_secrets(monkeypatch):
    monkeypatch.setenv("HOST_API_KEY", "ABCDEFGH")
    signed = vd.parquet("https://host/ABCDEFGH/x.parquet")
    with pytest.raises(
        vd.errors.DefinitionError, match="would put the secret in the URL"
    ) as caught:
        vd.Pipeline("docs", source=signed, id=vd.row_id())
    assert "ABCDEFGH" not in str(caught.value)
    assert vd.Pipeline("docs", source=signed, id=["doc", "page"]).id == "id"
