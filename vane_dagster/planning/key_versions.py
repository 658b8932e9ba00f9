"""Versions of the algorithm by which stages are keyed, and which parts of former ones are kept.

A stage's definition begins with the version's number, and each key has the definition in it. Where
the store lacks a part under the present version's key, the planner looks for one under a former
version's, and takes it for the same: keys of the stages below are made of the key that it has.

To change how a definition is computed: raise `VERSION` in `definition`, move what it computed until
now to a module of its own, as `version_2`, and add that to `VERSIONS`. Say in its `accepts` whose
rows cannot be stale; a change that mends staleness accepts none of the stages that it concerns.
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
        definition: Computes a stage's definition, of stages that are accepted.
        accepts: Whether a part of a stage that has this version's key has the rows that would be
            computed now.
    """

    number: int
    definition: Callable[[Pipeline, StageSpec], str]
    accepts: Callable[[Pipeline, StageSpec], bool]


VERSIONS = (
    KeyVersion(VERSION, stage_definition, lambda pipeline, spec: True),
    KeyVersion(key_version_2.VERSION, key_version_2.stage_definition, key_version_2.accepts),
)
"""The present version, then former ones whose parts stores may hold, the newest first."""


def stage_definitions(pipeline: Pipeline, spec: StageSpec) -> tuple[str, ...]:
    """A stage's definition, then those of former versions that are accepted.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    present, *former = VERSIONS
    accepted = [version for version in former if version.accepts(pipeline, spec)]
    return tuple(version.definition(pipeline, spec) for version in (present, *accepted))
