"""What a stage is, as digests: its definition (the code version), and the identity of its pool."""

from __future__ import annotations

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.identity import call_arguments, constructor_arguments, environment
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import MapBatchesSpec, StageSpec

VERSION = 3
"""Raised when definitions are computed in another way, or parameters come to mean something else.

`versions` says which parts of former versions are kept.
"""


def stage_definition(pipeline: Pipeline, spec: StageSpec) -> str:
    """Digest of everything about a stage that changes its results; 40 hex digits.

    Batch size, concurrency and resources do not.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    return digest(VERSION, spec.kind, pipeline.id, *spec.definition(pipeline))


def pool_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> str:
    """Digest of what a worker constructs, and where: stages that have the same share warm workers.

    A function's arguments count too: it may keep what it loaded from a file that one of them names,
    and must not meet it again once the file has changed. 16 hex digits.
    """
    udf = spec.udf
    bundle = sorted(spec.resources.bundle().items())
    in_flight = spec.max_concurrency if udf.is_async else 1
    arguments = "" if udf.stateful else digest(*call_arguments(pipeline, spec))
    model = digest(spec.constructed(pipeline).digest, *constructor_arguments(pipeline, spec))
    variables = [sorted(spec.env_vars), *environment(pipeline, spec)]
    return digest(model, arguments, bundle, in_flight, *variables)[:16]
