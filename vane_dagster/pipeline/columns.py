"""Where a stage's columns come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from vane_dagster.checks.builtin import Check, defaults_for, merge
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.keys import JoinShape, join_shape
from vane_dagster.pipeline.specs import (
    ERROR_COLUMN,
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    StageSpec,
)
from vane_dagster.types import sql

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline

Column = tuple[str, str]
"""A node and one of its columns."""


def known_columns(pipeline: Pipeline, node: str) -> tuple[str, ...]:
    """The columns of a stage as far as its declaration tells them."""
    spec = pipeline[node].spec
    ids = tuple(key.column for key in pipeline.keys(node))
    if isinstance(spec, ProjectSpec):
        return (*ids, *(name for name, _ in spec.columns))
    if isinstance(spec, MapBatchesSpec):
        return tuple(dict.fromkeys((*ids, *spec.carried, *spec.schema.names)))
    return ids


def made_columns(pipeline: Pipeline, spec: StageSpec, schema: pa.Schema) -> tuple[str, ...]:
    """The columns whose values a stage makes, and does not pass on as they are.

    Of a left join they are those that may be null for want of a row.
    """
    ids = {key.column for key in pipeline.keys(spec.name)}
    if isinstance(spec, MapBatchesSpec):
        return tuple(name for name in spec.schema.names if name not in ids)
    if isinstance(spec, ProjectSpec):
        return tuple(
            name
            for name, expression in spec.columns
            if sql.plain_column(expression, spec.name) is None
        )
    if isinstance(spec, JoinSpec) and spec.how == "left":
        shape = _shape(pipeline, spec)
        lists = {side.label for side in shape.sides}
        beside = {name for s in shape.sides for name, _ in spec.columns.get(s.node, ())}
        everything = all(side.node in spec.columns for side in shape.sides)
        candidates = beside if everything else set(schema.names)
        return tuple(n for n in schema.names if n in candidates and n not in ids | lists)
    return ()


def stage_checks(pipeline: Pipeline, spec: StageSpec, culprit: str) -> tuple[Check, ...]:
    """The checks of a stage: those that come with it, and what the user says of them.

    Raises:
        DefinitionError: If they do not fit the stage.
    """
    known: pa.Schema | None = None
    ids = [key.column for key in pipeline.keys(spec.name)]
    if isinstance(spec, MapBatchesSpec):
        known = pa.schema([field for field in spec.schema if field.name not in ids])
    elif isinstance(spec, ProjectSpec) and not made_columns(pipeline, spec, pa.schema([])):
        known = pa.schema([])
    left = isinstance(spec, JoinSpec) and spec.how == "left"
    rate = spec.failures.max_error_rate if isinstance(spec, MapBatchesSpec) else 0.0
    checks = merge(defaults_for(known, spec.kind, left, rate), spec.asset.checks, culprit)
    if spec.kind == "write" and (late := [check for check in checks if not check.at_commit]):
        raise DefinitionError(
            f"{culprit}: check {late[0].name!r} computes rows again, and a write stage computes "
            "none; give it to the stage that is published"
        )
    if known is not None and isinstance(spec, MapBatchesSpec):
        carried = [pa.field(id, pa.null()) for id in ids if id not in spec.schema.names]
        for check in checks:
            check.fit(pa.schema([*carried, *spec.schema]), culprit)
    return checks


def column_lineage(
    pipeline: Pipeline, spec: StageSpec, schemas: Mapping[str, pa.Schema]
) -> dict[str, list[Column]]:
    """For each column of a stage the columns that its values depend on.

    Args:
        pipeline: The pipeline.
        spec: The stage.
        schemas: Schemas of the stage and of what it reads.

    Returns:
        From SQL and joins what is so; of a user's code what is declared, else all that it reads.
    """
    own, first = schemas[spec.name], spec.upstream[0]
    if isinstance(spec, ProjectSpec):
        return {
            name: _named(first, schemas[first], sql.referenced_columns(expression, spec.name))
            for name, expression in spec.columns
        }
    if isinstance(spec, MapBatchesSpec):
        return _map_lineage(pipeline, spec, schemas)
    if isinstance(spec, JoinSpec):
        return _join_lineage(pipeline, spec, schemas)
    return {name: [(first, name)] for name in own.names}


def _map_lineage(
    pipeline: Pipeline, spec: MapBatchesSpec, schemas: Mapping[str, pa.Schema]
) -> dict[str, list[Column]]:
    first = spec.upstream[0]
    above = [key.column for key in pipeline.keys(first)]
    own = [key.column for key in pipeline.keys(spec.name)]
    read = schemas[first].names if spec.columns is None else list(spec.columns)
    found = {name: [(first, c) for c in spec.reads.get(name, read)] for name in spec.schema.names}
    found |= {name: [(first, name)] for name in spec.carried}
    found |= {id: [(first, column)] for id, column in zip(own[len(own) - len(above) :], above)}
    if spec.children is not None:
        found[own[0]] = [(first, above[0])]
    if spec.failures.on_error == "null":
        found[ERROR_COLUMN] = [(first, column) for column in read]
    return {name: found[name] for name in schemas[spec.name].names}


def _join_lineage(
    pipeline: Pipeline, spec: JoinSpec, schemas: Mapping[str, pa.Schema]
) -> dict[str, list[Column]]:
    shape = _shape(pipeline, spec)
    ids = [key.column for key in pipeline.keys(shape.base)]
    found = {id: [(shape.base, id)] for id in ids}
    found |= {n: [(shape.base, c)] for n, c in _taken(spec, shape.base, schemas, ids)}
    for side in shape.sides:
        pairs = _taken(spec, side.node, schemas, side.known)
        if side.label is None:
            found |= {name: [(side.node, column)] for name, column in pairs}
        else:
            listed = [(side.node, column) for _, column in pairs]
            found[side.label] = list(dict.fromkeys([(side.node, side.id), *listed]))
    return {name: found[name] for name in schemas[spec.name].names}


def _taken(
    spec: JoinSpec, node: str, schemas: Mapping[str, pa.Schema], known: Collection[str]
) -> Iterable[tuple[str, str]]:
    pairs = spec.columns.get(node, [(name, name) for name in schemas[node].names])
    return [(n, c) for n, c in pairs if not (n == c and c in known)]


def _named(node: str, schema: pa.Schema, wanted: Collection[str]) -> list[Column]:
    lower = {name.lower() for name in wanted}
    return [(node, name) for name in schema.names if name.lower() in lower]


def _shape(pipeline: Pipeline, spec: JoinSpec) -> JoinShape:
    return join_shape(spec, {node: pipeline.keys(node) for node in spec.upstream}, spec.name)
