"""Rows whose prompts begin alike: asked one after the other, at one worker as far as it goes."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from vane_dagster.engine.fragment_state import Held, StageTaskState
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.providers.template import PrefixOrder, parse_template
from vane_dagster.worker import row_reuse
from vane_dagster.worker.protocol import Arrange, CallUdf, Restore, Work

LONG = [letter * 300 for letter in "abcdefgh"]


def order(messages: str = "{doc}: {text}", system: str | None = None) -> PrefixOrder:
    return PrefixOrder(parse_template("here", messages, system))


def rows(docs: list[str | None], **columns: Any) -> pa.Table:
    ids = [f"id {i}" for i in range(len(docs))]
    return pa.table({"id": ids, "doc": pa.array(docs, pa.string()), "text": ids, **columns})


def arrange(table: pa.Table, order: Any, shares: int) -> tuple[pa.Table, tuple[int, ...]]:
    arranged = row_reuse.arrange(table, Arrange(order, shares))
    return arranged.rows, arranged.report.shares


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
    assert isinstance(asked.spec.row_order, PrefixOrder)


def test_prompts_that_begin_alike_are_side_by_side_and_in_one_share():
    docs = [random.Random(3).choice(LONG) for _ in range(100)]
    found, ends = arrange(rows(docs), order(), 3)
    assert sorted(found["id"].to_pylist()) == sorted(rows(docs)["id"].to_pylist())
    assert len(groups(found)) == len(set(docs))
    assert (len(ends), ends[-1]) == (3, 100)
    shares = [groups(found.slice(a, b - a)) for a, b in zip((0, *ends), ends)]
    assert sum(len(share) for share in shares) == len(set(docs))


def test_a_group_is_in_the_same_share_in_every_fragment():
    places = defaultdict(set)
    for seed in range(5):
        docs = random.Random(seed).choices(LONG, k=40)
        found, ends = arrange(rows(docs), order(), 4)
        for share, (a, b) in enumerate(zip((0, *ends), ends)):
            for letter in groups(found.slice(a, b - a)):
                places[letter].add(share)
    assert len(places) == len(LONG)
    assert all(len(shares) == 1 for shares in places.values())


@given(st.lists(st.sampled_from(LONG[:4]), min_size=1, max_size=30), st.integers(1, 5), st.data())
def test_what_was_made_of_rows_comes_back_in_their_order(docs, shares, data):
    table = rows(docs)
    arranged, ends = arrange(table, order(), shares)
    assert ends[-1:] == (len(docs),)
    cut = data.draw(st.integers(0, len(docs)))
    kept = data.draw(st.sets(st.integers(0, len(docs) - 1)))
    made = arranged.select(["id"]).append_column("kept", [[i in kept for i in range(len(docs))]])
    pieces = [p.filter(p["kept"]) for p in (made.slice(0, cut), made.slice(cut))]
    back = restore(pieces, arranged)["id"].to_pylist()
    alive = set(back)
    assert back == [id for id in table["id"].to_pylist() if id in alive]
    assert len(back) == len(kept)


def test_a_worker_takes_its_own_share_first_and_then_the_end_of_the_largest():
    task_state = StageTaskState(None, set(), 0)
    task_state.give(Held("table", 100), (10, 70, 100))

    assert task_state.take(0, 25) == (0, 10)
    assert task_state.take(0, 25) == (45, 70), "the second share has the most left"
    assert task_state.take(1, 25) == (10, 35)
    assert task_state.take(4, 25) == (35, 45), "counted round"
    assert task_state.take(1, 25) == (75, 100)
    assert task_state.take(2, 25) == (70, 75)
    assert (task_state.rows_left, task_state.left) == (0, [(10, 10), (45, 45), (75, 75)])
