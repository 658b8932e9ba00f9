"""Digests that identify a stage: its definition (the code version), and its pool identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.identity import call_arguments, constructor_arguments, environment
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import MapBatchesSpec, StageSpec, with_upstream

VERSION = 3
"""Increment if definitions are computed differently, or if parameters change their meaning.

`key_versions` determines which parts of former versions are kept.
"""


def stage_definition(pipeline: Pipeline, spec: StageSpec) -> str:
    """Return the digest of everything about a stage that changes its results; 40 hex digits.

    Batch size, concurrency and resources are not part of it.

    Args:
        pipeline: The pipeline.
        spec: The stage.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    return digest(VERSION, spec.kind, pipeline.id, *spec.definition(pipeline))


def inference_definition(pipeline: Pipeline, stage: str) -> str:
    """Return the digest under which a stage's inferred schema is pinned; 40 hex digits.

    The types of its results follow from its own definition and from those of its upstream stages.

    Args:
        pipeline: The pipeline, with the inferred schemas of the upstream stages.
        stage: The stage.

    Raises:
        CodeIdentityError: If the code or an argument of a stage has no stable identity.
    """
    nodes = with_upstream(pipeline, stage)
    above = [stage_definition(pipeline, each.spec) for each in pipeline if each.name in nodes]
    return digest("inferred schema", *above)


@dataclass(frozen=True)
class PoolIdentity:
    """Which workers a stage may use.

    Attributes:
        digest: Digest of the object that a worker constructs, and of its resources; 16 hex digits.
            Stages with the same digest share warm workers.
        shares_state: See `ConstructorIdentity`.
    """

    digest: str
    shares_state: bool


def pool_identity(pipeline: Pipeline, spec: MapBatchesSpec) -> PoolIdentity:
    """Compute the identity of a stage's workers.

    A function's arguments count too: the function may cache the content of a file that an argument
    names, and must not reuse it once the file has changed. With `version=`, which replaces content
    in keys, what the workers are constructed from counts as it is pickled for them: two stages with
    equal versions may differ in it. Subprocesses beside a cluster have an identity of their own.

    Args:
        pipeline: The pipeline.
        spec: The stage.

    Raises:
        CodeIdentityError: If its code or an argument has no stable identity.
    """
    udf = spec.udf
    bundle = sorted(spec.resources.bundle().items())
    arguments = "" if udf.stateful else digest(*call_arguments(pipeline, spec))
    constructed = spec.constructed(pipeline)
    model = digest(constructed.digest, *constructor_arguments(pipeline, spec))
    variables = [sorted(spec.env_vars), *environment(pipeline, spec)]
    place = ["driver"] if spec.on_driver else []
    given = [] if udf.version is None else [_pickled(spec)]
    identity = digest(model, arguments, bundle, spec.slots, *variables, *place, *given)[:16]
    return PoolIdentity(identity, constructed.shares_state)


def _pickled(spec: MapBatchesSpec) -> str:
    """Return the digest of what the workers construct, as they get it.

    Raises:
        CodeIdentityError: If it cannot be pickled, or a local file cannot be read.
    """
    udf = spec.udf
    given = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
    return hashlib.sha256(pack((), given, spec.local_files()).payload).hexdigest()
