"""Inputs of a run: the manifests of stages that it reads and does not compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vane_dagster._texts import in_partition
from vane_dagster.errors import PlanError, names
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.storage.manifest import FragmentRecord, Manifest


def stages_read(pipeline: Pipeline, spec: StageSpec) -> list[str]:
    """Return the stages from which a stage reads parts, quarantined rows or row records."""
    beside = [stage for stages in spec.quarantining(pipeline).values() for stage in stages]
    beside += [spec.provenance] if spec.publishes and spec.provenance else []
    return [node for node in dict.fromkeys((*spec.upstream, *beside)) if node != SOURCE]


def stages_between(pipeline: Pipeline, spec: StageSpec) -> list[str]:
    """Return the stages above a stage on the paths from those whose records it reads.

    The records describe the rows that reach the stage, so each stage on the way must have been made
    from the version in force of the one before.
    """
    beside = {*stages_read(pipeline, spec)} - {*spec.upstream}
    if not beside:
        return []
    above = with_upstream(pipeline, spec.name) - {spec.name, SOURCE}
    return [
        s.name for s in pipeline if s.name in above and beside & with_upstream(pipeline, s.name)
    ]


def not_materialized(
    pipeline: Pipeline, selected: Sequence[str], key: str | None, missing: Sequence[str]
) -> PlanError:
    """Return the error of inputs that are missing."""
    readers = [s for s in selected if set(missing) & {*stages_read(pipeline, pipeline[s].spec)}]
    wider = ",".join(f"+{reader}" for reader in readers)
    return PlanError(
        f"pipeline {pipeline.name!r}{in_partition(key)}: {names(readers)} reads {names(missing)}, "
        "which is not selected and was never materialized. Select it too: "
        f"select={wider!r} (--select of `vane-dagster plan`) adds all upstream stages"
    )


def agreed(
    location: str,
    fragments: tuple[FragmentRecord, ...] | None,
    inputs: Mapping[str, Manifest],
) -> tuple[FragmentRecord, ...]:
    """Return the fragments of a partition, on which the source and all inputs must agree."""
    for stage, manifest in inputs.items():
        own = tuple(manifest.fragments)
        if fragments is None:
            fragments = own
        elif [f.identity for f in fragments] != [f.identity for f in own]:
            raise PlanError(
                f"{location}: {stage!r} was materialized from other source files or with another "
                "fragment_rows, and is not selected. Select it too"
            )
    assert fragments is not None
    return fragments
