"""Runs that go on when batches have ended: which a sensor requests, or the command line begins."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from vane_dagster._secrets import errors_masked
from vane_dagster.engine.stage_batches import StageBatches, stage_batches
from vane_dagster.orchestration.partition_order import DagsterOrder, range_tags
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import with_upstream
from vane_dagster.storage.batch_records import ProviderBatch
from vane_dagster.storage.reader import in_force
from vane_dagster.storage.store import Store

if TYPE_CHECKING:
    from vane_dagster.orchestration.io_manager import FragmentStore

Key = str | None
_TAG = "vane_dagster/batch"
_FINISHED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_MOST_RETRIES = 2


@dataclass(frozen=True)
class Continuation:
    """A run that goes on with the answers of batches.

    Attributes:
        batch: The last batch that it waited for.
        stages: The stages to run.
        partitions: The partitions.
        is_committed: Whether its answers are committed, so that only stages downstream are left.
    """

    batch: ProviderBatch
    stages: Sequence[str]
    partitions: list[Key]
    is_committed: bool

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run, copied from the run that submitted the batch."""
        if self.is_committed:
            return {}
        options = {name: getattr(self.batch, name) for name in ("force", "retry_quarantined")}
        return {**options, "continues": self.batch.run_id}


class BatchRuns:
    """The batches of a pipeline's stages, and the runs that go on with their answers."""

    def __init__(self, pipeline: Pipeline, store: Store) -> None:
        self._pipeline, self._store = pipeline, store
        self.every = stage_batches(pipeline, store)

    def left(self, batches: StageBatches, batch: ProviderBatch) -> dict[Key, bool]:
        """Return the partitions in which the run that submitted a batch is to go on.

        The stage or one below it has not been committed since the batch has ended; the value says
        whether the stage itself has been. What a user has cancelled is left to the user.
        """
        if batch.is_canceled:
            return {}
        latest = {
            stage: in_force(self._store, self._pipeline.name, stage, batch.partitions)
            for stage in self._pipeline.stages
            if stage in batch.stages and batches.stage in with_upstream(self._pipeline, stage)
        }
        left: dict[Key, bool] = {}
        for key in batch.partitions:
            made = {stage: manifests.get(key) for stage, manifests in latest.items()}
            done = {s for s, m in made.items() if m and m.committed_at >= batch.ended_at}
            if done != made.keys():
                left[key] = batches.stage in done
        return left

    def continuations(self, done: Collection[str] = ()) -> tuple[list[Continuation], set[str]]:
        """Return the runs to begin, and the names of the batches that need none any more.

        A partition waits for all its batches, of all stages, and goes on with the stages of the run
        that has submitted the last of them.
        """
        every = [(each, batch) for each in self.every for batch in each.batches]
        waiting = {key for each in self.every for key in each.waiting()}
        needless, last = set[str](), dict[Key, tuple[ProviderBatch, bool]]()
        for batches, batch in sorted(every, key=lambda pair: pair[1].at):
            if not batch.ended_at:
                continue
            left = {} if batch.name in done else self.left(batches, batch)
            needless |= set() if left else {batch.name}
            last |= {key: (batch, made) for key, made in left.items() if key not in waiting}
        runs: dict[tuple[str, bool], Continuation] = {}
        for key, (batch, made) in last.items():
            stages = [stage for stage in self._pipeline.stages if stage in batch.stages]
            run = runs.setdefault((batch.name, made), Continuation(batch, stages, [], made))
            run.partitions.append(key)
        return [*runs.values()], needless


def look_at_batches(
    context: dg.SensorEvaluationContext, pipeline: Pipeline, store: FragmentStore
) -> dg.SensorResult:
    """Collect what has ended, and request runs; the cursor has the batches that need none."""
    with errors_masked():
        batch_runs = BatchRuns(pipeline, store.open())
        for each in batch_runs.every:
            each.refresh()
        runs, done = batch_runs.continuations(json.loads(context.cursor or "[]"))
    order = DagsterOrder(pipeline.partitions_def, context.instance)

    def count_runs(batch: str, statuses: Collection[dg.DagsterRunStatus]) -> int:
        filters = dg.RunsFilter(tags={_TAG: batch}, statuses=[*statuses])
        return context.instance.get_runs_count(filters)

    unfinished = [status for status in dg.DagsterRunStatus if status not in _FINISHED]
    requests = []
    for run in runs:
        batch = run.batch.name
        failures = min(_MOST_RETRIES, count_runs(batch, [dg.DagsterRunStatus.FAILURE]))
        if not count_runs(batch, unfinished):
            requests += [
                dg.RunRequest(
                    run_key=f"{batch}/{first}..{last}/{failures}",  # one run for each
                    partition_key=first if first == last else None,
                    asset_selection=[pipeline[stage].key for stage in run.stages],
                    run_config={"ops": {f"{pipeline.name}_pipeline": {"config": run.options}}},
                    tags={**range_tags(first, last), _TAG: batch},
                )
                for first, last in order.ranges(run.partitions)
            ]
    in_flight = sum(len(each.in_flight) for each in batch_runs.every)
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else f"batches in flight: {in_flight:,}",
        cursor=json.dumps(sorted(done)),
    )
