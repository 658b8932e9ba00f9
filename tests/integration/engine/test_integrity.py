"""No row is lost, invented or there twice, whatever happens to the store."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import failure, metadata
from vane_dagster.errors import UdfError
from vane_dagster.pipeline.keys import JoinShape, Side
from vane_dagster.worker.batch_formats import with_ids
from vane_dagster.worker.id_checks import are_distinct_and_among, repeated_or_null
from vane_dagster.worker.operations import CallUdf, Join
from vane_dagster.worker.operators import join
from vane_dagster.worker.protocol import Work


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"id": batch["id"], "y": [2 * x.as_py() for x in batch["x"]]})


def pipeline(tmp_path, rows: int = 40) -> vd.Pipeline:
    write_source(
        tmp_path / "source",
        {"id": pa.array(range(rows), pa.int64()), "x": pa.array(range(rows), pa.int64())},
        row_group_size=10,
    )
    docs = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=10
    )
    clean = docs.project("clean", ["x"])
    clean.map_batches("double", double, schema={"y": "BIGINT"})
    return docs


def part_files(tmp_path, stage: str) -> list:
    return sorted((tmp_path / "store" / "docs" / stage / "parts").rglob("*.parquet"))


def test_each_part_says_who_made_it(tmp_path, compute, materialize):
    docs = pipeline(tmp_path)
    result = materialize(docs, compute)
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    manifest = opened.in_force("docs", "double", None)
    assert manifest.keys == ("id",)
    assert manifest.reads == ("clean",)
    assert manifest.model["name"] == "double"
    for part in manifest.parts:
        assert (part.rows_in, part.rows, part.filtered, part.quarantined) == (10, 10, 0, 0)
        assert part.made.run_id == result.run_id
        assert part.made.workers
        assert all(part.made.workers)
        assert part.made.seconds > 0
        assert part.made.at <= manifest.committed_at
    first = manifest.sample[0]  # of the part that came first
    assert int(first["y"]) == 2 * int(first["id"])


def test_parts_of_a_run_that_was_killed_keep_who_made_them(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    first = materialize(docs, local)
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    for name in opened.manifests("docs", "double", None).names():
        opened.manifests("docs", "double", None).delete([name])
    part_files(tmp_path, "double")[0].unlink()
    second = materialize(docs, local)
    made = [part.made.run_id for part in opened.in_force("docs", "double", None).parts]
    assert sorted(made) == sorted([first.run_id] * 3 + [second.run_id])
    assert metadata(second, "double")["fragments_reused"] == 3


def test_the_same_rows_have_the_same_name_whoever_wrote_them(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    materialize(docs, local)
    before = {path.name for path in part_files(tmp_path, "double")}
    for path in part_files(tmp_path, "double"):
        path.unlink()
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    folder = opened.manifests("docs", "double", None)
    folder.delete(list(folder.names()))
    materialize(docs, local)
    assert {path.name for path in part_files(tmp_path, "double")} == before


def test_rows_that_vanish_from_a_part_above_are_missed(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    materialize(docs, local, select=["clean"])
    victim = part_files(tmp_path, "clean")[0]
    table = pq.read_table(victim)
    pq.write_table(table.slice(0, 7), victim)
    result = materialize(docs, local, select=["double"], raises=False)
    told = failure(result)
    assert "stage 'docs/double'" in told
    assert "7 rows in of 10" in told
    assert "expected every row of 'clean'" in told
    # How many of the others were written before the partition was given up is a matter of time.
    assert {pq.read_metadata(path).num_rows for path in part_files(tmp_path, "double")} <= {10}
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    assert opened.in_force("docs", "double", None) is None


def test_a_part_that_lost_rows_is_not_committed_by_a_later_run(tmp_path, local, materialize):
    """A part whose own counts don't add up is found by the check at the commit."""
    docs = pipeline(tmp_path)
    materialize(docs, local)
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    folder = opened.manifests("docs", "double", None)
    folder.delete(list(folder.names()))
    victim = part_files(tmp_path, "double")[0]
    file = pq.ParquetFile(victim)
    kept = file.read().slice(0, 6).replace_schema_metadata(file.schema_arrow.metadata)
    pq.write_table(kept, victim)
    told = failure(materialize(docs, local, raises=False))
    assert "'docs/double'" in told
    assert opened.in_force("docs", "double", None) is None


# Properties of the rules themselves


def work(schema: pa.Schema, id: str) -> Work:
    return Work("stage 'p/s'", None, (), schema, id, None, False)


