"""The schema of every stage of a run, checked from the source down before any work."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa

from vane_dagster.errors import SchemaError, names
from vane_dagster.pipeline.keys import JoinShape, Side, join_shape
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import (
    SOURCE,
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    StageSpec,
)
from vane_dagster.types import sql
from vane_dagster.types.schema import ERROR_COLUMN


def resolve_schemas(
    pipeline: Pipeline, stages: Collection[str], known: Mapping[str, pa.Schema]
) -> dict[str, pa.Schema]:
    """The output schemas of the source and of `stages`.

    Args:
        pipeline: The pipeline.
        stages: Stages to resolve, each of which has its upstream here or in `known`.
        known: Schemas of the source and of stages that are read from the store.

    Raises:
        SchemaError: If a column is missing, has a type that does not fit, or stands twice.
    """
    schemas = dict(known)
    if SOURCE in schemas:
        _check_id(f"source of pipeline {pipeline.name!r}", pipeline.id, schemas[SOURCE])
    for stage in pipeline:
        if stage.name in stages:
            inputs = {name: schemas[name] for name in stage.spec.upstream}
            schemas[stage.name] = output_schema(pipeline, stage.spec, inputs)
    return schemas


def output_schema(
    pipeline: Pipeline, spec: StageSpec, inputs: Mapping[str, pa.Schema]
) -> pa.Schema:
    """The schema of what a stage emits, given its inputs'.

    Raises:
        SchemaError: If they do not fit.
    """
    culprit = f"stage '{pipeline.name}/{spec.name}'"
    first = inputs[spec.upstream[0]]
    if isinstance(spec, ProjectSpec):
        schema = sql.bind(spec.columns, spec.where, first, culprit)
        _check_id(culprit, pipeline[spec.name].id, schema)
        return schema
    if isinstance(spec, MapBatchesSpec):
        return _map_schema(pipeline, spec, first, culprit)
    if isinstance(spec, JoinSpec):
        return _join_schema(pipeline, spec, inputs, culprit)
    return first


def _map_schema(
    pipeline: Pipeline, spec: MapBatchesSpec, first: pa.Schema, culprit: str
) -> pa.Schema:
    if missing := [c for c in spec.columns or () if c not in first.names]:
        raise SchemaError(
            f"{culprit}: needs {names(missing)}, which {spec.upstream[0]!r} does not have; "
            f"it has {names(first.names, 20)}"
        )
    fields = []
    above = [key.column for key in pipeline.keys(spec.upstream[0])]
    own = [key.column for key in pipeline.keys(spec.name)]
    if spec.children is not None:
        fields.append(pa.field(own[0], pa.string()))  # unless it is declared
    for id, column in zip(own[len(fields) :], above):
        fields.append(first.field(column).with_name(id))
        declared = spec.schema.field(id).type if id in spec.schema.names else fields[-1].type
        if declared != fields[-1].type:
            raise SchemaError(
                f"{culprit}: schema declares the id {id!r} as {declared}, but it comes in as "
                f"{fields[-1].type}; ids keep their type. Leave it out of the schema, or cast it "
                "in the source"
            )
    fields += [first.field(column) for column in spec.carried if column not in own]
    missing = [field for field in fields if field.name not in spec.schema.names]
    schema = pa.schema([*missing, *spec.schema])
    if spec.failures.on_error == "null":
        schema = schema.append(pa.field(ERROR_COLUMN, pa.string()))
    _check_id(culprit, own[0], schema)
    return schema


def _join_schema(
    pipeline: Pipeline, spec: JoinSpec, inputs: Mapping[str, pa.Schema], culprit: str
) -> pa.Schema:
    shape = join_shape(spec, {node: pipeline.keys(node) for node in spec.upstream}, culprit)
    base = inputs[shape.base]
    sides = {side.node: side for side in shape.sides}
    ids = [key.column for key in pipeline.keys(shape.base)]
    fields = {id: base.field(id) for id in ids}
    owner = dict.fromkeys(ids, shape.base)
    for node, schema in inputs.items():
        side = sides.get(node)
        if side is not None:
            _check_same_id(culprit, shape, base, schema, side)
        taken = _taken(spec, node, schema, side.known if side else ids, culprit)
        if side is not None and side.label is not None:
            own = [key.column for key in pipeline.keys(node) if key.column not in side.known]
            taken = [schema.field(id) for id in own] + [f for f in taken if f.name not in own]
            taken = [pa.field(side.label, pa.list_(pa.struct(taken)))]
        for field in taken:
            if field.name in fields:
                raise SchemaError(
                    f"{culprit}: column {field.name!r} comes from both {owner[field.name]!r} and "
                    f"{node!r}; name the columns to take, as columns={{{node!r}: "
                    f"{{'other_name': {field.name!r}}}}}"
                )
            fields[field.name], owner[field.name] = field, node
    return pa.schema(list(fields.values()))


def _taken(
    spec: JoinSpec, node: str, schema: pa.Schema, known: Collection[str], culprit: str
) -> list[pa.Field]:
    """What a join takes of a node, under its new names, without the ids that the base has."""
    chosen = spec.columns.get(node)
    if chosen is None:
        return [field for field in schema if field.name not in known]
    if missing := [column for _, column in chosen if column not in schema.names]:
        raise SchemaError(
            f"{culprit}: takes {names(missing)} of {node!r}, which does not have it; it has "
            f"{names(schema.names, 20)}"
        )
    return [
        schema.field(column).with_name(name)
        for name, column in chosen
        if not (name == column and column in known)
    ]


def _check_same_id(
    culprit: str, shape: JoinShape, base: pa.Schema, own: pa.Schema, side: Side
) -> None:
    ours, theirs = (shape.id, side.match) if side.label else (side.match, side.id)
    expected, found = base.field(ours).type, own.field(theirs).type
    if expected != found:
        raise SchemaError(
            f"{culprit}: the id {ours!r} is {expected} in {shape.base!r} and {found} in "
            f"{side.node!r}; materialize both again from the same source"
        )


def _check_id(culprit: str, id: str, schema: pa.Schema) -> None:
    if id not in schema.names:
        raise SchemaError(
            f"{culprit}: has no id column {id!r}; it has {names(schema.names, 20)}. Name the id "
            "column in vd.Pipeline(id=...)"
        )
    kind = schema.field(id).type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (pa.types.is_integer(kind) or text):
        raise SchemaError(
            f"{culprit}: the id {id!r} is {kind}; expected whole numbers or text. Cast it in the "
            "source, for example to VARCHAR"
        )
