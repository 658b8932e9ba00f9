"""What a stage is, as digests: its definition (the code version), and the identity of its pool."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.constructor import ConstructorIdentity, constructor_identity
from vane_dagster.fingerprint.digest import value_digest
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.objects import unwrapped
from vane_dagster.pipeline.model_stages import AskSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import (
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    StageSpec,
    WriteSpec,
)
from vane_dagster.pipeline.udf import Udf
from vane_dagster.planning.inputs import quarantining
from vane_dagster.providers.registry import built_in_name
from vane_dagster.types.sql import tokens

_PROMPTS = 1
"""Raised when our providers' answers, or what is made of them, change."""
VERSION = 3
"""Raised when definitions are computed in another way, or parameters come to mean something else.

`versions` says which parts of former versions are kept.
"""


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
    return digest(VERSION, spec.kind, pipeline.id, *_parameters(pipeline, spec))


def _parameters(pipeline: Pipeline, spec: StageSpec) -> Sequence[object]:
    if isinstance(spec, ProjectSpec):
        columns = [part for name, text in spec.columns for part in (name, tokens(text))]
        return [*columns, "where", None if spec.where is None else tokens(spec.where)]
    if isinstance(spec, AskSpec):
        asked = spec.recipe.keyed.items()
        return [
            _provider(pipeline, spec).digest,
            _value(pipeline, spec, "model", spec.model),
            _value(pipeline, spec, "provider_options", _in_any_order(spec.provider, spec.options)),
            *(part for n, value in asked for part in (n, _value(pipeline, spec, n, value))),
            spec.failures.on_error == "null",
            *_environment(pipeline, spec),
        ]
    if isinstance(spec, MapBatchesSpec):
        return [
            model_identity(pipeline, spec),
            *_call_arguments(pipeline, spec),
            spec.schema.to_string(show_schema_metadata=False),
            spec.columns,
            spec.batch_format,
            spec.cardinality,
            spec.children,
            spec.failures.on_error == "null",  # the other two differ in what they do with errors
            *_environment(pipeline, spec),
        ]
    if isinstance(spec, JoinSpec):
        nulls = ["null lists"] if any(quarantining(pipeline, spec).values()) else []
        # Stages above count by their place, so that one can be renamed; a list has the name of its.
        chosen = [spec.columns.get(node) for node in spec.upstream]
        lists = spec.upstream if spec.children == "list" else ()
        return [spec.how, spec.children, chosen, lists, *nulls]
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
        target, version = spec.udf.target, spec.udf.version
        return code_identity(target, version=version, files=_files(pipeline, spec))
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error


def code_digest(spec: StageSpec) -> str:
    """Digest of the user's code of a stage alone, without the files that its values name.

    A run may change those itself, as where an argument names a folder that it writes to.
    """
    if not isinstance(spec, MapBatchesSpec):
        return ""
    unread = LocalFiles(read=False)
    if not isinstance(spec, AskSpec):
        return code_identity(spec.udf.target, version=spec.udf.version, files=unread).digest
    own = [] if built_in_name(spec.provider) else [spec.provider]
    return digest(*(code_identity(k, files=unread).digest for k in (*own, *spec.recipe.classes)))


def _provider(pipeline: Pipeline, spec: AskSpec) -> CodeIdentity:
    """Identity of a stage's provider, and of the user's classes that its recipe needs.

    These are part of it, since a worker that has imported one never meets it again once it was
    edited. Our providers count by frozen names and a number, so that a new version of this package
    computes nothing again unless it answers in another way.
    """
    name = built_in_name(spec.provider)
    try:
        classes = [*([] if name else [spec.provider]), *spec.recipe.classes]
        found = [code_identity(kind, files=_files(pipeline, spec)) for kind in classes]
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error
    modules = dict.fromkeys(module for one in found for module in one.modules)
    packages = dict.fromkeys(package for one in found for package in one.packages)
    code = digest("provider", name, _PROMPTS, *(one.digest for one in found))
    return CodeIdentity(code, tuple(modules), tuple(packages))


