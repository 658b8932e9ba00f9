"""Compares the rows of an output with those of a run from nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

TOLERANCE = 1e-4
"""Vectors depend on how texts are batched; `from_nothing` asserts that other texts' are farther."""


@dataclass(frozen=True)
class Verdict:
    """How many rows are right, and what is wrong with the others.

    Args:
        expected: Rows of a run from nothing.
        right: Expected rows that are there, once, with their vector.
        missing: Expected rows that are not there, or have no vector.
        stale: Rows with the vector of an earlier day.
        wrong: Rows with any other vector, or of an id that is not expected.
        twice: Rows beyond the first of an id.
    """

    expected: int
    right: int
    missing: int
    stale: int
    wrong: int
    twice: int

    @property
    def equal(self) -> bool:
        """Whether the output equals a run from nothing."""
        return self.right == self.expected and not self.stale + self.wrong + self.twice


def judge(
    found: pa.Table,
    expected: Mapping[int, np.ndarray],
    earlier: Sequence[Mapping[int, np.ndarray]] = (),
    failing: Collection[int] = (),
) -> Verdict:
    """Judge each row of an output.

    Args:
        found: The output's columns `id` and `embedding`; a row without a vector counts as missing.
        expected: The vector of each id.
        earlier: Those of earlier days.
        failing: Ids of which a run from nothing has no vector.
    """
    rows = found.filter(found["embedding"].is_valid())
    counts = dict.fromkeys(("right", "stale", "wrong", "twice"), 0)
    without = set(found["id"].to_pylist()) - set(rows["id"].to_pylist())
    counts["wrong"] = len(without - expected.keys() - set(failing))
    seen: set[int] = set()
    for id, vector in zip(rows["id"].to_pylist(), _vectors(rows)):
        if _same(vector, expected.get(id)):
            kind = "right"
        else:
            kind = "stale" if any(_same(vector, day.get(id)) for day in earlier) else "wrong"
        if id in seen:
            counts["twice"] += 1
        if kind != "right" or id not in seen:
            counts[kind] += 1
        seen.add(id)
    return Verdict(len(expected), missing=len(expected.keys() - seen), **counts)


def _vectors(rows: pa.Table) -> np.ndarray:
    flat = rows["embedding"].combine_chunks().flatten().to_numpy()
    vectors: np.ndarray = flat.reshape(rows.num_rows, -1) if rows.num_rows else flat.reshape(0, 1)
    return vectors


def _same(vector: np.ndarray, other: np.ndarray | None) -> bool:
    return (
        other is not None
        and vector.shape == other.shape
        and bool(np.allclose(vector, other, rtol=0, atol=TOLERANCE))
    )
