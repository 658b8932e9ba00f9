"""Stage definitions as computed by key version 2. Frozen: stores hold parts under these keys.

Version 2 is sound for definitions made of plain values alone: stages that run SQL, join or write,
stages that call a built-in provider, and functions and classes with `version=`. It missed some
changes of code, objects and local files, so version 3 computes new keys for those.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from vane_dagster.fingerprint.hashing import combine, digest
from vane_dagster.pipeline.contracts import CALL, BatchCall
from vane_dagster.pipeline.model_stages import ModelStageSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import (
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    StageSpec,
    WriteSpec,
)
from vane_dagster.providers.registry import built_in_name

VERSION = 2

_PROVIDERS = {
    "openai": "vane_dagster.providers.openai.OpenAIProvider",
    "sentence_transformers": (
        "vane_dagster.providers.sentence_transformers.SentenceTransformersProvider"
    ),
    "transformers": "vane_dagster.providers.transformers.TransformersProvider",
    "transformers_classifier": (
        "vane_dagster.providers.transformers_classifier.TransformersClassifier"
    ),
    "vllm": "vane_dagster.providers.vllm.VllmProvider",
    "vllm_embedding": "vane_dagster.providers.vllm_embedding.VllmEmbedder",
}
"""Names of the built-in providers in this version; later ones have no parts of this version."""
_PROMPTS = 1


class _NotPlainError(Exception):
    """A value that version 2 may have keyed incompletely."""


def accepts(pipeline: Pipeline, spec: StageSpec) -> bool:
    """Return whether this version's key of a stage covered everything that changes its rows.

    Args:
        pipeline: The pipeline.
        spec: The stage.
    """
    if getattr(spec, "keyed_env_vars", ()):
        return False
    try:
        stage_definition(pipeline, spec)
    except _NotPlainError:
        return False
    return True


def stage_definition(pipeline: Pipeline, spec: StageSpec) -> str:
    """Return a stage's definition, provided that it consists of plain values.

    Args:
        pipeline: The pipeline.
        spec: The stage.

    Raises:
        _NotPlainError: If it does not.
    """
    return digest(VERSION, spec.kind, pipeline.id, *_parameters(spec, pipeline))


@functools.singledispatch
def _parameters(spec: StageSpec, pipeline: Pipeline) -> list[object]:
    raise _NotPlainError(spec.name)


@_parameters.register
def _projected(spec: ProjectSpec, pipeline: Pipeline) -> list[object]:
    return [*(text for pair in spec.columns for text in pair), "where", spec.where]


@_parameters.register
def _joined(spec: JoinSpec, pipeline: Pipeline) -> list[object]:
    if spec.children == "list":
        # A list has its stage's name, which was keyed only as part of `columns`.
        lists = [side.node for side in spec.shape(pipeline).sides if side.label is not None]
        if not set(lists) <= set(spec.columns):
            raise _NotPlainError(spec.name)
    nulls = ["null lists"] if any(spec.quarantining(pipeline).values()) else []
    return [spec.how, spec.children, sorted(spec.columns.items()), *nulls]


@_parameters.register
def _written(spec: WriteSpec, pipeline: Pipeline) -> list[object]:
    made = spec.target
    return [made.url, made.compression, made.format, made.target_bytes, made.partition_column]


@_parameters.register
def _asked(spec: ModelStageSpec, pipeline: Pipeline) -> list[object]:
    name = _PROVIDERS.get(built_in_name(spec.provider) or "")
    task = spec.model_task
    if name is None or task.classes or task.functions or _names_a_path(spec.model):
        raise _NotPlainError(spec.name)
    given = [part for n, v in task.keyed(spec.include).items() for part in (n, _keyed(v))]
    options = _value(_Unordered(spec.options))
    nulls = spec.failures.on_error == "null"
    return [digest(name, _PROMPTS), spec.model, options, *given, nulls]


def _keyed(value: Any) -> str:
    """Return the digest of a model task's value; the order of a mapping's keys does not count."""
    return _value(_Unordered(value) if isinstance(value, Mapping) else value, paths=False)


@_parameters.register
def _mapped(spec: MapBatchesSpec, pipeline: Pipeline) -> list[object]:
    udf = spec.udf
    target: Any = udf.target
    while isinstance(target, (functools.partial, staticmethod, classmethod)):
        target = target.func if isinstance(target, functools.partial) else target.__func__
    call = target.__call__ if udf.stateful else target
    module = getattr(target, "__module__", None) or "__main__"
    is_new = spec.include or not isinstance(spec.contract, BatchCall) or udf.method != CALL
    in_script = module in ("__main__", "__mp_main__")
    if udf.version is None or target is not udf.target or in_script or is_new:
        raise _NotPlainError(spec.name)
    model = digest(
        combine("version", module, target.__qualname__, udf.version),
        _value(udf.constructor_args),
        _value(_named(target, udf.constructor_kwargs)),
    )
    return [
        model,
        _value(udf.args),
        _value(_named(call, udf.kwargs)),
        spec.schema.to_string(show_schema_metadata=False),
        spec.columns,
        spec.contract.keyed,
        spec.cardinality,
        spec.children,
        spec.failures.on_error == "null",
    ]


class _Unordered(dict[str, Any]):
    """A mapping with an order that changes nothing."""


def _named(call: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keyword arguments; their order counts only if the callable takes ``**kwargs``."""
    try:
        takes = inspect.signature(call, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return given
    return given if any(each.kind is each.VAR_KEYWORD for each in takes) else _Unordered(given)


def _value(value: Any, paths: bool = True) -> str:
    return combine("value", _plain(value, paths), combine("reach"))


def _plain(value: Any, paths: bool) -> str:
    """Return the digest of a plain value; with `paths`, of one that names no local file or folder.

    Version 2 sorted the keys of dictionaries, so it missed their order. Dictionaries of several
    keys are therefore rejected.

    Raises:
        _NotPlainError: If the value is not plain.
    """
    kind = type(value)
    if value is None:
        return combine("None")
    if kind is bool:
        return combine("bool", repr(value))
    if kind is str:
        # Without `paths`, a bare word is not a path: at worst its content was in the key.
        if _names_a_path(value) and (paths or os.sep in value or os.path.isfile(value)):
            raise _NotPlainError(value)
        return combine("str", value)
    if kind is int:
        return combine("int", hex(value))
    if kind is float:
        return combine("float", float.hex(value))
    if kind in (list, tuple):
        return combine(kind.__name__, *(_plain(each, paths) for each in value))
    if kind is _Unordered or (kind is dict and len(value) < 2):
        pairs = [(_plain(key, paths), _plain(each, paths)) for key, each in value.items()]
        return combine("dict", *(part for pair in sorted(pairs) for part in pair))
    raise _NotPlainError(kind.__qualname__)


def _names_a_path(text: str) -> bool:
    return os.path.exists(os.path.expanduser(text.removeprefix("file://")))
