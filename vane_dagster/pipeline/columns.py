"""The checks of a stage, validated against its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from vane_dagster.checks.base import Check
from vane_dagster.checks.builtin import defaults_for, merge
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.specs import StageSpec

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline


def stage_checks(pipeline: Pipeline, spec: StageSpec, location: str) -> tuple[Check, ...]:
    """Return the checks of a stage: its defaults, merged with the checks that the user declares.

    Args:
        pipeline: The pipeline.
        spec: The stage.
        location: The stage, for messages.

    Raises:
        DefinitionError: If a check does not fit the stage.
    """
    known = spec.made_schema(pipeline)
    checks = merge(
        defaults_for(known, spec.kind, spec.fills_nulls, spec.max_error_rate),
        spec.asset.checks,
        location,
    )
    if spec.publishes and (late := [check for check in checks if check.rows_to_recompute]):
        raise DefinitionError(
            f"{location}: check {late[0].name!r} computes rows again, and a write stage computes "
            "none; give it to the stage that is published"
        )
    if spec.runs_udf:
        ids = [key.column for key in pipeline.keys(spec.name)]
        carried = [pa.field(id, pa.null()) for id in ids if id not in spec.schema.names]
        for check in checks:
            check.fit(pa.schema([*carried, *spec.schema]), location)
    return checks
