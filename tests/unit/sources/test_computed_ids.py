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
from support.in_process import InProcessCompute
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


@pytest.mark.parametrize("id", [DOC_PAGE, vd.row_id("id")], ids=["columns", "row"])
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
    assert "the file was changed since" in note
    with pytest.raises(vd.errors.TraceError, match="has no row with id"):
        vd.trace("docs", f"{url}#6" if is_row else "x|0", forward=True, store=store)
    pipeline.run(**given)
    kept = read_stage(tmp_path / "store", "docs", "kept")
    first = [f"{url}#0", f"{url}#1"] if is_row else ["z|0", "z|1"]
    assert kept["id"].to_pylist()[:2] == first
    assert kept["text"].to_pylist() == ["z 0", "z 1", "c 0", "c 1"]
