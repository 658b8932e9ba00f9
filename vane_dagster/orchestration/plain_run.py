"""A run in a notebook or script: without Dagster's events, in the same store."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from vane_dagster._secrets import errors_masked, masked
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.errors import VaneError
from vane_dagster.events import Committed, Event, Unchanged
from vane_dagster.orchestration.check_events import Checked, describe_checks
from vane_dagster.orchestration.forecasts import selected_stages
from vane_dagster.orchestration.partition_order import partition_keys, partition_order
from vane_dagster.orchestration.progress import PRINTED, RunLog
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.pipeline import Pipeline


def run(
    pipeline: Pipeline,
    partitions: Any,
    select: Any,
    store: Any,
    compute: Any,
    **options: Any,
) -> None:
    """Implement `Pipeline.run`."""
    location = f"pipeline {pipeline.name!r}: run"
    selected = selected_stages(pipeline, select, location)
    keys: Sequence[str | None] = partition_keys(pipeline, partitions, location)
    opened = open_store(store, location)
    run_id = f"run-{secrets.token_hex(4)}"
    checks = CheckRunner(pipeline, opened, partition_order(pipeline).before, run_id)
    log, checked = RunLog(PRINTED, pipeline.name), list[Checked]()

    def listen(event: Event) -> None:
        log.take(event)
        if isinstance(event, (Committed, Unchanged)) and (manifest := event.manifest):
            checked.extend((event.stage, event.partition, each) for each in manifest.checks)

    context = RunContext(opened, run_id, checks, listen)
    with errors_masked():
        compute = LocalCompute() if compute is None else compute
        finished = False
        try:
            run_pipeline(context, pipeline, selected, keys, compute, RunOptions(**options))
            finished = True
        finally:  # after an interrupt, too
            if finished or checked:
                print(log.summary.text(finished))
            if checked:
                print(f"  {describe_checks(checked)}")
        errors = log.errors.texts()
        if blocked := [each for each in checked if each[2].blocks]:
            errors.append(f"blocking {describe_checks(blocked)}")
        if errors:
            raise VaneError(masked("\n\n".join(errors)))
