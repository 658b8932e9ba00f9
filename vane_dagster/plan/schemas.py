"""The schema of every stage of a run, checked from the source down before any work."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa

from vane_dagster.declare import sql
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.declare.stage import SOURCE, JoinSpec, MapBatchesSpec, ProjectSpec, StageSpec
from vane_dagster.errors import SchemaError, names


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
        _check_id(culprit, pipeline.id, schema)
        return schema
    if isinstance(spec, MapBatchesSpec):
        return _map_schema(spec, pipeline.id, first, culprit)
    if isinstance(spec, JoinSpec):
        return _join_schema(pipeline.id, inputs, culprit)
    return first


def _map_schema(spec: MapBatchesSpec, id: str, first: pa.Schema, culprit: str) -> pa.Schema:
    if missing := [c for c in spec.columns or () if c not in first.names]:
        raise SchemaError(
            f"{culprit}: columns names {names(missing)}, which {spec.upstream[0]!r} does not have; "
            f"it has {names(first.names, 20)}"
        )
    id_type = first.field(id).type
    if id not in spec.schema.names:
        return pa.schema([pa.field(id, id_type), *spec.schema])
    declared = spec.schema.field(id).type
    if declared != id_type:
        raise SchemaError(
            f"{culprit}: schema declares the id {id!r} as {declared}, but it comes in as {id_type}"
            "; ids keep their type. Leave it out of the schema, or cast it in the source"
        )
    return spec.schema


def _join_schema(id: str, inputs: Mapping[str, pa.Schema], culprit: str) -> pa.Schema:
    fields: dict[str, pa.Field] = {}
    owner: dict[str, str] = {}
    for stage, schema in inputs.items():
        for field in schema:
            if field.name == id and id in fields:
                if fields[id].type != field.type:
                    raise SchemaError(
                        f"{culprit}: the id {id!r} is {fields[id].type} in {owner[id]!r} and "
                        f"{field.type} in {stage!r}; materialize both again from the same source"
                    )
            elif field.name in fields:
                raise SchemaError(
                    f"{culprit}: column {field.name!r} comes from both {owner[field.name]!r} and "
                    f"{stage!r}; rename or drop it in one of them, for example with a project"
                )
            else:
                fields[field.name], owner[field.name] = field, stage
    return pa.schema(list(fields.values()))


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
