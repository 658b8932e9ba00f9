"""What a sample over all partitions misses, counted over the sampling that `adopt` uses."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from vane_dagster.pipeline.pipeline import Stage
from vane_dagster.planning.sample_plan import choose, partition_seed, spread, with_extremes

ROWS = inspect.signature(Stage.adopt).parameters["rows"].default
PARTITIONS = {f"2026-01-{day:02}": dict.fromkeys(range(5), 400) for day in range(1, 32)}
UNEVEN = {
    **{f"small{n}": {0: 3} for n in range(500)},
    "large": {n: 90 + n for n in range(40)},
    "empty": {0: 0},
}
Row = tuple[str, int, int]
"""A partition, a fragment and a position in it."""


def rows_of(partitions: Mapping[str, Mapping[int, int]]) -> list[Row]:
    return [
        (key, index, place)
        for key, fragments in partitions.items()
        for index, count in fragments.items()
        for place in range(count)
    ]


def sample(partitions: Mapping[str, Mapping[int, int]], seed: int, rows: int = ROWS) -> set[Row]:
    """The rows that `adopt` computes again, without the longest and the shortest."""
    counts = spread({k: sum(each.values()) for k, each in partitions.items()}, rows, seed)
    return {
        (key, index, place)
        for key, share in counts.items()
        for index, places in choose(
            partitions[key], share, partition_seed(seed, key), max(counts.values())
        ).items()
        for place in places
    }


@functools.cache
def samples(is_even: bool) -> list[set[Row]]:
    return [sample(PARTITIONS if is_even else UNEVEN, seed) for seed in range(100)]


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize(
    "order",
    [
        lambda row: random.Random(str(row)).random(),
        lambda row: row,
        lambda row: (row[2], row[0], row[1]),
        lambda row: (row[1], row[2], row[0]),
        lambda row: (-row[2], row[1], row[0]),
    ],
    ids=["anywhere", "few_partitions", "first_of_each_fragment", "first_fragment", "last"],
)
def test_a_change_of_five_percent_is_found(is_even: bool, order: Callable[[Row], object]) -> None:
    """In 99 of 100 trials, wherever the rows are that it changes."""
    every = sorted(rows_of(PARTITIONS if is_even else UNEVEN), key=order)  # type: ignore[arg-type]
    changed = set(every[: len(every) // 20])
    missed = sum(chosen.isdisjoint(changed) for chosen in samples(is_even))
    assert missed <= 1


def test_so_many_distinct_rows_are_chosen() -> None:
    assert len(sample(PARTITIONS, 1)) == ROWS
    assert len(sample(UNEVEN, 1)) == ROWS
    few = {"a": {0: 3, 1: 0}, "b": {0: 2}}
    assert sample(few, 1, 9) == set(rows_of(few))
    assert sum(spread({"a": 3, "b": 2}, None, 1).values()) == 5


def test_the_longest_and_the_shortest_are_added() -> None:
    lengths = {4: np.array([3.0, 1.0, 3.0]), 7: np.array([2.0, 9.0, 0.0]), 8: np.zeros(0)}
    assert with_extremes({4: (1,), 7: (0,), 8: (2,)}, lengths) == {4: (1,), 7: (0, 1, 2), 8: (2,)}
    assert with_extremes({8: (2,)}, {8: np.zeros(0)}) == {8: (2,)}
