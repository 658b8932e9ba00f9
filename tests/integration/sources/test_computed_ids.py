"""Runs over rows that several columns, or file and row number, identify."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.cli.main import main
from vane_dagster.sources.row_ids import IdRule

DOC_PAGE = ["doc", "page"]


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pages(tmp_path / "src", "1.parquet", ["a", "b|"])
    return tmp_path / "src"


@pytest.mark.parametrize("id", [DOC_PAGE, vd.row_id("id")], ids=["columns", "row"])
def test_a_run_over_computed_ids(tmp_path, folder, local, materialize, id):
    pipeline, store = docs(folder, id, "page <> 2"), tmp_path / "store"
    url = f"file://{folder}/1.parquet"
    ids = {("a", 0): "a|0", ("a", 1): "a|1", ("b|", 0): "b\\||0", ("b|", 1): "b\\||1"}
    if isinstance(id, IdRule):
        ids = dict(zip(ids, [f"{url}#0", f"{url}#1", f"{url}#3", f"{url}#4"]))
    materialize(pipeline, local)
    joined = read_stage(store, "docs", "joined")
    assert dict(zip(joined["id"].to_pylist(), joined["page"].to_pylist())) == {
        ids["a", 0]: 0, ids["a", 1]: 1, ids["b|", 0]: 0,
    }  # fmt: skip
    assert joined["loud"].to_pylist() == ["A 0", "A 1", "B| 0"]
    faults = vd.quarantine("docs/loud", store=str(store))
    assert faults["id"].to_pylist() == [ids["b|", 1]]
    by_word = vd.load("docs/by_word", store=str(store)).select(["word_id", "id", "word"])
    assert by_word.slice(0, 2).to_pylist() == [
        {"word_id": f"{ids['a', 0]}-0", "id": ids["a", 0], "word": "a"},
        {"word_id": f"{ids['a', 0]}-1", "id": ids["a", 0], "word": "0"},
    ]

    again = materialize(docs(folder, id, "page <> 2"), local)
    assert metadata(again, "joined").get("fragments_computed", 0) == 0
    pages(folder, "2.parquet", ["c"])
    more = materialize(docs(folder, id, "page <> 2"), local)
    assert metadata(more, "kept")["fragments_computed"] == 1
    assert metadata(more, "words")["fragments_computed"] == 1

    for stage in ("docs/joined", pipeline["joined"]):
        trace = vd.trace(stage, ids["b|", 0], store=str(store))
        assert (trace.steps[0].url, trace.steps[0].row) == (url, 3)
        assert trace.steps[0].keys == {"id": ids["b|", 0]}
        assert not trace.steps[0].notes
    child = vd.trace("docs/by_word", f"{ids['a', 1]}-0", store=str(store))
    assert (child.steps[0].url, child.steps[0].row) == (url, 1)
    forward = vd.trace("docs", ids["b|", 1], forward=True, store=str(store))
    assert "no page like this" in forward.missing["docs/loud"]
    with pytest.raises(vd.errors.TraceError, match="has no row with id 'x'"):
        vd.trace("docs", "x", forward=True, store=str(store))


def test_an_id_is_given_by_its_columns(tmp_path, folder, local, materialize):
    pipeline, store = docs(folder, DOC_PAGE), str(tmp_path / "store")
    materialize(pipeline, local)
    for id in (("b|", 2), {"page": 2, "doc": "b|"}, "b\\||2"):
        assert vd.trace("docs/loud", id, store=store).steps[0].row == 5
        assert vd.trace("docs", id, forward=True, store=store).steps[0].row == 5
    with pytest.raises(vd.errors.TraceError, match=r"expected the values of \(doc, page\)"):
        vd.trace("docs/loud", ("b|",), store=store)
    with pytest.raises(vd.errors.TraceError, match="expected values of doc string, page int64"):
        vd.trace("docs/loud", ("b|", "two"), store=store)
    with pytest.raises(
        vd.errors.TraceError, match="expected one value, because 'word_id' is no id of"
    ):
        vd.trace("docs/words", ("b|", 2), store=store)
    command = ["trace", "docs/loud", "--id", "b|", "--id", "2", "--store", store, "--json"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert json.loads(result.output)["steps"][0]["row"] == 5


def test_rows_of_a_rewritten_file_have_the_ids_of_their_new_places(
    tmp_path, folder, local, materialize
):
    store = str(tmp_path / "store")
    materialize(docs(folder, vd.row_id()), local)
    url = pages(folder, "1.parquet", ["z"])
    step = vd.trace("docs/kept", f"{url}#4", store=store).steps[0]
    assert step.row == 4, "in the version that was read"
    assert any("the file was changed since" in note for note in step.notes)
    forward = vd.trace("docs", f"{url}#2", forward=True, store=store)
    assert "the file was changed since" in forward.steps[0].notes[0]
    with pytest.raises(vd.errors.TraceError, match="no row with id"):
        vd.trace("docs", (url, 6), forward=True, store=store)

    result = materialize(docs(folder, vd.row_id()), local)
    assert metadata(result, "kept")["fragments_computed"] == 1
    kept = read_stage(tmp_path / "store", "docs", "kept")
    assert kept.to_pydict() == {
        "row_id": [f"{url}#{row}" for row in range(3)], "text": ["z 0", "z 1", "z 2"],
    }  # fmt: skip