def model_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Digest of what a worker constructs: the code and the constructor's arguments."""
    return digest(udf_code(pipeline, spec).digest, *_constructor_arguments(pipeline, spec))


def _value(pipeline: Pipeline, spec: MapBatchesSpec, name: str, value: Any) -> str:
    try:
        return value_digest(value, name, _files(pipeline, spec))
    except CodeIdentityError as error:
        where = "" if str(error).startswith(name) else f"{name}: "
        raise CodeIdentityError(
            f"stage '{pipeline.name}/{spec.name}', argument {where}{error}"
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
        files = _files(pipeline, spec)
        return constructor_identity(udf.target, given, version=udf.version, files=files)
    except CodeIdentityError as error:
        raise CodeIdentityError(f"stage '{pipeline.name}/{spec.name}': {error}") from error


def _in_any_order(call: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keyword arguments sorted, unless what is called can see in which order they are given."""
    try:
        parameters = inspect.signature(call, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # builtins and extension types may not tell theirs
        return named
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return named
    return dict(sorted(named.items()))


def _files(pipeline: Pipeline, spec: MapBatchesSpec) -> LocalFiles:
    """Reads what arguments name, apart from the pipeline's own data and its code."""
    targets = [stage.spec.url for stage in pipeline if isinstance(stage.spec, WriteSpec)]
    module = sys.modules.get(getattr(unwrapped(spec.udf.target), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    code = [file] if file and not isinstance(spec, AskSpec) else []
    return LocalFiles((*pipeline.source.urls, *targets), code, read=spec.udf.version is None)


def _environment(pipeline: Pipeline, spec: MapBatchesSpec) -> list[str]:
    """Digests of the environment variables that are keyed; their values stand nowhere."""
    found = []
    for name in sorted(spec.keyed_env_vars):
        try:
            found.append(digest(name, value_digest(os.environ.get(name), name)))
        except CodeIdentityError:  # whose message has the value
            raise CodeIdentityError(
                f"stage '{pipeline.name}/{spec.name}': the value of the environment variable "
                f"{name} names a file or folder that cannot be read or is too large to be part of "
                f"the identity. Name it in env_vars instead of keyed_env_vars."
            ) from None
    return found


def pool_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Digest of what a worker constructs, and where: stages that have the same share warm workers.

    A function's arguments count too: it may keep what it loaded from a file that one of them names,
    and must not meet it again once the file has changed. 16 hex digits.
    """
    udf = spec.udf
    bundle = sorted(spec.resources.bundle().items())
    in_flight = spec.max_concurrency if udf.is_async else 1
    arguments = "" if udf.stateful else digest(*_call_arguments(pipeline, spec))
    constructed = constructed_identity(pipeline, spec).digest
    model = digest(constructed, *_constructor_arguments(pipeline, spec))
    environment = [sorted(spec.env_vars), *_environment(pipeline, spec)]
    return digest(model, arguments, bundle, in_flight, *environment)[:16]


def _constructor_arguments(pipeline: Pipeline, spec: MapBatchesSpec) -> list[str]:
    udf: Udf = spec.udf
    named = _in_any_order(udf.target, udf.constructor_kwargs)
    return [
        _value(pipeline, spec, "fn_constructor_args", udf.constructor_args),
        _value(pipeline, spec, "fn_constructor_kwargs", named),
    ]


def _call_arguments(pipeline: Pipeline, spec: MapBatchesSpec) -> list[str]:
    udf = spec.udf
    target: Any = udf.target
    call = target.__call__ if udf.stateful else target
    return [
        _value(pipeline, spec, "fn_args", udf.args),
        _value(pipeline, spec, "fn_kwargs", _in_any_order(call, udf.kwargs)),
    ]
