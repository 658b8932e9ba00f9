"""Ids that are computed while rows are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster.planning.source_code import pack_source, source_definition
from vane_dagster.sources import (
    FileSpan,
    FragmentRecord,
    FragmentRule,
    ReadContext,
    Source,
    SourceReader,
)
from vane_dagster.sources.base import WHOLE_FILE, SourceTable, default_rule
from vane_dagster.sources.row_ids import (
    COPIED,
    IdentifiedReader,
    IdentifiedSource,
    IdRule,
    as_id,
    identified,
    row_of,
    rule_of,
)

DATA = {"doc": ["a", "a", "b|", "b|"], "page": [1, 2, 1, 2], "text": ["w", "x", "y", "z"]}
CONTEXT = ReadContext("here")
DOC_PAGE = vd.composite_id("doc", "page")


def source(folder: Path, rule: IdRule, data: Mapping[str, Any] = DATA) -> IdentifiedSource:
    write_source(folder, data)
    return identified(vd.parquet(str(folder)), rule)


def split(own: Source, rows: int = 10) -> SourceTable:
    files = own.required(own.list_files([None], "here")[None], None, "here")
    return own.split(files, FragmentRule(rows), "here")


def test_ids_of_several_columns(tmp_path):
    own = source(tmp_path, DOC_PAGE)
    table = split(own)
    assert table.schema.field(0) == pa.field("id", pa.string())
    (fragment,) = table.fragments
    for names in (["id"], ["text", "id"], ["id", "page"], ["text"]):
        wanted = pa.schema([table.schema.field(name) for name in names])
        rows = own.for_workers().read(fragment, wanted, CONTEXT)
        expected = {"id": ["a|1", "a|2", "b\\||1", "b\\||2"], **DATA}
        assert rows.to_pydict() == {name: expected[name] for name in names}


def test_ids_of_row_numbers(tmp_path):
    own = source(tmp_path, vd.row_id())
    first, second = split(own, rows=2).fragments
    schema = pa.schema([("row_id", pa.string()), ("text", pa.string())])
    rows = own.for_workers().read(second, schema, CONTEXT)
    url = f"file://{tmp_path}/a.parquet"
    assert rows.to_pydict() == {"row_id": [f"{url}#2", f"{url}#3"], "text": ["y", "z"]}
    alone = own.for_workers().read(first, schema.remove(1), CONTEXT)
    assert alone.to_pydict() == {"row_id": [f"{url}#0", f"{url}#1"]}


def test_row_numbers_in_a_group_of_small_files(tmp_path):
    for name in ("a", "b"):
        write_source(tmp_path, DATA, f"{name}.parquet")
    own = identified(vd.parquet(str(tmp_path), small_files="group"), vd.row_id())
    (fragment,) = split(own, rows=1000).fragments
    rows = own.for_workers().read(fragment, pa.schema([("row_id", pa.string())]), CONTEXT)
    names = [id.rpartition("/")[2] for id in rows["row_id"].to_pylist()]
    assert names == [f"{name}.parquet#{row}" for name in "ab" for row in range(4)]
    by_columns = identified(vd.parquet(str(tmp_path), small_files="group"), DOC_PAGE)
    (fragment,) = split(by_columns, rows=1000).fragments
    rows = by_columns.for_workers().read(fragment, pa.schema([("id", pa.string())]), CONTEXT)
    assert rows["id"].to_pylist() == ["a|1", "a|2", "b\\||1", "b\\||2"] * 2
    hit = by_columns.find(list(fragment.spans)[1:], pa.field("id", pa.string()), "a|2")
    assert hit == (fragment.spans[1], 1)


def test_sql_is_pushed_down_if_it_only_passes_the_id_on(tmp_path):
    own = source(tmp_path, DOC_PAGE)
    table = split(own)
    reader, (fragment,) = own.for_workers(), table.fragments
    columns = [("key", "id"), ("loud", "upper(text)"), ("id_of_doc", "doc")]
    rows = reader.project(fragment, table.schema, columns, "page = 2", CONTEXT)
    assert rows is not None
    assert rows.to_pydict() == {
        "key": ["a|2", "b\\||2"], "loud": ["X", "Z"], "id_of_doc": ["a", "b|"],
    }  # fmt: skip
    for given, where in (([("x", "upper(id)")], None), ([("id", "id")], "ID <> 'a|1'")):
        assert reader.project(fragment, table.schema, given, where, CONTEXT) is None
    by_row = source(tmp_path, vd.row_id())
    (fragment,) = split(by_row).fragments
    passed = [("row_id", "row_id")]
    assert by_row.project(fragment, split(by_row).schema, passed, None, CONTEXT) is None


def test_a_row_is_found_without_reading(tmp_path):
    own, column = source(tmp_path, vd.row_id()), pa.field("row_id", pa.string())
    url = f"file://{tmp_path}/a.parquet"
    spans = [FileSpan(url, 0, 2), FileSpan(url, 2, 4)]
    whole = FileSpan(url, 0, WHOLE_FILE)
    assert own.find([whole], column, f"{url}#4") is None
    assert own.find([whole], column, f"{url}#3") == (whole, 3)
    (tmp_path / "a.parquet").unlink()
    assert own.find(spans, column, f"{url}#3") == (spans[1], 3)
    assert own.find(spans, column, f"{url}#4") is None
    with pytest.raises(FileNotFoundError):
        own.find([whole], column, f"{url}#3")


def test_a_row_is_found_by_the_columns_of_its_id(tmp_path):
    own, column = source(tmp_path, DOC_PAGE), pa.field("id", pa.string())
    spans = [span for f in split(own, rows=2).fragments for span in f.spans]
    assert own.find(spans, column, "b\\||2") == (spans[1], 3)
    assert own.find(spans, column, "b||2") is None
    changed = FileSpan(spans[0].url, 0, WHOLE_FILE)
    assert own.find([changed], column, "b\\||1") == (changed, 2)


def test_the_rule_and_its_types_identify_rows(tmp_path):
    write_source(tmp_path, DATA)
    plain = vd.parquet(str(tmp_path))
    rules = [
        vd.composite_id("doc", "page"),
        vd.composite_id("page", "doc"),
        vd.composite_id("doc"),
        vd.row_id("id"),
    ]
    own = [identified(plain, rule) for rule in rules]
    assert len({each.splitting for each in (plain, *own)}) == 5
    before = {split(each).fragments[0].identity for each in (plain, *own)}
    assert len(before) == 5
    wider = {**DATA, "page": pa.array(DATA["page"], pa.float32())}
    (narrow,) = split(source(tmp_path / "n", DOC_PAGE, wider)).fragments
    assert '"page": "float"' in narrow.detail


def test_details_of_the_source_are_kept(tmp_path):
    class Detailed(type(vd.parquet("x"))):  # type: ignore[misc]  # a class that is computed
        def split(self, *given: Any) -> SourceTable:
            table = super().split(*given)
            return replace(
                table, fragments=tuple(replace(f, detail="mine\n2") for f in table.fragments)
            )

        def read(self, fragment: Any, *given: Any) -> pa.Table:
            assert fragment.detail == fragment.spans[0].detail == "mine\n2"
            return super().read(replace(fragment, detail=""), *given)

    write_source(tmp_path, DATA)
    for rule in (DOC_PAGE, vd.row_id("id")):
        own = identified(Detailed(str(tmp_path)), rule)
        (fragment,) = split(own).fragments
        schema = pa.schema([("text", pa.string()), ("id", pa.string())])
        assert own.for_workers().read(fragment, schema, CONTEXT).num_rows == 4


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (vd.composite_id("doc", "sheet"), "the source has no column 'sheet'; it has 'doc', 'page'"),
        (
            vd.composite_id("doc", "page", name="Text"),
            r"the source has a column 'text'.*id=vd.composite_id\('doc', 'page', "
            "name='doc_page_id'\\)",
        ),
        (vd.row_id("text"), r"a column 'text'.*id=vd.row_id\(name="),
        (vd.composite_id("doc", "words"), "column 'words' of the id is list<item: string>"),
    ],
)
def test_ids_that_do_not_fit_the_source(tmp_path, rule, message):
    own = source(tmp_path, rule, {**DATA, "words": [["a"]] * 4})
    for check in (lambda: split(own), lambda: own.schema("here")):
        with pytest.raises(vd.SchemaError, match=message):
            check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"id is \[\]; expected the name of the id column, a list of several columns"),
        ("", "id is ''; expected"),
        (None, "id is None; expected"),
        ({"doc", "page"}, "id is {.*}; expected"),
        (["doc", "doc"], "'doc', 'doc' are the same column"),
        (["doc", "DOC"], "are the same column"),
        (["doc", 1], "expected names"),
        (["doc", ""], "expected names"),
        (["doc", "id"], "name is 'id', which is one of the columns.*name='doc_id_id'\\)"),
        (vd.row_id, r"id is the function vd.row_id; call it"),
    ],
)
def test_ids_that_are_refused_where_they_are_declared(given, message):
    with pytest.raises(vd.DefinitionError, match=rf"^pipeline 'docs': .*{message}"):
        vd.Pipeline("docs", source=vd.parquet("x"), id=given)


@pytest.mark.parametrize("name", ["", 3, None])
def test_names_of_computed_ids(name):
    for declared in (lambda: vd.row_id(name), lambda: vd.composite_id("a", "b", name=name)):
        with pytest.raises(vd.DefinitionError, match="expected the name of the id column"):
            declared()


def test_the_id_of_a_pipeline():
    plain = vd.parquet("x")
    assert vd.Pipeline("docs", source=plain, id=["doc"]).source is plain
    several = vd.Pipeline("docs", source=plain, id=("doc", "page"))
    assert (several.id, several.source) == ("id", identified(plain, DOC_PAGE))
    assert vd.Pipeline("docs", source=plain, id=vd.row_id()).id == "row_id"
    assert str(several).startswith("docs: rows of x, by 'id', made of 'doc', 'page'")


def test_the_text_of_an_id_as_a_user_names_it():
    types = json.dumps({"doc": "string", "page": "int64"})
    fragments = [FragmentRecord("/lance/x", 0, 30, "", 0, detail=f"{types}\n")]
    for given in (("a|", 3), ["a|", "3"], {"page": 3, "doc": "a|"}, "a\\||3"):
        assert DOC_PAGE.text(given, fragments) == "a\\||3"
    for given in (("a",), ("a", "x"), {"doc": "a"}, 3, ("a", None)):
        with pytest.raises(ValueError, match="expected"):
            DOC_PAGE.text(given, fragments)
    row = vd.row_id()
    assert row.text(("s3://b/x.parquet", 17), fragments) == "s3://b/x.parquet#17"
    assert row.text("/b/x.parquet#17", fragments) == "file:///b/x.parquet#17"
    assert row.text("/lance/x#17", fragments) == "/lance/x#17", "paths of Lance's files"
    with pytest.raises(ValueError, match="file and row number"):
        row.text(17, fragments)


@pytest.mark.parametrize("rule", [DOC_PAGE, vd.row_id("n")])
def test_a_rule_is_read_from_its_record(rule):
    assert rule_of(rule.record, rule.name) == rule


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("s3://b/a#b.parquet#17", ("s3://b/a#b.parquet", 17)),
        ("a#0", ("a", 0)),
        ("a#017", None),
        ("a#", None),
        ("a", None),
        ("a#-1", None),
        ("a#1e3", None),
        ("a#²", None),
        ("a#" + "1" * 5000, None),
        (17, None),
    ],
)
def test_file_and_row_of_an_id(id, place):
    assert row_of(id) == place


def test_every_method_of_a_source_is_delegated():
    """A method that is new in `Source` has to be delegated, or else the wrapper ignores it."""
    own = {**vars(IdentifiedReader), **vars(IdentifiedSource)}
    given = {*COPIED, "reads_contents"}
    for base in (SourceReader, Source):
        public = {name for name in vars(base) if not name.startswith("_")}
        assert public - given <= own.keys()
    wrapped = identified(vd.parquet("x", asset="a/b", allow_empty=True), DOC_PAGE)
    assert (wrapped.kind, wrapped.asset, wrapped.allow_empty) == ("parquet", "a/b", True)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


def test_the_code_of_a_users_source_counts():
    class Own(type(vd.parquet("x"))):  # type: ignore[misc]  # a class that is computed
        version = "1"

    assert source_definition(identified(vd.parquet("x"), DOC_PAGE)) == ""
    assert source_definition(identified(Own("x"), DOC_PAGE)) == source_definition(Own("x"))
    assert source_definition(Own("x"))
    assert pack_source(identified(Own("x"), DOC_PAGE))


def test_the_default_rule_is_enough_to_look_at_one_file(tmp_path):
    own = source(tmp_path, vd.row_id())
    assert own.schema("here").names == ["row_id", "doc", "page", "text"]
    assert default_rule([]).rows > 4
    assert as_id("here", ("a", "b")) == vd.composite_id("a", "b")


def test_row_ids_hold_no_secrets(monkeypatch):
    monkeypatch.setenv("HOST_API_KEY", "ABCDEFGH")
    signed = vd.parquet("https://host/ABCDEFGH/x.parquet")
    with pytest.raises(vd.DefinitionError, match="would put the secret in the URL") as caught:
        vd.Pipeline("docs", source=signed, id=vd.row_id())
    assert "ABCDEFGH" not in str(caught.value)
    assert vd.Pipeline("docs", source=signed, id=["doc", "page"]).id == "id"
    hidden = vd.parquet("s3://key:secretsecret@bucket/x.parquet")
    own = vd.Pipeline("docs", source=hidden, id=vd.row_id())
    assert own.source.place == "s3://bucket/x.parquet"
