"""The benchmark of the day after: the judge of outputs."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.second_day.days import Vectors
from benchmarks.second_day.judge import judge

YESTERDAY: Vectors = {id: np.full(4, id, np.float32) for id in range(4)}
TODAY: Vectors = YESTERDAY | {3: np.full(4, 33, np.float32), 4: np.full(4, 4, np.float32)}
RIGHT = [(id, vector.tolist()) for id, vector in TODAY.items()]


def output(rows: list[tuple[int, list[float] | None]]) -> pa.Table:
    vectors = pa.array([vector for _, vector in rows], pa.list_(pa.float32(), 4))
    return pa.table({"id": pa.array([id for id, _ in rows], pa.int64()), "embedding": vectors})


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (RIGHT, {"right": 5}),
        (RIGHT[::-1], {"right": 5}),
        ([*RIGHT, (9, None)], {"right": 5}),
        ([*RIGHT, (8, None)], {"right": 5, "wrong": 1}),
        ([], {"missing": 5}),
        (RIGHT[1:], {"right": 4, "missing": 1}),
        ([(0, None), *RIGHT[1:]], {"right": 4, "missing": 1}),
        ([*RIGHT[:3], (3, [3.0] * 4), RIGHT[4]], {"right": 4, "stale": 1}),
        ([*RIGHT, (3, [3.0] * 4)], {"right": 5, "stale": 1, "twice": 1}),
        ([*RIGHT, RIGHT[0]], {"right": 5, "twice": 1}),
        ([*RIGHT[:4], (4, [3.9] * 4)], {"right": 4, "wrong": 1}),
        ([*RIGHT, (9, [9.0] * 4)], {"right": 5, "wrong": 1}),
        ([(1, [0.0] * 4), (0, [1.0] * 4), *RIGHT[2:]], {"right": 3, "wrong": 2}),
        ([*RIGHT[:4], (4, [float("nan")] * 4)], {"right": 4, "wrong": 1}),
    ],
)
def test_rows_are_judged(rows: list[tuple[int, list[float] | None]], counts: dict) -> None:
    verdict = judge(output(rows), TODAY, [YESTERDAY], failing={9})
    nothing = dict.fromkeys(("right", "missing", "stale", "wrong", "twice"), 0)
    assert asdict(verdict) == {"expected": 5, **nothing, **counts}
    assert verdict.equal == (counts == {"right": 5})
