"""Stages that make many rows of one: declarations, ids, parents, downstream stages, and traces."""

from __future__ import annotations

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.in_process import InProcessCompute, compute

TEXTS = ["a b c", "d", "e f", "", "g h i j", "k"]


def split(batch: pa.Table) -> pa.Table:
    rows = [
        (f"{id}/{n}", id, word)
        for id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist())
        for n, word in enumerate(text.split())
    ]
    ids, parents, words = zip(*rows) if rows else ((), (), ())
    return pa.table(
        {
            "word_id": pa.array(ids, pa.string()),
            "id": pa.array(parents, batch["id"].type),
            "word": pa.array(words, pa.string()),
        }
    )


SCHEMA = {"word_id": "VARCHAR", "id": "BIGINT", "word": "VARCHAR"}


def pipeline(tmp_path, **kwargs) -> vd.Pipeline:
    write_source(
        tmp_path / "source",
        {"id": pa.array(range(len(TEXTS)), pa.int64()), "text": TEXTS},
        row_group_size=3,
    )
    return vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=3, **kwargs
    )


def rows(table: pa.Table, *names: str) -> list[tuple]:
    return list(zip(*(table[name].to_pylist() for name in names)))


def words(docs: vd.Pipeline, **kwargs) -> vd.Stage:
    given = {"cardinality": vd.Children("word_id"), "schema": SCHEMA, **kwargs}
    return docs.map_batches("words", given.pop("fn", split), **grouped(given))


ASIDE = {"on_error": "quarantine", "max_error_rate": 1.0}


def letters(batch: pa.Table) -> pa.Table:
    rows = [
        (id, letter)
        for id, word in zip(batch["word_id"].to_pylist(), batch["word"].to_pylist())
        for letter in word
    ]
    return pa.table({"word_id": [r[0] for r in rows], "letter": [r[1] for r in rows]})


def upper(batch: pa.Table) -> pa.Table:
    return pa.table({"upper": [w.as_py().upper() for w in batch["word"]]})


def expected() -> list[tuple[str, int, str]]:
    return [(f"{i}/{n}", i, w) for i, t in enumerate(TEXTS) for n, w in enumerate(t.split())]


def test_rows_below_are_keyed_by_the_new_id_and_joins_lead_back_to_the_parent(tmp_path, store):
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"])
    few = docs.project("few", ["text"], where="id <> 4")
    made = words(clean)
    loud = made.map_batches("loud", upper, schema={"upper": "VARCHAR"}, columns=["word"])
    short = loud.project("short", {"first": "upper[1]"}, where="upper <> 'D'")
    assert made.id == loud.id == short.id == "word_id"
    spelled = made.map_batches(
        "letters", letters, schema={"letter": "VARCHAR"}, cardinality=vd.Children("letter_id")
    )
    assert docs.join("all", clean, spelled, children="list").id == "id"
    assert docs.join("each", few, made, children="rows", source_columns=[]).id == "word_id"
    docs.join("beside", made, few, how="left", children="rows")

    compute(docs, store)

    def read(stage: str, *names: str) -> list[tuple]:
        return rows(read_stage(tmp_path / "store", "docs", stage), *names)

    raised = [(a, b, c.upper()) for a, b, c in expected()]
    assert read("words", "word_id", "id", "word") == expected()
    table = read_stage(tmp_path / "store", "docs", "loud")
    assert table.schema.names == ["word_id", "id", "upper"]
    assert rows(table, *table.schema.names) == raised
    assert read("short", "word_id", "id", "first") == [row for row in raised if row[2] != "D"]
    table = read_stage(tmp_path / "store", "docs", "letters")
    assert table.schema.names == ["letter_id", "word_id", "id", "letter"]
    assert rows(table, *table.schema.names) == [(f"{a}-0", a, b, c) for a, b, c in expected()]
    (lists,) = zip(*read("all", "letters"))
    assert [[r["letter"] for r in row] for row in lists] == [t.split() for t in TEXTS if t]
    assert read("each", "word_id", "id", "text", "word") == [
        (a, b, TEXTS[b], c) for a, b, c in expected() if b != 4
    ]
    assert read("beside", "word_id", "id", "text", "word") == [
        (a, b, None if b == 4 else TEXTS[b], c) for a, b, c in expected()
    ]


def fails_for(column: str, *values: str, then):

    def fn(batch: pa.Table) -> pa.Table:
        if set(values) & set(batch[column].to_pylist()):
            raise ValueError("cannot be computed")
        return then(batch)

    return fn


def test_a_list_is_null_where_quarantine_left_no_children(tmp_path, store):
    docs = pipeline(tmp_path)
    clean = docs.project("clean", ["text"])
    made = words(clean, fn=fails_for("text", "d", then=split), **ASIDE)
    failing = fails_for("word", "e", "k", then=upper)
    loud = made.map_batches("loud", failing, schema={"upper": "VARCHAR"}, **grouped(ASIDE))
    docs.join("joined", clean, loud, how="left", children="list", columns={"loud": ["upper"]})
    docs.join("whole", clean, loud, children="list")
    compute(docs, store)
    expected_lists = {
        0: ["A", "B", "C"],
        1: None,  # the row itself was quarantined
        2: ["F"],
        3: [],
        4: ["G", "H", "I", "J"],
        5: None,  # its only child was
    }

    def lists():
        table = read_stage(tmp_path / "store", "docs", "joined")
        found = zip(table["id"].to_pylist(), table["loud"].to_pylist())
        return {i: c if c is None else [row["upper"] for row in c] for i, c in found}

    assert lists() == expected_lists
    assert read_stage(tmp_path / "store", "docs", "whole")["id"].to_pylist() == [0, 2, 4]
    aside = vd.quarantine("docs/loud", store=store.root.path)
    assert aside["id"].to_pylist() == ["2/0", "5/0"]
    assert aside["parents"].to_pylist() == [{"id": 2}, {"id": 5}]

    docs.run(select="joined", force=True, store=store.root.path, compute=InProcessCompute())
    assert lists() == expected_lists


# As they are declared and keyed


def test_declarations_that_do_not_fit():
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    with pytest.raises(vd.errors.DefinitionError, match="cardinality is 'one_to_many'; expected"):
        docs.map_batches("a", split, schema=SCHEMA, cardinality="one_to_many")
    with pytest.raises(
        vd.errors.DefinitionError, match=r"vd\.Children: id is ''; expected the name of a"
    ):
        vd.Children("")
    with pytest.raises(
        vd.errors.DefinitionError, match=r"'id' .*: write cardinality=vd.Children\(id="
    ):
        docs.map_batches("a", split, schema=SCHEMA, id="word_id")
    with pytest.raises(vd.errors.DefinitionError, match="give the new id another name"):
        docs.map_batches("a", split, schema=SCHEMA, cardinality=vd.Children("id"))
    made = words(docs)
    other = docs.map_batches("others", split, schema=SCHEMA, cardinality=vd.Children("word_id"))
    clean = docs.project("clean", ["text"])
    with pytest.raises(vd.errors.DefinitionError, match="pass children='rows'"):
        docs.join("joined", clean, made)
    with pytest.raises(vd.errors.DefinitionError, match="neither was made from the other"):
        docs.join("joined", made, other, children="rows")
    with pytest.raises(vd.errors.DefinitionError, match="pass 'words' first"):
        docs.join("joined", clean, made, children="rows", how="left")
    with pytest.raises(vd.errors.DefinitionError, match="ids must pass through unchanged"):
        made.project("computed", {"id": "id + 1"})
    docs.join("joined", clean, made, other, children="list")
