"""Checks whether two sets of Parquet files contain the same rows, in any order and any division."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Fingerprint:
    """A summary of a step's output.

    Args:
        rows: Number of rows.
        ids: Number of distinct ids.
        id_sum: Sum of the ids.
        sums: For each float column, the sum of values weighted by a number that depends on the
            row's id, so that a value in the wrong row changes it.
        scales: The same sums of absolute values, as the reference for differences.
    """

    rows: int
    ids: int
    id_sum: int
    sums: Mapping[str, float]
    scales: Mapping[str, float]

    def differences(self, other: Fingerprint, tolerance: float) -> list[str]:
        """Describe how `other` differs from this expected fingerprint.

        Args:
            other: The actual fingerprint.
            tolerance: Allowed difference of the sums, relative to `scales`.
        """
        found = [
            f"{name}: expected {expected}, got {actual}"
            for name, expected, actual in (
                ("rows", self.rows, other.rows),
                ("distinct ids", self.ids, other.ids),
                ("sum of ids", self.id_sum, other.id_sum),
                ("columns", sorted(self.sums), sorted(other.sums)),
            )
            if expected != actual
        ]
        for name in sorted(set(self.sums) & set(other.sums)):
            expected_sum, actual_sum = self.sums[name], other.sums[name]
            # Not `>`: that would accept NaN.
            if not abs(expected_sum - actual_sum) <= tolerance * self.scales[name]:
                found.append(f"checksum of {name}: expected {expected_sum}, got {actual_sum}")
        return found


def tolerance(work: Workload) -> float:
    """Return the relative tolerance: only the floats of a model depend on the batches."""
    return 1e-5 if work.key == "a" else 1e-12


def fingerprint(paths: Sequence[Path]) -> Fingerprint:
    """Read files one by one and compute their fingerprint."""
    rows = 0
    all_ids: list[np.ndarray] = []
    sums: dict[str, list[float]] = {}
    scales: dict[str, list[float]] = {}
    for path in paths:
        table = pq.read_table(path)
        ids = table["id"].to_numpy()
        rows += table.num_rows
        all_ids.append(ids)
        weights = (ids * 2_654_435_761 % 1_000_003) / 1_000_003
        for name in table.column_names:
            if name == "id":
                continue
            terms = _values(table[name], table.num_rows) * weights
            sums.setdefault(name, []).append(float(terms.sum()))
            scales.setdefault(name, []).append(float(np.abs(terms).sum()))
    ids = np.concatenate(all_ids) if all_ids else np.empty(0, dtype=np.int64)
    return Fingerprint(
        rows,
        len(np.unique(ids)),
        int(ids.sum()),
        {name: math.fsum(parts) for name, parts in sums.items()},
        {name: math.fsum(parts) for name, parts in scales.items()},
    )


def _values(column: pa.ChunkedArray, rows: int) -> np.ndarray:
    """Return one float per row; a vector counts as a projection that any permutation changes."""
    if not pa.types.is_nested(column.type):
        plain: np.ndarray = column.to_numpy().astype(np.float64)
        return plain
    flat = pc.list_flatten(column).to_numpy().astype(np.float64).reshape(rows, -1)
    projected: np.ndarray = flat @ np.cos(np.arange(flat.shape[1]))
    return projected
