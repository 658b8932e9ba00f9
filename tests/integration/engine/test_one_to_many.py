"""Stages that make many rows of one: ids, parents, downstream stages, and traces back."""

from __future__ import annotations

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage
from support.results import metadata
from support.sentences import ASIDE, TEXTS, pipeline, rows, split, words


def letters(batch: pa.Table) -> pa.Table:
    rows = [
        (id, letter)
        for id, word in zip(batch["word_id"].to_pylist(), batch["word"].to_pylist())
        for letter in word
    ]
    return pa.table({"word_id": [r[0] for r in rows], "letter": [r[1] for r in rows]})


def upper(batch: pa.Table) -> pa.Table:
    return pa.table({"upper": [w.as_py().upper() for w in batch["word"]]})


def reversed_upper(batch: pa.Table) -> pa.Table:
    """With the ids, and in another order than it was given."""
    order = list(range(len(batch)))[::-1]
    taken = batch.take(order)
    return pa.table(
        {"word_id": taken["word_id"], "upper": [w.as_py().upper() for w in taken["word"]]}
    )


def expected() -> list[tuple[str, int, str]]:
    return [(f"{i}/{n}", i, w) for i, t in enumerate(TEXTS) for n, w in enumerate(t.split())]


def test_rows_below_are_keyed_by_the_new_id_and_keep_the_parent(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    made = words(docs)
    loud = made.map_batches("loud", upper, schema={"upper": "VARCHAR"}, columns=["word"])
    short = loud.project("short", {"first": "upper[1]"}, where="upper <> 'D'")
    assert made.id == loud.id == short.id == "word_id"
    result = materialize(docs, local)
    store = tmp_path / "store"
    assert rows(read_stage(store, "docs", "words"), "word_id", "id", "word") == expected()
    table = read_stage(store, "docs", "loud")
    assert table.schema.names == ["word_id", "id", "upper"]
    assert rows(table, *table.schema.names) == [(a, b, c.upper()) for a, b, c in expected()]
    table = read_stage(store, "docs", "short")
    assert rows(table, "word_id", "id", "first") == [
        (a, b, c.upper()) for a, b, c in expected() if c != "d"
    ]
    assert metadata(result, "words")["dagster/row_count"] == len(expected())


def test_a_returned_id_carries_its_parent_along_in_any_order(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    words(docs).map_batches("loud", reversed_upper, schema={"upper": "VARCHAR"})
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "loud")
    found = sorted(rows(table, "word_id", "id", "upper"))
    assert found == sorted((a, b, c.upper()) for a, b, c in expected())


def test_many_of_many(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    made = words(docs).map_batches(
        "letters", letters, schema={"letter": "VARCHAR"}, cardinality=vd.Children("letter_id")
    )
    docs.join("all", docs.project("clean", ["text"]), made, children="list")
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "letters")
    assert table.schema.names == ["letter_id", "word_id", "id", "letter"]
    assert rows(table, *table.schema.names) == [(f"{a}-0", a, b, c) for a, b, c in expected()]
    joined = read_stage(tmp_path / "store", "docs", "all")
    assert [[r["letter"] for r in row] for row in joined["letters"].to_pylist()] == [
        text.split() for text in TEXTS if text
    ]


@pytest.mark.parametrize("how", ["inner", "left"])
def test_return_to_the_parent_with_a_list(how, tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"])
    loud = words(clean).map_batches("loud", upper, schema={"upper": "VARCHAR"}, columns=["word"])
    joined = docs.join("joined", clean, loud, how=how, children="list")
    assert joined.id == "id"
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "joined")
    kept = [i for i, text in enumerate(TEXTS) if text or how == "left"]
    assert table.schema.names == ["id", "text", "loud"]
    assert table["id"].to_pylist() == kept
    assert table["loud"].to_pylist() == [
        [{"word_id": a, "upper": c.upper()} for a, b, c in expected() if b == i] for i in kept
    ]


def fails_for(column: str, *values: str, then):
    """A function that raises for some rows."""

    def fn(batch: pa.Table) -> pa.Table:
        if set(values) & set(batch[column].to_pylist()):
            raise ValueError("cannot be computed")
        return then(batch)

    return fn


def test_a_list_is_null_where_quarantine_left_no_children(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"])
    made = words(clean, fn=fails_for("text", "d", then=split), **ASIDE)
    failing = fails_for("word", "e", "k", then=upper)
    loud = made.map_batches("loud", failing, schema={"upper": "VARCHAR"}, **grouped(ASIDE))
    docs.join("joined", clean, loud, how="left", children="list", columns={"loud": ["upper"]})
    docs.join("whole", clean, loud, children="list")
    materialize(docs, local)
    store = tmp_path / "store"
    expected_lists = {
        0: ["A", "B", "C"],
        1: None,  # the row itself was quarantined
        2: ["F"],
        3: [],
        4: ["G", "H", "I", "J"],
        5: None,  # its only child was
    }

    def lists():
        table = read_stage(store, "docs", "joined")
        found = zip(table["id"].to_pylist(), table["loud"].to_pylist())
        return {i: c if c is None else [row["upper"] for row in c] for i, c in found}

    assert lists() == expected_lists
    assert read_stage(store, "docs", "whole")["id"].to_pylist() == [0, 2, 4]
    aside = vd.quarantine("docs/loud", store=str(store))
    assert aside["id"].to_pylist() == ["2/0", "5/0"]
    assert aside["parents"].to_pylist() == [{"id": 2}, {"id": 5}]

    materialize(docs, local, select=["joined"], config={"force": True})
    assert lists() == expected_lists


def test_a_list_is_null_where_what_its_children_need_was_quarantined(tmp_path, local, materialize):
    """Quarantined rows that the base was made from too, in a branch beside it."""
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"])
    made = words(clean)
    scored = fails_for("text", "g h i j", then=lambda b: pa.table({"score": b["id"]}))
    score = clean.map_batches("score", scored, schema={"score": "BIGINT"}, **grouped(ASIDE))
    both = docs.join("both", made, score, children="rows")
    spelled = both.map_batches(
        "letters", letters, schema={"letter": "VARCHAR"}, cardinality=vd.Children("letter_id")
    )
    docs.join("joined", made, spelled, how="left", children="list")
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "joined")
    missing = [word for word, found in rows(table, "word", "letters") if found is None]
    assert missing == ["g", "h", "i", "j"]
    assert table.num_rows == len(expected())


def test_one_row_a_child_with_the_parents_columns(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"], where="id <> 4")
    made = words(docs)
    joined = docs.join("joined", clean, made, children="rows", source_columns=[])
    assert joined.id == "word_id"
    docs.join("left", made, clean, how="left", children="rows")
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "joined")
    assert rows(table, "word_id", "id", "text", "word") == [
        (a, b, TEXTS[b], c) for a, b, c in expected() if b != 4
    ]
    table = read_stage(tmp_path / "store", "docs", "left")
    assert rows(table, "word_id", "id", "text", "word") == [
        (a, b, None if b == 4 else TEXTS[b], c) for a, b, c in expected()
    ]
