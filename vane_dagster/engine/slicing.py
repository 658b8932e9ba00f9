"""Size of the work on a map's input for one call: a whole fragment, or a slice of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.worker.pools import PoolSpec

_SLICE_SECONDS = 0.5
_DRIVER_SECONDS = 0.005
_FIRST_UNITS = 4
_COSTLY_SECONDS = 10e-6


class SliceSizer:
    """Estimates the speed of a wave's maps, and derives the size of their calls."""

    def __init__(self, pools: Mapping[str, PoolSpec]) -> None:
        self._pools = pools
        self._row_seconds: dict[str, float] = {}

    def learn(self, stage: str, seconds: float, rows: int) -> None:
        """Update the estimate with a call; the last call has a weight of one half."""
        if rows:
            measured = seconds / rows
            self._row_seconds[stage] = (self._row_seconds.get(stage, measured) + measured) / 2

    def seed_estimate(self, stage: str, row_seconds: float | None) -> None:
        """Use a warm worker's estimate from former runs, if there is none yet."""
        if row_seconds:
            self._row_seconds.setdefault(stage, row_seconds)

    def is_costly(self, stage: str) -> bool:
        """Whether a row takes much longer to compute than to look up; True until that is known."""
        return self._row_seconds.get(stage, 1.0) >= _COSTLY_SECONDS

    def may_run_whole(self, stage: str) -> bool:
        """Whether one worker may process a whole fragment alone.

        A GPU would idle while the worker reads and writes, and a worker that is to be replaced
        after some batches would exceed their number.
        """
        pool = self._pools[stage]
        return not pool.bundle.get("GPU") and pool.slots == 1 and not pool.lifecycle.max_batches

    def is_learning(self, stages: Collection[str]) -> bool:
        """Whether one of the stages may run whole fragments and its speed is still unknown."""
        unknown = self._pools.keys() & {*stages} - self._row_seconds.keys()
        return any(map(self.may_run_whole, unknown))

    def should_run_whole(self, stage: str, rows: int) -> bool:
        """Whether one worker reads, computes and writes a fragment, which takes at most a slice.

        This saves two copies through shared memory.
        """
        seconds = self._row_seconds.get(stage, math.inf) * rows
        return seconds <= _SLICE_SECONDS and self.may_run_whole(stage)

    def slice_rows(
        self, spec: MapBatchesSpec, rows: int, left: int, workers: int, last: bool
    ) -> int:
        """Rows of the next slice of a table: whole units worth about 500 ms, fewer towards the end.

        A unit is a batch, or for async code a quarter of the batches in flight, rounded up, as a
        worker then computes several slices at a time. The units of the last table are of equal size
        and as many for each worker, so that all finish together. If a worker is replaced after some
        batches, a slice is one batch.
        """
        if spec.workers.max_batches is not None:
            return min(left, spec.usual_batch_size)
        beside, batches = max(1, spec.slots // 4), spec.max_concurrency if spec.udf.is_async else 1
        unit = spec.usual_batch_size * math.ceil(batches / beside)
        if last and rows >= unit * workers:
            unit = math.ceil(rows / workers / math.ceil(rows / workers / unit))
        share = math.ceil(left / max(1, 2 * workers))
        known = self._row_seconds.get(spec.name)
        if known is None:
            wanted = min(_FIRST_UNITS * unit // beside, share)
        else:
            seconds = max(_SLICE_SECONDS * beside / spec.slots, _DRIVER_SECONDS * workers)
            wanted = int(seconds / max(known, 1e-12))
            wanted = min(wanted, share) if last else wanted
        return min(left, unit * max(1, math.ceil(min(wanted, left) / unit)))
