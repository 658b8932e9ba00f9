"""Digests that identify a stage: its definition (the code version), and its pool identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.identity import (
    arguments,
    component,
    environment,
)
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import KIND, with_upstream
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.row_keys import ENCODING, has_keys
from vane_dagster.types.callables import constructors

ROW_VERSION = 1
"""Increment if row definitions are computed differently: no rows of former versions are found.

Both numbers are parts of keys; a release that changes either has keys of another version."""
VERSION = 4
"""Increment if definitions are computed differently, or if parameters change their meaning."""
_ALIKE = 8


def stage_definition(pipeline: Pipeline, spec: StageSpec) -> str:
    """Return the digest of everything about a stage that changes its results; 40 hex digits.

    Batch size, concurrency and resources are not part of it.
    """
    return definition_digest(components(pipeline, spec))


def definition_digest(components: Iterable[Component]) -> str:
    """Return the definition that consists of some components."""
    return digest(*(each.digest for each in components))


def components(pipeline: Pipeline, spec: StageSpec) -> tuple[Component, ...]:
    """Return what a stage's definition consists of, in order."""
    kind = component(KIND, spec.kind, VERSION)
    return (kind, component("option", "id", pipeline.id), *spec.components(pipeline))


def row_definition(
    pipeline: Pipeline, spec: MapBatchesSpec, inputs: pa.Schema, components: Sequence[Component]
) -> str:
    """Return the digest of everything that determines what a stage makes of a row's key columns.

    Rows with equal row keys and an equal row definition may have the same results. The names of
    ids, failures, the columns that pass through and other input columns are not part of it.
    """
    if spec.reuse.mode != "rows" or spec.is_inferred:
        return ""
    made = [spec.schema.field(name) for name in spec.made_columns(pipeline)]
    read = [inputs.field(name) for name in spec.key_columns(pipeline)]
    if spec.reuse.per_row:
        read[0] = read[0].with_name("")  # the code does not see it
    if not all(has_keys(field.type) for field in read):
        return ""
    return digest(
        "rows",
        ROW_VERSION,
        ENCODING,
        spec.kind,
        [_column(field) for field in made],
        [_column(field) for field in read],
        *spec.computation(pipeline, components),
    )


def _column(field: pa.Field) -> tuple[object, ...]:
    """Return what code can observe of a column's type; metadata of formats does not count."""
    return field.name, field.nullable, _type(field.type)


def _type(kind: pa.DataType) -> tuple[object, ...]:
    if isinstance(kind, pa.BaseExtensionType):
        own = isinstance(kind, pa.ExtensionType)  # its text lacks its parameters
        given = kind.__arrow_ext_serialize__().hex() if own else ""
        return str(kind), given, _type(kind.storage_type)
    fields = [kind.field(place) for place in range(kind.num_fields)]
    names = [field.name for field in fields]
    is_ambiguous = not set("".join(names)).isdisjoint(":,<>")  # the type's text does not quote them
    return str(kind), *(_type(field.type) for field in fields), *([names] if is_ambiguous else [])


def inference_definition(pipeline: Pipeline, stage: str) -> str:
    """Return the digest under which a stage's inferred schema is pinned; 40 hex digits.

    The types of its results follow from its own definition and from those of its upstream stages.
    """
    nodes = with_upstream(pipeline, stage)
    above = [stage_definition(pipeline, each.spec) for each in pipeline if each.name in nodes]
    return digest("inferred schema", *above)


def superseded(pipeline: Pipeline, stages: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each stage whose code a notebook has redefined since."""
    for stage in stages:
        spec = pipeline[stage].spec
        if spec.runs_udf and (warning := spec.superseded(pipeline)):
            yield warning


def pool_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Return the digest of what a stage's workers construct and reserve; 24 hex digits.

    Stages with the same digest share warm workers. The first 8 digits leave out all code but the
    constructor's own; see `constructed_alike`. A function's arguments count too: the function
    may cache the content of a file that an argument names, and must not reuse it once the file has
    changed. With `version=`, which replaces content in keys, what the workers are constructed from
    counts as it is pickled for them: two stages with equal versions may differ in it. Subprocesses
    beside a cluster have an identity of their own.
    """
    udf = spec.udf
    constructed = digest(
        spec.slots,
        *(each.digest for each in arguments(pipeline, spec, "fn_constructor")),
        sorted(spec.bundle.items()),
        sorted(spec.workers._env_vars),
        *(each.digest for each in environment(spec)),
        *(["driver"] if spec.on_driver else []),
        *((key, server.identity()) for key, server in udf.servers.items()),
    )
    code = spec.worker_code(pipeline)
    whole = digest(
        constructed,
        code,
        *([] if udf.stateful else (each.digest for each in arguments(pipeline, spec, "fn"))),
        *([] if udf.version is None else [_pickled(spec)]),
    )
    return digest(constructed, *(constructors(udf.target) or [code]))[:_ALIKE] + whole[:16]


def constructed_alike(one: str, other: str) -> bool:
    """Return whether two pools' instances come from the same constructor and arguments."""
    return one[:_ALIKE] == other[:_ALIKE]


def _pickled(spec: MapBatchesSpec) -> str:
    """Return the digest of what the workers construct, as they get it."""
    udf = spec.udf
    given = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
    return pack((), given, spec.local_files()).content
