"""A run in a notebook or script: without Dagster's events, in the same store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vane_dagster._secrets import errors_masked, masked
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.errors import VaneError
from vane_dagster.events import Event, Failed, Progress, RunPlanned, SchemaInferred, Unchanged
from vane_dagster.orchestration.forecasts import partition_keys, partition_order, selected_stages
from vane_dagster.orchestration.progress import PRINTED, ProgressReport, RunSummary, log_text
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.read_ahead import read_ahead
from vane_dagster.orchestration.reporting import failure_message
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store


def run(
    pipeline: Pipeline,
    partitions: Any,
    select: Any,
    store: Any,
    compute: Any,
    force: bool,
    retry_quarantined: bool,
    limits: Mapping[str, float | None],
    wait: bool = False,
) -> None:
    """Implement `Pipeline.run`."""
    location = f"pipeline {pipeline.name!r}: run"
    selected = selected_stages(pipeline, select, location)
    keys: Sequence[str | None] = partition_keys(pipeline, partitions, location)
    opened = open_store(store, location)
    report = _Report(opened)
    run_id = f"run-{secrets.token_hex(4)}"
    checks = CheckRunner(pipeline, opened, partition_order(pipeline).before, run_id)
    context = RunContext(opened, run_id, checks, report.listen)
    with errors_masked():
        run_pipeline(
            context,
            pipeline,
            selected,
            keys,
            LocalCompute() if compute is None else compute,
            force=force,
            retry_quarantined=retry_quarantined,
            limits=limits,
            wait=wait,
        )
        print(report.summary.text())
        if report.failed:
            texts = [failure_message(each) for each in report.failed if each.because is None]
            raise VaneError(masked("\n\n".join(texts)))


class _Report:
    """Prints a run's progress and warnings."""

    def __init__(self, store: Store) -> None:
        self.summary, self.failed = RunSummary(), list[Failed]()
        self._store, self._progress = store, ProgressReport(print)
        self._done: Iterator[Manifest | VaneError] = iter(())

    def listen(self, event: Event) -> None:
        """Handle an event."""
        self.summary.take(event)
        if isinstance(event, RunPlanned):
            self._done = read_ahead(self._store, event.plan)
        elif isinstance(event, Unchanged):
            manifest = next(self._done)  # in the order of the plan, as these events
            if isinstance(manifest, VaneError):
                self.listen(Failed(event.stage, event.partition, manifest))
            else:
                self.summary.up_to_date(manifest)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, SchemaInferred):
            print(f"stage {event.stage!r}: its schema was inferred: {event.code}")
        elif isinstance(event, Failed):
            self.failed.append(event)
        else:
            log_text(PRINTED, event)
