"""How many rows a call gets, by the measured speed of its stage."""

from __future__ import annotations

from typing import Any

import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import same
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.worker.pools import PoolSpec


async def remote(batch: Any) -> Any:
    return batch


def spec(function: Any = same, **options: Any) -> Any:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    return docs.map_batches("model", function, schema={"x": "BIGINT"}, **grouped(options)).spec


def sizer(row_seconds: float | None = None, **pool: Any) -> SliceSizer:
    made = SliceSizer({"model": PoolSpec("m", "Model", (1, 1), **pool)})
    if row_seconds is not None:
        made.learn("model", row_seconds * 100, 100)
    return made


def test_a_stage_is_costly_until_it_is_known_to_take_no_longer_than_a_lookup():
    assert sizer().is_costly("model")
    assert sizer(1e-3).is_costly("model")
    assert not sizer(1e-6).is_costly("model")
    copied = sizer()
    copied.learn("model", 0.1, 0)
    assert copied.is_costly("model")


TEN = spec(batch_size=10)
MANY = 100_000
SIZES: dict[str, tuple[float | None, Any, int, int, bool, int]] = {
    "a few batches before the first measurement": (None, TEN, 1000, 4, False, 40),
    "and at most half a share": (None, TEN, 100, 4, False, 20),
    "whole batches worth half a second": (0.001, TEN, MANY, 4, False, 500),
    "rounded up": (0.02, TEN, MANY, 4, False, 30),
    "no more rows than are left": (0.001, TEN, 7, 4, False, 7),
    "not shared before the last table": (0.001, TEN, 160, 4, False, 160),
    "the last rows are shared": (0.001, TEN, 160, 4, True, 20),
    "many workers get more, for one driver": (0.001, TEN, MANY, 400, False, 2_000),
    "an async worker has several slices": (
        0.1, spec(remote, batch_size=10, max_concurrency=8), MANY, 4, False, 20,
    ),
    "and is filled by its first ones": (
        None, spec(remote, batch_size=10, max_concurrency=8), MANY, 4, False, 20,
    ),
    "of whole batches": (
        None, spec(remote, batch_size=32, max_concurrency=5), MANY, 4, False, 64,
    ),
    "many async workers too": (
        0.001, spec(remote, batch_size=10, max_concurrency=8), MANY, 400, False, 2_000,
    ),
    "an async worker of few batches": (
        0.001, spec(remote, batch_size=10, max_concurrency=8, max_batches=32), MANY, 4, False, 10,
    ),
    "a worker of few batches": (0.001, spec(batch_size=10, max_batches=3), MANY, 4, False, 10),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_the_rows_of_a_slice(case):
    row_seconds, stage, rows, workers, last, expected = SIZES[case]
    assert sizer(row_seconds).slice_rows(stage, rows, rows, workers, last=last) == expected


@pytest.mark.parametrize(
    ("rows", "slices"),
    [
        (200, [50, 50, 50, 50]),
        (130, [33, 33, 33, 31]),
        (1000, [63] * 15 + [55]),
    ],
)
def test_the_last_table_gives_each_worker_as_many_batches_of_one_size(rows, slices):
    slow, found, left = sizer(1.0), [], rows
    while left:
        found.append(slow.slice_rows(spec(batch_size=64), rows, left, 2, last=True))
        left -= found[-1]
    assert found == slices


def test_the_last_call_counts_for_half_of_the_estimate():
    made = sizer(0.01)
    made.learn("model", 0.0, 0)  # says nothing
    assert made.slice_rows(spec(batch_size=1), 10_000, 10_000, 4, last=False) == 50
    made.learn("model", 3.0, 100)
    assert made.slice_rows(spec(batch_size=1), 10_000, 10_000, 4, last=False) == 25


def test_a_measurement_replaces_no_estimate_but_a_warm_worker_supplies_the_first():
    made = sizer()
    made.seed_estimate("model", None)
    assert made.is_learning(["model"])
    made.seed_estimate("model", 0.01)
    made.seed_estimate("model", 99.0)
    assert not made.is_learning(["model"])
    assert made.slice_rows(spec(batch_size=1), 10_000, 10_000, 4, last=False) == 50


@pytest.mark.parametrize(("seconds", "is_whole"), [(None, False), (0.004, True), (0.006, False)])
def test_a_fragment_that_takes_at_most_a_slice_runs_whole(seconds, is_whole):
    assert sizer(seconds).should_run_whole("model", 100) == is_whole
