"""Versions of the key algorithm, and which parts of former versions are kept.

A stage's definition begins with the version's number, and each fragment key includes the
definition. If the store lacks a part under the current version's key, the planner looks for one
under a former version's key and treats it as equivalent. Downstream keys are computed from the key
that the part has.

To change how a definition is computed, raise `VERSION` in `definition`, move the former algorithm
to a module of its own, such as `key_version_2`, and add that to `VERSIONS`. Its `accepts` selects
the stages with rows that cannot be stale. A change that fixes staleness must accept none of the
affected stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning import key_version_2
from vane_dagster.planning.definition import VERSION, stage_definition


@dataclass(frozen=True)
class KeyVersion:
    """One version of the algorithm.

    Attributes:
        number: The version.
        definition: Computes the definition of a stage that is accepted.
        accepts: Whether a part under this version's key has the rows that would be computed now.
    """

    number: int
    definition: Callable[[Pipeline, StageSpec], str]
    accepts: Callable[[Pipeline, StageSpec], bool]


VERSIONS = (
    KeyVersion(VERSION, stage_definition, lambda pipeline, spec: True),
    KeyVersion(key_version_2.VERSION, key_version_2.stage_definition, key_version_2.accepts),
)
"""The current version, then former versions with parts that stores may hold, newest first."""


def stage_definitions(pipeline: Pipeline, spec: StageSpec) -> tuple[str, ...]:
    """Return a stage's definition, then its definitions of the former versions that accept it.

    Args:
        pipeline: The pipeline.
        spec: The stage.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    present, *former = VERSIONS
    accepted = [version for version in former if version.accepts(pipeline, spec)]
    return tuple(version.definition(pipeline, spec) for version in (present, *accepted))
