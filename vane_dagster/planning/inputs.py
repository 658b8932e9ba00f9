"""What a run reads and does not compute: stages that are not selected, by their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vane_dagster.errors import PlanError, names
from vane_dagster.pipeline.keys import join_shape
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import SOURCE, JoinSpec, MapBatchesSpec, StageSpec
from vane_dagster.storage.manifest import FragmentRecord, Manifest, ManifestName


def quarantining(pipeline: Pipeline, spec: StageSpec) -> dict[str, list[str]]:
    """For each list of a left join, the stages whose quarantined rows would lead to its children.

    A row without children is told from one whose children are not known by what these stages have
    quarantined.
    """
    if not isinstance(spec, JoinSpec) or spec.how != "left" or spec.children != "list":
        return {}
    shape = join_shape(spec, {node: pipeline.keys(node) for node in spec.upstream}, spec.name)
    known = _with_upstream(pipeline, shape.base)
    found = {}
    for side in shape.sides:
        if side.label is not None:
            way = _with_upstream(pipeline, side.node) - known
            found[side.node] = [s.name for s in pipeline if s.name in way and _quarantines(s.spec)]
    return found


def _quarantines(spec: StageSpec) -> bool:
    return isinstance(spec, MapBatchesSpec) and spec.failures.on_error == "quarantine"


def _with_upstream(pipeline: Pipeline, node: str) -> set[str]:
    """A stage and all that it is made from."""
    above = () if node == SOURCE else pipeline[node].spec.upstream
    return {node}.union(*(_with_upstream(pipeline, upstream) for upstream in above))


def stages_read(pipeline: Pipeline, spec: StageSpec) -> list[str]:
    """The stages of which a stage reads parts, or what they have quarantined."""
    beside = (stage for stages in quarantining(pipeline, spec).values() for stage in stages)
    return [node for node in dict.fromkeys((*spec.upstream, *beside)) if node != SOURCE]


def base_node(pipeline: Pipeline, spec: StageSpec) -> str:
    """The node whose rows a stage's rows are: of a join its base, else what the stage reads."""
    if not isinstance(spec, JoinSpec):
        return spec.upstream[0]
    keys = {node: pipeline.keys(node) for node in spec.upstream}
    return join_shape(spec, keys, spec.name).base


def require_inputs(
    pipeline: Pipeline,
    selected: Sequence[str],
    key: str | None,
    found: Mapping[str, ManifestName | None],
) -> None:
    """Sees that every input was materialized.

    Raises:
        PlanError: If one was not, naming who reads it.
    """
    missing = [stage for stage, name in found.items() if name is None]
    if missing:
        where = "" if key is None else f" in partition {key!r}"
        readers = [s for s in selected if set(missing) & {*stages_read(pipeline, pipeline[s].spec)}]
        raise PlanError(
            f"pipeline {pipeline.name!r}: {names(readers)} reads {names(missing)}, which is not "
            f"selected and was never materialized{where}. Select it too"
        )


def agreed(
    pipeline: str,
    key: str | None,
    fragments: tuple[FragmentRecord, ...] | None,
    inputs: Mapping[str, Manifest],
) -> tuple[FragmentRecord, ...]:
    """The fragments that the source and every input have in common, which is all of them.

    Args:
        pipeline: The pipeline's name.
        key: The partition.
        fragments: The source's, where a selected stage reads it.
        inputs: The manifests of the inputs.

    Raises:
        PlanError: If they differ.
    """
    from_source = fragments is not None
    for stage, manifest in inputs.items():
        own = tuple(manifest.fragments)
        if fragments is None:
            fragments = own
        elif [f.identity for f in fragments] != [f.identity for f in own]:
            where = "" if key is None else f" in partition {key!r}"
            than = "there are now" if from_source else f"{next(iter(inputs))!r} was"
            raise PlanError(
                f"pipeline {pipeline!r}: {stage!r} is not selected, and was materialized from "
                f"other source files, or with another fragment_rows, than {than}{where}. Select "
                "it too"
            )
    assert fragments is not None
    return fragments
