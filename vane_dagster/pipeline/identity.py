"""Identities of a stage's code and arguments, as they count in fragment keys.

Each function takes a stage that runs user code. `MapBatchesSpec.definition` combines the results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.storage.manifest import Component

if TYPE_CHECKING:
    from vane_dagster.pipeline.map_spec import MapBatchesSpec
    from vane_dagster.pipeline.pipeline import Pipeline


def component(kind: str, name: str, *values: object) -> Component:
    """Return a component of a definition."""
    return Component(kind, name, digest(kind, name, *values))


def value_identity(pipeline: Pipeline, spec: MapBatchesSpec, name: str, value: Any) -> str:
    """Return the digest of a stage's argument."""
    try:
        return value_digest(value, name, local_files(pipeline, spec))
    except CodeIdentityError as error:
        where = "" if str(error).startswith(name) else f"{name}: "
        raise CodeIdentityError(
            f"stage '{pipeline.name}/{spec.name}', argument {where}{error}"
        ) from error


def local_files(pipeline: Pipeline, spec: MapBatchesSpec) -> LocalFiles:
    """Return the reader of the local files that arguments name.

    It excludes the pipeline's own data and its code.
    """
    targets = [stage.spec.target.url for stage in pipeline if stage.spec.publishes]
    data = (*pipeline.source.urls, *targets)
    return LocalFiles(data, spec.code_files, read=spec.udf.version is None)


def environment(spec: MapBatchesSpec) -> list[Component]:
    """Return the keyed environment variables. Their values are stored nowhere."""
    values = {name: os.environ.get(name) for name in sorted(spec.workers.keyed_env_vars)}
    return [
        component("environment variable", name, value is None, value)
        for name, value in values.items()
    ]


def constructor_arguments(pipeline: Pipeline, spec: MapBatchesSpec) -> list[Component]:
    """Return the positional and keyword arguments of the constructor."""
    given = spec.udf.constructor_args, spec.udf.constructor_kwargs
    return _arguments(pipeline, spec, "fn_constructor", *given)


def call_arguments(pipeline: Pipeline, spec: MapBatchesSpec) -> list[Component]:
    """Return the arguments that a call takes after its batch."""
    return _arguments(pipeline, spec, "fn", (), spec.udf.kwargs)


def _arguments(
    pipeline: Pipeline,
    spec: MapBatchesSpec,
    prefix: str,
    placed: Sequence[Any],
    named: Mapping[str, Any],
) -> list[Component]:
    """Return a component for the positional arguments, and one for each keyword argument."""
    values = {f"{prefix}_args": placed} | {
        f"{prefix}_kwargs[{name!r}]": value for name, value in named.items()
    }
    return [
        component("argument", name, value_identity(pipeline, spec, name, value))
        for name, value in values.items()
    ]
