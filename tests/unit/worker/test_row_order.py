"""Rows whose prompts begin alike: asked one after the other."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.providers.template import Template, parse_template
from vane_dagster.worker import row_reuse
from vane_dagster.worker.protocol import Arrange, CallUdf, Restore, Work

LONG = [letter * 300 for letter in "abcdefgh"]


def order() -> Template:
    return parse_template("here", "{doc}: {text}", None)


def rows(docs: list[str | None], **columns: Any) -> pa.Table:
    ids = [f"id {i}" for i in range(len(docs))]
    return pa.table({"id": ids, "doc": pa.array(docs, pa.string()), "text": ids, **columns})


def arrange(table: pa.Table, order: Any) -> pa.Table:
    arranged = row_reuse.arrange(table, Arrange(order))
    assert arranged.report.tally.rows_in == table.num_rows
    return arranged.rows


def restore(pieces: list[pa.Table], given: pa.Table) -> pa.Table:
    """Return pieces of computed rows in the order before `arrange`."""
    made = tuple(name for name in pieces[0].column_names if name != "id")
    call = CallUdf(b"", None, BatchCall(), 1, "filter", 1, ("id",), made)
    work = Work("here", call, (), pieces[0].schema, "id", None, True)
    return row_reuse.restore(pieces, given, Restore(call, made), work, None).rows


def groups(table: pa.Table) -> list[str]:
    """First letters of the documents, without repetitions side by side."""
    letters = [(doc or "-")[0] for doc in table["doc"].to_pylist()]
    return [a for a, b in zip(letters, [None, *letters]) if a != b]


def test_prompts_of_one_template_are_ordered():
    docs = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    asked = docs.prompt("asked", "{doc} {text}", model="m", provider="openai")
    assert isinstance(asked.spec.row_order, Template)


def test_prompts_that_begin_alike_are_side_by_side():
    docs = [random.Random(3).choice(LONG) for _ in range(100)]
    found = arrange(rows(docs), order())
    assert sorted(found["id"].to_pylist()) == sorted(rows(docs)["id"].to_pylist())
    assert len(groups(found)) == len(set(docs))


@given(st.lists(st.sampled_from(LONG[:4]), min_size=1, max_size=30), st.data())
def test_what_was_made_of_rows_comes_back_in_their_order(docs, data):
    table = rows(docs)
    arranged = arrange(table, order())
    cut = data.draw(st.integers(0, len(docs)))
    kept = data.draw(st.sets(st.integers(0, len(docs) - 1)))
    made = arranged.select(["id"]).append_column("kept", [[i in kept for i in range(len(docs))]])
    pieces = [p.filter(p["kept"]) for p in (made.slice(0, cut), made.slice(cut))]
    back = restore(pieces, arranged)["id"].to_pylist()
    alive = set(back)
    assert back == [id for id in table["id"].to_pylist() if id in alive]
    assert len(back) == len(kept)
