"""Identities of a stage's code and arguments, as they count in fragment keys.

Each function takes a stage that runs user code. `MapBatchesSpec.definition` combines the results.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.local_file import LocalFile, found_in
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


def arguments(
    pipeline: Pipeline, spec: MapBatchesSpec, of: Literal["fn", "fn_constructor"]
) -> list[Component]:
    """Return a component for the positional arguments, and one for each keyword argument.

    Those of a call come after its batch. Names, which are not in digests, include local files.
    """
    udf = spec.udf
    placed, named = udf.constructor_args, udf.constructor_kwargs
    if of == "fn":
        placed, named = (), udf.kwargs
    values = {f"{of}_args": placed, **{f"{of}_kwargs[{n!r}]": value for n, value in named.items()}}
    made = []
    for name, value in values.items():
        files = ", ".join(file.name for file in found_in(value, LocalFile))
        each = component("argument", name, value_identity(pipeline, spec, name, value))
        made.append(each._replace(name=f"{name} ({files})") if files else each)
    return made