def call(cardinality: str, ids: tuple[str, ...] = ("id",), parent: str | None = None) -> CallUdf:
    return CallUdf(b"", None, "pyarrow", None, cardinality, 1, ids, parent)


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
    cardinality=st.sampled_from(["one_to_many", "zero_to_many"]),
)
def test_children_are_accepted_if_and_only_if_their_parents_were_given(given, parents, cardinality):
    batch = pa.table(
        {
            "id": pa.array(given, pa.int64()),
            "root": pa.array([f"r{g}" for g in given], pa.string()),
        }
    )
    output = pa.table({"id": pa.array(parents, pa.int64())})
    schema = pa.schema([("child", pa.string()), ("id", pa.int64()), ("root", pa.string())])
    right = set(parents) <= set(given)
    if cardinality == "one_to_many":
        right = right and set(parents) == set(given)
    op = call(cardinality, ("id", "root"), "id")
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
    seen: dict[int, int] = {}
    for parent, child in zip(parents, children):
        assert child == f"{parent}-{seen.get(parent, 0)}"
        seen[parent] = seen.get(parent, 0) + 1


@given(
    some=st.lists(st.integers(0, 9), max_size=9),
    others=st.lists(st.integers(0, 9), unique=True, max_size=9),
    texts=st.booleans(),
    many=st.booleans(),
)
def test_sorted_ids_tell_what_sets_tell(some, others, texts, many):
    def ids(numbers):
        values = list(numbers)
        if many:  # so that texts are hashed
            values += range(100, 20_000)
        kind = pa.string() if texts else pa.int64()
        array = pa.array([f"i{n}" for n in values] if texts else values, kind)
        return pa.chunked_array([array[: len(array) // 2], array[len(array) // 2 :]], kind)

    distinct = len(set(some)) == len(some)
    assert (repeated_or_null(ids(some)) is None) == distinct
    among = distinct and set(some) <= set(others)
    assert are_distinct_and_among(ids(some), ids(others)) == among


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
    sides = tuple(Side(name, "id", "id", ("id",)) for name in "bc")
    op = Join(how, JoinShape("a", "id", sides), ("a", "b", "c"), {})
    schema = pa.schema([("id", pa.int64()), *((n, pa.string()) for n in "abc")])
    found, given_rows = join(op, tables, work(schema, "id"))
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
        }
    )
    struct = pa.list_(pa.struct([("child", pa.int64()), ("w", pa.string())]))
    schema = pa.schema([("id", pa.int64()), ("below", struct)])
    side = Side("below", "child", "id", ("id",), "below")
    op = Join(how, JoinShape("above", "id", (side,)), ("above", "below"), {"below": (("w", "v"),)})
    found, _ = join(op, [above, below], work(schema, "id"))
    wanted = [
        {"id": p, "below": [{"child": n, "w": f"v{c}"} for n, c in enumerate(children) if c == p]}
        for p in parents
    ]
    if how == "inner":
        wanted = [row for row in wanted if row["below"]]
    assert found.to_pylist() == wanted


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.large_string()])
def test_joins_of_all_kinds_of_ids(kind, tmp_path, local, materialize):
    ids = pa.array([str(i) for i in range(30)]).cast(kind)
    write_source(
        tmp_path / "source", {"id": ids, "x": range(30), "url": [f"u{i}" for i in range(30)]}
    )
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id="id")
    odd = docs.project("odd", {"x": "x", "k": "x % 3"}, where="x % 2 = 1")
    even = docs.project("some", {"x": "x + 1"}, where="x < 20")
    docs.join(
        "both", odd, even, columns={"some": {"next": "x"}, "odd": ["x"]}, source_columns=["url"]
    )
    docs.join("alone", odd, source_columns=["url"], how="left")
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "both")
    assert table.schema.names == ["id", "x", "next", "url"]
    assert table["x"].to_pylist() == [i for i in range(20) if i % 2]
    assert table["next"].to_pylist() == [i + 1 for i in range(20) if i % 2]
    assert table["url"].to_pylist() == [f"u{i}" for i in range(20) if i % 2]
    assert read_stage(tmp_path / "store", "docs", "alone").schema.names == ["id", "x", "k", "url"]


def test_columns_that_clash_or_are_not_there(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    other = docs.project("other", {"x": "x + 1"})
    docs.join("both", docs["clean"], other)
    told = failure(materialize(docs, local, raises=False))
    assert "column 'x' comes from both 'clean' and 'other'" in told
    assert "columns={'other': {'other_name': 'x'}}" in told
    docs = pipeline(tmp_path)
    docs.join("both", docs["clean"], docs["double"], columns={"double": ["z"]})
    told = failure(materialize(docs, local, raises=False))
    assert "takes 'z' of 'double', which does not have it" in told
    with pytest.raises(vd.DefinitionError, match="columns names 'none'"):
        docs.join("again", docs["clean"], docs["double"], columns={"none": ["z"]})
