"""Dagster asset specs for stages and for the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.records import Asset
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.pipeline.specs import SOURCE, StageSpec
from vane_dagster.planning.definition import stage_definition


def stage_key(pipeline: Pipeline, name: str) -> dg.AssetKey:
    """Return the asset key of a stage, or of the source.

    An asset that writes the source gives the source its key.

    Args:
        pipeline: The pipeline.
        name: The stage's name, or `SOURCE`.
    """
    if name == SOURCE and pipeline.source.asset:
        return dg.AssetKey(pipeline.source.asset.split("/"))
    return dg.AssetKey([pipeline.name, name])


def server_key(server: ModelServer) -> dg.AssetKey:
    """Return the asset key of a server.

    Args:
        server: The server.
    """
    return dg.AssetKey(["servers", server.name])


def check_servers(where: str, servers: Any) -> None:
    """Check that an argument is a list of servers.

    Args:
        where: The function, for the message.
        servers: The argument.

    Raises:
        DefinitionError: If it is not.
    """
    if not isinstance(servers, (list, tuple)):
        raise DefinitionError(f"{where}: servers is {servers!r}; expected a list of servers")
    for server in servers:
        if not isinstance(server, ModelServer):
            raise DefinitionError(
                f"{where}: servers has {server!r}; expected servers, as vd.VLLMServer"
            )


def stage_spec(
    pipeline: Pipeline, spec: StageSpec, servers: Sequence[ModelServer] = ()
) -> dg.AssetSpec:
    """Return a stage's asset spec, with the store as its IO manager.

    Args:
        pipeline: The pipeline.
        spec: The stage's spec.
        servers: The servers that are assets.
    """
    called = set(spec.udf.servers) if spec.runs_udf else set()
    served = [server_key(server) for server in servers if server.key in called]
    return dg.AssetSpec(
        key=stage_key(pipeline, spec.name),
        deps=[*(stage_key(pipeline, name) for name in spec.upstream), *served, *spec.asset.deps],
        code_version=code_version(stage_definition(pipeline, spec)),
        **_common(pipeline, spec.asset, spec.kind, spec.description),
    ).with_io_manager_key("store")


def source_spec(pipeline: Pipeline, options: Asset) -> dg.AssetSpec:
    """Return the asset spec of an observable source.

    Args:
        pipeline: The pipeline.
        options: The source's asset options.
    """
    source = pipeline.source
    return dg.AssetSpec(
        key=stage_key(pipeline, SOURCE),
        deps=list(options.deps),
        **_common(pipeline, options, source.kind, source.describe()),
    )


def code_version(definition: str) -> str:
    """Return a stage's Dagster code version, a prefix of its definition."""
    return definition[:16]


def _common(
    pipeline: Pipeline, options: Asset, kind: str, description: str | None
) -> dict[str, Any]:
    return {
        "description": options.description or description,
        "group_name": options.group_name or pipeline.group_name or pipeline.name,
        "owners": list(options.owners),
        "tags": dict(options.tags),
        "kinds": {kind, *options.kinds},
        "metadata": dict(options.metadata),
        "automation_condition": options.automation_condition,
        "freshness_policy": options.freshness_policy,
        "partitions_def": pipeline.partitions_def,
    }
