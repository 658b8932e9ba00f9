"""Workers that other runs have under lease too: who they are, and which run's calls go first."""

from __future__ import annotations

from collections.abc import Mapping

from vane_dagster.compute.api import IO_POOL, Lease
from vane_dagster.compute.waits import Waits, short
from vane_dagster.engine.worker_queue import Lane
from vane_dagster.worker.protocol import PoolSpec

_TELL_AFTER_SECONDS = 5.0


class Sharing:
    """Follows which runs share the workers of a lease.

    A worker serves its calls in the order in which they were made, and a run keeps one at work and
    one queued. Where a run of higher priority uses the same worker, this one keeps one alone. So
    of a worker that both keep busy, the run of higher priority gets two calls for each of the
    other; none is stopped, and no call at work is interrupted.

    Args:
        lease: The lease.
        pools: The pool of each stage that has one.
        priority: The run's.
        waits: Is told which runs the models are shared with.
    """

    def __init__(
        self, lease: Lease, pools: Mapping[str, PoolSpec], priority: int, waits: Waits
    ) -> None:
        self._lease, self._priority, self._waits = lease, priority, waits
        self._labels = {pool.identity: pool.label for pool in pools.values()}

    def follow(self, lanes: Mapping[str, Lane]) -> None:
        """Takes in who shares the workers now; to be called often."""
        sharers = self._lease.sharers()
        for identity, lane in lanes.items():
            others = {
                worker: sharers[worker.name] for worker in lane.busy if worker.name in sharers
            }
            lane.yields = {
                worker
                for worker, found in others.items()
                if any(other.priority > self._priority for other in found)
            }
            if identity == IO_POOL:
                continue
            label = self._labels[identity]
            if not others:
                self._end(label)
                continue
            if not any(lane.busy.values()):  # idle: nothing to say, and still shared
                continue
            runs = sorted({other.run_id for found in others.values() for other in found})
            text = f"{label}: {len(others)} of {len(lane.busy)} workers also serve {short(runs)}"
            text += ", of higher priority" if lane.yields else ""
            self._waits.begin(f"pool {label}", text, runs, _TELL_AFTER_SECONDS)

    def close(self) -> None:
        """The lease ends."""
        for label in self._labels.values():
            self._end(label)

    def _end(self, label: str) -> None:
        reason = f"pool {label}"
        runs = short(self._waits.runs(reason))
        self._waits.end(reason, f"{label}: no longer shares workers with {runs}")
