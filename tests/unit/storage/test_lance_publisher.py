"""Lance targets and vector indexes as they are declared, and the types that Lance holds."""

from __future__ import annotations

from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.published import docs
from vane_dagster.planning.definition import stage_definition
from vane_dagster.storage.publish.lance import LancePublisher
from vane_dagster.storage.publish.lance_index import VectorIndex, _sub_vectors, update_index

VECTOR = pa.list_(pa.float32(), 16)
FOUND = {
    pa.int64(): pa.int64(),
    pa.uint64(): pa.uint64(),
    pa.binary(3): pa.binary(3),
    pa.timestamp("ms", "Europe/Berlin"): pa.timestamp("ms", "Europe/Berlin"),
    pa.string_view(): pa.string(),
    pa.decimal32(5, 2): pa.decimal128(5, 2),
    pa.dictionary(pa.int32(), pa.string()): pa.string(),
    VECTOR: VECTOR,
    vd.tensor("float32", (2, 3)): pa.list_(pa.float32(), 6),
    pa.list_(pa.list_(pa.float32(), 2), 3): pa.list_(pa.list_(pa.float32(), 2), 3),
    pa.list_(pa.string(), 2): pa.list_(pa.string()),
    pa.large_list(pa.int8()): pa.list_(pa.int8()),
    pa.struct([("a", pa.string_view())]): pa.struct([("a", pa.string())]),
    pa.map_(pa.string(), pa.list_(pa.int32())): pa.map_(pa.string(), pa.list_(pa.int32())),
    pa.month_day_nano_interval(): None,
    pa.struct([]): None,
    pa.list_(pa.month_day_nano_interval()): None,
}


@pytest.mark.parametrize("kind", FOUND, ids=str)
def test_the_type_in_the_table(kind, tmp_path):
    found = LancePublisher.stored_type(kind)
    assert found == FOUND[kind]
    if found is None:
        publisher = docs(tmp_path, format="lance")["out"].spec.publisher(None)
        schema = pa.schema([("x", kind)])
        with pytest.raises(
            vd.errors.SchemaError, match=r"'x' is .*which the Lance table cannot hold"
        ):
            publisher.stored(schema, "stage 'docs/out'")
        return
    table = pa.table({"x": pa.array([None, None], found)})
    assert lance.write_dataset(table, tmp_path / "t").to_table() == table


def test_the_indexed_column_has_vectors_of_one_length(tmp_path):
    index = {"column": "e", "metric": "dot", "num_sub_vectors": 4}
    stage = docs(tmp_path, columns=["e"], format="lance", index=index)["out"]
    assert stage.spec.target.options == {"index": {**index, "type": "IVF_PQ"}}
    publisher = stage.spec.publisher(None)
    stored = publisher.stored(pa.schema([("e", vd.tensor("float32", (16,)))]), "stage 'docs/out'")
    assert stored.field("e").type == VECTOR
    for column, words in (
        (("e", pa.list_(pa.float32())), "vectors of one length"),
        (("e", pa.list_(pa.float32(), 6)), "does not divide the 6 dimensions"),
        (("n", pa.int64()), "no column 'e'"),
    ):
        schema = pa.schema([("id", pa.int64()), column])
        with pytest.raises(vd.errors.SchemaError, match=words):
            publisher.stored(schema, "stage 'docs/out'")


def test_an_index_is_part_of_the_definition(tmp_path):
    def definition(**given: object) -> object:
        stage = docs(tmp_path, columns=["e"], format="lance", **given)["out"]
        return stage_definition(stage.pipeline, stage.spec)

    by_default = definition(index={"column": "e"})
    assert by_default == definition(index={"type": "IVF_PQ", "metric": "l2", "column": "e"})
    assert by_default != definition(index={"column": "e", "metric": "dot"})
    assert by_default != definition()


def test_sub_vectors_divide_the_dimension():
    for dimension, expected in ((384, 24), (768, 48), (100, 25), (64, 8), (7, 7), (16, 8)):
        assert _sub_vectors(dimension) == expected


def vectors(count: int, first: int = 0) -> pa.Table:
    rng = np.random.default_rng(first)
    kind = pa.list_(pa.float32(), 8)
    found = {n: pa.array(list(rng.random((count, 8), np.float32)), kind) for n in ("e", "f")}
    return pa.table({"id": range(first, first + count), **found})


def metrics(table: Any) -> dict[str, str]:
    return {each.name: each.details["metric_type"] for each in table.describe_indices()}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (VectorIndex("e", "cosine", "IVF_FLAT"), {"e_idx": "COSINE"}),
        (VectorIndex("e", "l2", "IVF_FLAT"), {}),
        (VectorIndex("f", "l2", "IVF_FLAT"), {}),
        (None, {}),
    ],
)
def test_a_table_too_small_for_an_index_keeps_none_that_is_declared_otherwise(
    tmp_path, declared, expected
):
    table = lance.write_dataset(vectors(300), tmp_path / "t")
    update_index(table, VectorIndex("e", "cosine", "IVF_FLAT"))
    table.delete("id >= 100")
    update_index(table, declared)
    table = lance.dataset(tmp_path / "t")
    assert metrics(table) == expected
    assert bool(table.config()) == bool(expected)
    version = table.version
    update_index(table, declared)
    assert lance.dataset(tmp_path / "t").version == version


def test_indexes_of_others_stay(tmp_path):
    table = lance.write_dataset(vectors(300), tmp_path / "t")
    given = {"metric": "dot", "num_partitions": 1}
    table.create_index("f", "IVF_FLAT", name="f_idx", **given)
    table.create_index("e", "IVF_FLAT", name="own", **given)
    update_index(table, VectorIndex("e", "cosine", "IVF_FLAT"))
    assert metrics(table) == {"f_idx": "DOT", "own": "DOT", "e_idx": "COSINE"}
    update_index(table, None)
    assert metrics(table) == {"f_idx": "DOT", "own": "DOT"}


def test_segments_of_an_index_are_merged_and_it_is_trained_again(tmp_path):
    index, url = VectorIndex("e", "cosine"), str(tmp_path / "t")

    def updated(first: int, count: int = 20) -> tuple[int, str]:
        lance.write_dataset(vectors(count, first), url, mode="append")
        index.update(lance.dataset(url))
        table = lance.dataset(url)
        (found,) = table.describe_indices()
        covered = {id for segment in found.segments for id in segment.fragment_ids}
        assert covered == {fragment.fragment_id for fragment in table.get_fragments()}
        return len(found.segments), table.config()["vane_dagster.index.e"]

    assert updated(0, 300)[0] == 1
    counts, trained = zip(*(updated(first) for first in range(1000, 1180, 20)))
    assert counts == (2, 3, 4, 5, 6, 7, 8, 1, 2)
    assert len(set(trained)) == 1
    assert updated(5000, 900)[1] != trained[0]
    version = lance.dataset(url).version
    index.update(lance.dataset(url))
    assert lance.dataset(url).version == version


def test_vectors_that_are_null_train_nothing(tmp_path):
    table = vectors(300)
    null = pa.nulls(300, table.schema.field("e").type)
    table = lance.write_dataset(table.set_column(1, "e", null), str(tmp_path / "t"))
    VectorIndex("e").update(table)
    assert not table.describe_indices()
