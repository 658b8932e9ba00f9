"""The checks of a stage, fitted to its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from vane_dagster.checks.base import Check
from vane_dagster.checks.builtin import defaults_for, merge
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.specs import StageSpec

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline


def stage_checks(pipeline: Pipeline, spec: StageSpec, culprit: str) -> tuple[Check, ...]:
    """The checks of a stage: those that come with it, and what the user says of them.

    Raises:
        DefinitionError: If they do not fit the stage.
    """
    known = spec.made_schema(pipeline)
    checks = merge(
        defaults_for(known, spec.kind, spec.fills_nulls, spec.max_error_rate),
        spec.asset.checks,
        culprit,
    )
    if spec.publishes and (late := [check for check in checks if check.rows_to_recompute]):
        raise DefinitionError(
            f"{culprit}: check {late[0].name!r} computes rows again, and a write stage computes "
            "none; give it to the stage that is published"
        )
    if spec.runs_udf:
        ids = [key.column for key in pipeline.keys(spec.name)]
        carried = [pa.field(id, pa.null()) for id in ids if id not in spec.schema.names]
        for check in checks:
            check.fit(pa.schema([*carried, *spec.schema]), culprit)
    return checks
