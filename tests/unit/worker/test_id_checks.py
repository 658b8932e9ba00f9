"""Ids: which are accepted, and what joins make of them."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vane_dagster.errors import UdfError
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.pipeline.keys import JoinShape, JoinSide
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.operators import join
from vane_dagster.worker.output_ids import with_ids
from vane_dagster.worker.protocol import CallUdf, Join, Work

# Properties of the rules themselves


def work(schema: pa.Schema, id: str) -> Work:
    return Work("stage 'p/s'", None, (), schema, id, None, False)


def call(cardinality: str, ids: tuple[str, ...] = ("id",), parent: str | None = None) -> CallUdf:
    return CallUdf(b"", None, BatchCall(), None, cardinality, 1, ids, (), parent)


@given(
    given=st.lists(st.integers(0, 50), unique=True, max_size=20),
    returned=st.lists(st.one_of(st.integers(0, 50), st.none()), max_size=25),
    cardinality=st.sampled_from(["one_to_one", "filter"]),
)
def test_ids_are_accepted_if_and_only_if_they_are_those_given(given, returned, cardinality):
    batch = pa.table({"id": pa.array(given, pa.int64())})
    output = pa.table({"id": pa.array(returned, pa.int64())})
    distinct = len(set(returned)) == len(returned) and None not in returned
    right = distinct and set(returned) <= set(given)
    if cardinality == "one_to_one":
        right = right and set(returned) == set(given)
    try:
        found = with_ids(output, batch, work(batch.schema, "id"), call(cardinality))
    except UdfError:
        assert not right
    else:
        assert right
        assert found["id"].to_pylist() == returned


@given(
    given=st.lists(st.integers(0, 30), unique=True, max_size=12),
    parents=st.lists(st.integers(0, 30), max_size=25),
)
def test_children_are_accepted_if_and_only_if_their_parents_were_given(given, parents):
    batch = pa.table(
        {
            "id": pa.array(given, pa.int64()),
            "root": pa.array([f"r{g}" for g in given], pa.string()),
        }
    )
    output = pa.table({"id": pa.array(parents, pa.int64())})
    schema = pa.schema([("child", pa.string()), ("id", pa.int64()), ("root", pa.string())])
    right = set(parents) <= set(given)
    op = call("zero_to_many", ("id", "root"), "id")
    try:
        found = with_ids(output, batch, work(schema, "child"), op)
    except UdfError:
        assert not right
        return
    assert right
    assert found["id"].to_pylist() == parents
    assert found["root"].to_pylist() == [f"r{p}" for p in parents]
    children = found["child"].to_pylist()
    assert len(set(children)) == len(children)
    counts: dict[int, int] = {}
    for parent, child in zip(parents, children):
        assert child == f"{parent}-{counts.get(parent, 0)}"
        counts[parent] = counts.get(parent, 0) + 1


@settings(max_examples=25)
@given(some=st.lists(st.integers(0, 9), max_size=9), texts=st.booleans(), many=st.booleans())
def test_ids_are_unique_if_a_set_has_as_many(some, texts, many):
    values = [*some, *range(100, 20_000)] if many else some
    kind = pa.string() if texts else pa.int64()
    array = pa.array([f"i{n}" for n in values] if texts else values, kind)
    half = len(array) // 2
    ids = pa.chunked_array([array[:half], array[half:]], kind)
    assert (repeated_or_null(ids) is None) == (len(set(some)) == len(some))


IDS = st.lists(st.integers(0, 30), unique=True, max_size=20)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(left=IDS, right=IDS, third=IDS, how=st.sampled_from(["inner", "left"]), chunks=st.booleans())
def test_a_join_is_what_arrow_joins(left, right, third, how, chunks):
    tables = [
        pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                name: pa.array([f"{name}{i}" for i in ids], pa.string()),
            }
        )
        for name, ids in (("a", left), ("b", right), ("c", third))
    ]
    if chunks:
        tables = [pa.concat_tables([t.slice(0, len(t) // 2), t.slice(len(t) // 2)]) for t in tables]
    sides = tuple(JoinSide(name, "id", ("id",)) for name in "bc")
    op = Join(how, JoinShape("a", "id", sides), ("a", "b", "c"), {})
    schema = pa.schema([("id", pa.int64()), *((n, pa.string()) for n in "abc")])
    found, given_rows, _ = join(op, tables, work(schema, "id"))
    kind = "inner" if how == "inner" else "left outer"
    wanted = tables[0].join(tables[1], "id", join_type=kind).join(tables[2], "id", join_type=kind)
    assert given_rows == len(left)
    assert found.sort_by("id").to_pylist() == wanted.select(schema.names).sort_by("id").to_pylist()
    assert found["id"].to_pylist() == [i for i in left if i in set(found["id"].to_pylist())]


@given(
    parents=IDS,
    children=st.lists(st.integers(0, 30), max_size=40),
    how=st.sampled_from(["inner", "left"]),
)
def test_lists_of_children_are_what_a_loop_gathers(parents, children, how):
    above = pa.table({"id": pa.array(parents, pa.int64())})
    below = pa.table(
        {
            "child": pa.array(range(len(children)), pa.int64()),
            "id": pa.array(children, pa.int64()),
            "v": pa.array([f"v{c}" for c in children], pa.string()),
            "none": pa.nulls(len(children)),  # a column without a type
        }
    )
    fields = [("child", pa.int64()), ("w", pa.string()), ("none", pa.null())]
    struct = pa.list_(pa.struct(fields))
    schema = pa.schema([("id", pa.int64()), ("below", struct)])
    side = JoinSide("below", "child", ("id",), "below")
    taken = (("w", "v"), ("none", "none"))
    op = Join(how, JoinShape("above", "id", (side,)), ("above", "below"), {"below": taken})
    found, *_ = join(op, [above, below], work(schema, "id"))
    made = [{"child": n, "w": f"v{c}", "none": None} for n, c in enumerate(children)]
    wanted = [{"id": p, "below": [m for m in made if m["w"] == f"v{p}"]} for p in parents]
    if how == "inner":
        wanted = [row for row in wanted if row["below"]]
    assert found.to_pylist() == wanted
