"""Two versions of rows are compared by id, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.checks.comparison import plain
from vane_dagster.checks.versions import ColumnDiff, VersionComparison

NAN = float("nan")
MAPS = pa.array(
    [[("a", 1.0)], [("a", 1.0 + 1e-6)], [("b", 1.0)]], pa.map_(pa.string(), pa.float64())
)


def tensors(*rows: Any) -> pa.Array:
    kind = vd.tensor("float32", (2, 2))
    return pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))


SQUARES = tensors([1, 2, 3, 4], [1, 2, 3, 4])
ALMOST_SQUARES = tensors([1, 2, 3, 4 + 1e-6], [1, 2, 3, 5])


def compared(before: pa.Table, now: pa.Table, tolerance: float = 0.0) -> VersionComparison:
    comparison = VersionComparison(tolerance)
    columns = [name for name in before.column_names if name != "id"]

    def read(name: str) -> list[pa.Array]:
        return [plain(each[name]) for each in (before, now)]

    comparison.add(columns, read, read("id"))
    return comparison


def column(before: Any, now: Any, **options: Any) -> ColumnDiff:
    """Compare a column of rows with the same ids, in reverse order in the second version."""
    ids = pa.array(range(len(before)))
    first = pa.table({"id": ids, "v": before})
    second = pa.table({"id": ids, "v": now})
    found, *_ = compared(first, second.take(ids[::-1]), **options).columns()
    return found


def test_rows_are_matched_by_id_in_any_order() -> None:
    before = pa.table({"id": ["a", "b", "c", "d"], "v": [1, 2, 3, None]})
    now = pa.table({"id": ["e", "d", "c", "a"], "v": [5, None, 4, 1]})

    found = compared(before, now)

    assert (found.only_before, found.only_now, found.equal, found.different) == (1, 1, 2, 1)
    (values,) = found.columns()
    assert [(e.id, e.before, e.now) for e in values.examples] == [("c", "3", "4")]


def test_numbers_have_means_and_the_largest_difference() -> None:
    before = [float(i) for i in range(101)]
    now = [*before[:-1], 150.0]

    found = column(before, now)

    assert found.different == 1
    assert found.measures["mean"] == pytest.approx([50, 50 + 50 / 101])
    assert found.measures["largest difference"] == [50]
    assert found.examples[0].id == "100"


def test_values_that_are_not_finite_are_left_out_of_means() -> None:
    found = column([1.0, NAN, 3.0, None], [2.0, 5.0, float("inf"), None])
    assert found.different == 3
    assert found.measures == {"mean": [2.0, 3.5], "largest difference": [1.0]}
    assert [each.id for each in found.examples] == ["1", "2", "0"]
    assert column([NAN, None], [1.0, 2.0]).measures == {}


@pytest.mark.parametrize(
    ("before", "now", "different"),
    [
        ([1.0, 100.0], [1.0 + 1e-6, 100.0 + 1e-5], 0),
        ([1.0, 100.0], [1.0 + 1e-3, 100.0], 1),
        ([[1.0, 2.0], None], [[1.0, 2.0 + 1e-6], None], 0),
        ([[1.0, 2.0], [0.0]], [[1.0, 2.1], [0.0, 0.0]], 2),
        ([None, float("nan")], [0.0, float("nan")], 1),
        ([float("inf"), float("inf"), 1.0], [float("inf"), 5.0, float("-inf")], 2),
        ([[float("inf"), 1.0], [float("inf")]], [[float("inf"), 1.0 + 1e-7], [1.0]], 1),
        ([None, [], [1.0]], [[], [], [1.0]], 1),
        (["a", "b"], ["a", "B"], 1),
        ([10**6, 1], [10**6 + 1, 1], 1),
        ([{"a": [1.0, float("nan")]}], [{"a": [1.0 + 1e-6, float("nan")]}], 0),
        ([{"a": 1.0}, {"a": None}, None], [{"a": 1.1}, None, None], 2),
        (SQUARES, ALMOST_SQUARES, 1),
        (MAPS[:2], MAPS[1:], 1),
    ],
)
def test_a_tolerance_is_of_floating_point_numbers_in_any_place(
    before: Any, now: Any, different: int
) -> None:
    assert column(before, now, tolerance=1e-5).different == different


def test_fields_of_structs_are_counted_like_columns() -> None:
    """A struct that is null differs from one whose fields are null."""
    before = [{"topic": "sound", "more": {"stars": 1}}, {"topic": "price", "more": None}, None]
    now = [{"topic": "sound", "more": {"stars": 4}}, {"topic": "sound"}, {"topic": None}]
    first, second = (pa.table({"id": [1, 2, 3], "v": values}) for values in (before, now))
    comparison = compared(first, second)
    found = {each.column: each for each in comparison.columns()}
    assert {name: each.different for name, each in found.items()} == {
        "v": 3, "v.topic": 1, "v.more": 1, "v.more.stars": 1,
    }  # fmt: skip
    assert found["v.topic"].labels == {("price", "sound"): 1}
    assert (comparison.different, comparison.equal) == (3, 0)


def test_vectors_are_compared_by_angle() -> None:
    vectors = np.random.default_rng(0).standard_normal((200, 16))
    same = column(list(vectors), list(2 * vectors))
    other = column(list(vectors), list(np.roll(vectors, 1, axis=0)[:, ::-1]))

    assert same.different == 200
    assert same.measures["smallest cosine"] == [pytest.approx(1)]
    assert other.measures["mean cosine"][0] < 0.5


@pytest.mark.parametrize(
    ("before", "now", "different"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([1.0, 2.5]), 1),
        (pa.array(["a", "b"], pa.large_string()), pa.array(["a", "c"]), 1),
        (pa.array([1, 2]), pa.array(["1", "2"]), 2),
        (pa.array([0.5, 2.0]), pa.array(["1", None]), 2),
        (pa.array([{"a": [1]}, {"a": []}]), pa.array([{"a": [1]}, {"a": None}]), 1),
        (pa.array([b"a", None]), pa.array([b"a", b""]), 1),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "c"]), 1),
        (pa.array([2**62 + 1, 2]), pa.array([2**62, 2], pa.uint64()), 1),
        (pa.array([2**62 + 1, 2]), pa.array([1.0, 2.0]), 1),
        (pa.array([None, 1], pa.timestamp("us")), pa.array([None, 1000], pa.timestamp("ns")), 0),
        (pa.nulls(2), pa.array([None, "a"]), 1),
        (pa.array([0.0, 1.0], pa.float32()), pa.array([-0.0, 1.0], pa.float32()), 0),
        (pa.array([NAN, NAN, None]), pa.array([-NAN, None, NAN]), 2),
        (
            pa.array([[NAN, 0.0], [None, 0.0], [None]]),
            pa.array([[-NAN, -0.0], [None, -0.0], [NAN]]),
            1,
        ),
        (
            pa.array([[1.0], None], pa.list_(pa.field("element", pa.float32()))),
            pa.array([[1.0], None], pa.list_(pa.float64(), 1)),
            0,
        ),
    ],
)
def test_columns_of_any_two_types_are_compared(before: Any, now: Any, different: int) -> None:
    assert column(before, now).different == different


def test_many_rows_are_compared_in_slices() -> None:
    before = np.zeros(40_000)
    now = before.copy()
    now[[0, 16_384, 39_999]] = 1

    assert column(before, now).different == 3
