"""What a stage is, as digests: its definition (the code version), and the identity of its pool."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from vane_dagster.declare.asking import AskSpec
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.declare.stage import (
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    StageSpec,
    WriteSpec,
)
from vane_dagster.declare.udf import Udf
from vane_dagster.errors import CodeIdentityError
from vane_dagster.plan.code import CodeIdentity, code_identity
from vane_dagster.plan.constructor import ConstructorIdentity, constructor_identity
from vane_dagster.plan.digest import value_digest
from vane_dagster.plan.inputs import quarantining

_PROMPTS = 1
"""Raised when our providers' answers, or what is made of them, change."""
_FORMAT = 2
"""Raised when the meaning of a stage's parameters changes, so that no old part is taken for new."""


def digest(*values: object) -> str:
    """Digest of texts and numbers; 40 hex digits."""
    state = hashlib.blake2b(digest_size=20)
    for value in values:
        text = str(value).encode()
        state.update(f"{len(text)}:".encode() + text)
    return state.hexdigest()


def stage_definition(pipeline: Pipeline, spec: StageSpec) -> str:
    """Digest of everything about a stage that changes its results; 40 hex digits.

    Batch size, concurrency and resources do not.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    return digest(_FORMAT, spec.kind, pipeline.id, *_parameters(pipeline, spec))


def _parameters(pipeline: Pipeline, spec: StageSpec) -> Sequence[object]:
    if isinstance(spec, ProjectSpec):
        return [*(text for pair in spec.columns for text in pair), "where", spec.where]
    if isinstance(spec, AskSpec):
        asked = spec.recipe.keyed.items()
        return [
            _provider(pipeline, spec).digest,
            spec.model,
            _value(pipeline, spec, "provider_options", spec.options),
            *(part for n, value in asked for part in (n, _value(pipeline, spec, n, value))),
            spec.failures.on_error == "null",
        ]
    if isinstance(spec, MapBatchesSpec):
        udf = spec.udf
        return [
            model_identity(pipeline, spec),
            _value(pipeline, spec, "fn_args", udf.args),
            _value(pipeline, spec, "fn_kwargs", udf.kwargs),
            spec.schema.to_string(show_schema_metadata=False),
            spec.columns,
            spec.batch_format,
            spec.cardinality,
            spec.children,
            spec.failures.on_error == "null",  # the other two differ in what they do with errors
        ]
    if isinstance(spec, JoinSpec):
        nulls = ["null lists"] if any(quarantining(pipeline, spec).values()) else []
        return [spec.how, spec.children, sorted(spec.columns.items()), *nulls]
    assert isinstance(spec, WriteSpec)
    return [
        spec.url,
        spec.compression,
        spec.format,
        spec.target_bytes,
        spec.partition_column,
    ]


def udf_code(pipeline: Pipeline, spec: MapBatchesSpec) -> CodeIdentity:
    """Identity of a stage's function or class.

    Raises:
        CodeIdentityError: If it cannot be found.
    """
    if isinstance(spec, AskSpec):
        return _provider(pipeline, spec)
    try:
        return code_identity(spec.udf.target, version=spec.udf.version)
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error


def _provider(pipeline: Pipeline, spec: AskSpec) -> CodeIdentity:
    """Identity of a stage's provider, and of the user's classes that its recipe needs.

    These are part of it, since a worker that has imported one never meets it again once it was
    edited. Our providers count by their names and a number, so that a new version of this package
    computes nothing again unless it answers in another way.
    """
    own = spec.provider.__module__.startswith(f"{__package__.partition('.')[0]}.")
    name = f"{spec.provider.__module__}.{spec.provider.__qualname__}"
    try:
        classes = [*([] if own else [spec.provider]), *spec.recipe.classes]
        found = [code_identity(kind) for kind in classes]
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error
    modules = dict.fromkeys(module for one in found for module in one.modules)
    packages = dict.fromkeys(package for one in found for package in one.packages)
    code = digest(name, _PROMPTS, *(one.digest for one in found))
    return CodeIdentity(code, tuple(modules), tuple(packages))


def model_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Digest of what a worker constructs: the code and the constructor's arguments."""
    udf: Udf = spec.udf
    return digest(
        udf_code(pipeline, spec).digest,
        _value(pipeline, spec, "fn_constructor_args", udf.constructor_args),
        _value(pipeline, spec, "fn_constructor_kwargs", udf.constructor_kwargs),
    )


def _value(pipeline: Pipeline, spec: MapBatchesSpec, name: str, value: Any) -> str:
    try:
        return value_digest(value)
    except CodeIdentityError as error:
        raise CodeIdentityError(
            f"stage '{pipeline.name}/{spec.name}', argument {name}: {error}"
        ) from error


def constructed_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> ConstructorIdentity:
    """Identity of the code that a stage's workers have run before they are called.

    Raises:
        CodeIdentityError: If it has no stable identity.
    """
    if isinstance(spec, AskSpec):
        return ConstructorIdentity(_provider(pipeline, spec).digest, False)
    udf = spec.udf
    given = (udf.constructor_args, dict(udf.constructor_kwargs)) if udf.stateful else ()
    try:
        return constructor_identity(udf.target, given, version=udf.version)
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error


def pool_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Digest of what a worker constructs, and where: stages that have the same share warm workers.

    A function's arguments count too: it may keep what it loaded from a file that one of them names,
    and must not meet it again once the file has changed. 16 hex digits.
    """
    udf = spec.udf
    bundle = sorted(spec.resources.bundle().items())
    in_flight = spec.max_concurrency if udf.is_async else 0
    arguments = "" if udf.stateful else _arguments(pipeline, spec)
    model = digest(
        constructed_identity(pipeline, spec).digest,
        _value(pipeline, spec, "fn_constructor_args", udf.constructor_args),
        _value(pipeline, spec, "fn_constructor_kwargs", udf.constructor_kwargs),
    )
    return digest(model, arguments, bundle, in_flight, sorted(spec.env_vars))[:16]


def _arguments(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    return digest(
        _value(pipeline, spec, "fn_args", spec.udf.args),
        _value(pipeline, spec, "fn_kwargs", spec.udf.kwargs),
    )
