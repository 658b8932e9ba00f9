"""The first rows of a stage, computed without Dagster, and not stored."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster._private_folder import temporary_folder
from vane_dagster._secrets import errors_masked
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.inference import SchemaInference
from vane_dagster.errors import DefinitionError
from vane_dagster.events import Event, SchemaInferred
from vane_dagster.orchestration.progress import PRINTED, log_text
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import Compute, LocalCompute
from vane_dagster.orchestration.run import Connection, RunContext, execute_preview
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


def preview(
    pipeline: Pipeline,
    stage: str,
    rows: int,
    partition: str | None,
    store: Any,
    compute: Compute | None,
) -> pa.Table:
    """Implement `Stage.preview`."""
    location = f"stage '{pipeline.name}/{stage}'"
    positive(location, "rows", rows)
    if (partition is None) != (pipeline.partitions_def is None):
        raise DefinitionError(
            f"{location}: preview: partition is {partition!r}; name one if the pipeline has "
            "partitions, and none if it has not"
        )
    if store is None and not isinstance(compute, (LocalCompute, type(None))):
        raise DefinitionError(
            f"{location}: preview: with compute= of a cluster, give store= too, where its workers "
            "put what they compute for a moment"
        )
    if pipeline[stage].spec.publishes:
        raise DefinitionError(f"{location}: preview: it publishes; preview the stage that it reads")
    with ExitStack() as stack:
        stack.enter_context(errors_masked())
        if store is None:
            opened = Store(Location(str(stack.enter_context(temporary_folder("vane-preview-")))))
        else:
            opened = open_store(store, f"{location}: preview")
        selected = with_upstream(pipeline, stage) - {SOURCE}
        connection = Connection(LocalCompute() if compute is None else compute, pipeline, selected)
        stack.callback(connection.close)
        run_id = f"preview-{secrets.token_hex(4)}"

        def run(plan: RunPlan) -> Mapping[str, Sequence[Part]]:
            checks = CheckRunner(plan.pipeline, opened)
            context = RunContext(opened, run_id, checks, _show)
            return execute_preview(context, plan, connection.backend())

        given = (opened, run, run_id, _show, selected, [partition], False, connection.connect)
        inference = stack.enter_context(SchemaInference(*given))
        found = inference.first_rows(inference.resolve(pipeline), stage, rows)
        if found is None:
            raise DefinitionError(f"{location}: preview: the source has no rows")
        return pa.concat_tables(found.tables).slice(0, rows)


def _show(event: Event) -> None:
    if isinstance(event, SchemaInferred):
        print(f"stage {event.stage!r}: {event.code}")
    else:
        log_text(PRINTED, event)
