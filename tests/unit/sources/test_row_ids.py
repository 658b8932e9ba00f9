"""Ids that are computed while rows are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import InProcessCompute
from vane_dagster.cli.main import main
from vane_dagster.sources import (
    FileSpan,
    FragmentRecord,
    FragmentRule,
    Source,
)
from vane_dagster.sources.base import SourceTable
from vane_dagster.sources.row_ids import IdRule, rule_of, with_ids

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


def test_rows_are_read_with_ids_of_their_numbers_and_found_without_reading(tmp_path):
    own = source(tmp_path, vd.row_id())
    first, second = own.split(rows=2).fragments
    schema = pa.schema([("row_id", pa.string()), ("text", pa.string())])
    rows = own.read(second, schema)
    url = f"file://{tmp_path}/a.parquet"
    assert rows.to_pydict() == {"row_id": [f"{url}#2", f"{url}#3"], "text": ["y", "z"]}
    alone = own.read(first, schema.remove(1))
    assert alone.to_pydict() == {"row_id": [f"{url}#0", f"{url}#1"]}
    spans = [FileSpan(url, 0, 2), FileSpan(url, 2, 4)]
    (tmp_path / "a.parquet").unlink()
    assert own.find(spans, f"{url}#3") == (spans[1], 3)
    assert own.find(spans, f"{url}#4") is None


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


def test_row_ids_hold_no_secrets(monkeypatch):
    monkeypatch.setenv("HOST_API_KEY", "ABCDEFGH")
    signed = vd.parquet("https://host/ABCDEFGH/x.parquet")
    with pytest.raises(
        vd.errors.DefinitionError, match="would put the secret in the URL"
    ) as caught:
        vd.Pipeline("docs", source=signed, id=vd.row_id())
    assert "ABCDEFGH" not in str(caught.value)
    assert vd.Pipeline("docs", source=signed, id=["doc", "page"]).id == "id"


# Runs over rows that several columns, or file and row number, identify


def pages(folder: Path, name: str, docs: list[str]) -> str:
    rows = [(doc, page) for doc in docs for page in range(3)]
    data = {
        "doc": [doc for doc, _ in rows],
        "page": [page for _, page in rows],
        "text": [f"{doc} {page}" for doc, page in rows],
    }
    return f"file://{write_source(folder, data, name)}"


def shout(text: str) -> dict[str, Any]:
    if text == "b| 1":
        raise ValueError("no page like this")
    return {"loud": text.upper()}


def words(text: str) -> Iterator[dict[str, Any]]:
    yield from ({"word": word} for word in text.split())


def docs(folder: Path, id: Any, where: str | None = None) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet(str(folder)), id=id)
    kept = docs.project("kept", {"text": "text"}, where=where)
    loud = kept.map(
        "loud",
        shout,
        schema={"loud": "VARCHAR"},
        on_error=vd.Failures("quarantine", max_error_rate=0.5),
    )
    split = docs.flat_map("words", words, schema={"word": "VARCHAR"}, id="word_id")
    docs.join("joined", kept, loud, source_columns=["page"])
    docs.join("by_word", split, loud, children="rows")
    return docs


@pytest.mark.parametrize("id", [["doc", "page"], vd.row_id("id")], ids=["columns", "row"])
def test_rows_without_an_id_column_are_computed_joined_and_traced(tmp_path, id):
    folder, store = tmp_path / "src", str(tmp_path / "store")
    given: Any = {"store": store, "compute": InProcessCompute()}
    url = pages(folder, "1.parquet", ["a", "b|"])
    pipeline, is_row = docs(folder, id, "page <> 2"), isinstance(id, IdRule)
    ids = {("a", 0): "a|0", ("a", 1): "a|1", ("b|", 0): "b\\||0", ("b|", 1): "b\\||1"}
    if is_row:
        ids = dict(zip(ids, [f"{url}#0", f"{url}#1", f"{url}#3", f"{url}#4"]))

    # The ids are made from columns, or from file and row number.
    pipeline.run(**given)
    joined = read_stage(tmp_path / "store", "docs", "joined")
    assert dict(zip(joined["id"].to_pylist(), joined["page"].to_pylist())) == {
        ids["a", 0]: 0, ids["a", 1]: 1, ids["b|", 0]: 0,
    }  # fmt: skip
    assert joined["loud"].to_pylist() == ["A 0", "A 1", "B| 0"]
    faults = vd.quarantine("docs/loud", store=store)
    assert faults["id"].to_pylist() == [ids["b|", 1]]
    by_word = vd.load("docs/by_word", store=store).select(["word_id", "id", "word"])
    assert by_word.slice(0, 2).to_pylist() == [
        {"word_id": f"{ids['a', 0]}-0", "id": ids["a", 0], "word": "a"},
        {"word_id": f"{ids['a', 0]}-1", "id": ids["a", 0], "word": "0"},
    ]

    # A row is named by its id.
    for stage in ("docs/joined", pipeline["joined"]):
        step = vd.trace(stage, ids["b|", 0], store=store).steps[0]
        assert (step.url, step.row) == (url, 3)
        assert step.keys == {"id": ids["b|", 0]}
        assert not step.notes
    command = ["trace", "docs/loud", "--id", ids["b|", 0], "--store", store, "--json"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert json.loads(result.output)["steps"][0]["row"] == 3
    child = vd.trace("docs/by_word", f"{ids['a', 1]}-0", store=store)
    assert (child.steps[0].url, child.steps[0].row) == (url, 1)
    forward = vd.trace("docs", ids["b|", 1], forward=True, store=store)
    assert "no page like this" in forward.missing["docs/loud"]
    with pytest.raises(vd.errors.TraceError, match="expected one value of 'id'"):
        vd.trace("docs/loud", ("b|", 0), store=store)

    # Another file is computed alone.
    pipeline = docs(folder, id, "page <> 2")
    assert pipeline.plan(store=store).is_up_to_date
    pages(folder, "2.parquet", ["c"])
    assert {each.fragments for each in pipeline.plan(store=store).stages} == {1}
    pipeline.run(**given)

    # Rows of a rewritten file have the ids of their new places.
    pages(folder, "1.parquet", ["z"])
    (note, *_) = vd.trace("docs/kept", ids["a", 1], store=store).steps[0].notes
    assert "the file has changed since" in note
    with pytest.raises(vd.errors.TraceError, match="has no row with id"):
        vd.trace("docs", f"{url}#6" if is_row else "x|0", forward=True, store=store)
    pipeline.run(**given)
    kept = read_stage(tmp_path / "store", "docs", "kept")
    first = [f"{url}#0", f"{url}#1"] if is_row else ["z|0", "z|1"]
    assert kept["id"].to_pylist()[:2] == first
    assert kept["text"].to_pylist() == ["z 0", "z 1", "c 0", "c 1"]
