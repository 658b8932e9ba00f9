"""Preflight validation: all problems of a run at once, before anything is leased or loaded."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vane_dagster.compute.admission import unsatisfiable
from vane_dagster.compute.api import Backend, Capacity
from vane_dagster.engine.server_pools import declared_servers, server_pool
from vane_dagster.errors import (
    PreflightError,
    StoreError,
    VaneError,
)
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.fingerprint.code import CodeIdentity
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import IO_THREADS, TEMPORARY, StoragePath
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import PoolSpec

_BESIDE_CLUSTER = (
    ". GPUs that this machine gives to the Ray cluster do not count, nor do the cluster's custom "
    "resources: see `subprocesses` of RayCompute"
)


@dataclass(frozen=True)
class Checked:
    """Results of preflight validation, including objects that the run reuses.

    Attributes:
        capacity: Resources of the cluster.
        code: The packed code of each stage that runs user code.
        identities: The identity of this code.
        servers: The pool of each server that the stages use.
        findings: All problems that prevent the run.
    """

    capacity: Capacity
    code: Mapping[str, CodeBundle]
    identities: Mapping[str, CodeIdentity]
    servers: Mapping[ModelServer, PoolSpec]
    findings: Sequence[str]


def check_all(plan: RunPlan, store: Store, backend: Backend) -> Checked:
    """Collect all problems that prevent computing what a plan lacks.

    Leases and loads nothing, and leaves no files behind.
    """
    pipeline, stages = plan.pipeline, plan.needed()
    with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
        written = [threads.submit(_not_writable, *to) for to in _written(plan, stages, store)]
        code, identities, findings = packed(pipeline, stages)
        capacity = backend.capacity()
        servers, unplaced = placed(pipeline, stages, capacity, store)
        findings += unplaced
        for asked in written:
            findings += asked.result()
    return Checked(capacity, code, identities, servers, findings)


def placed(
    pipeline: Pipeline, stages: Sequence[str], capacity: Capacity, store: Store
) -> tuple[dict[ModelServer, PoolSpec], list[str]]:
    """The pools of servers, and the stages and servers that cannot run where they belong."""
    pools: dict[ModelServer, PoolSpec] = {}
    findings = [
        finding
        for find in (misplaced, too_large, missing_keys)
        for finding in find(pipeline, stages, capacity)
    ]
    for server in declared_servers(pipeline, stages):
        try:
            pools[server] = pool = server_pool(server, capacity, store.root)
        except VaneError as error:
            findings.append(str(error))  # it names the server
            continue
        needs = (pool.label, pool.workers, pool.bundle)
        if capacity.nodes and (message := unsatisfiable(capacity, *needs, is_server=True)):
            findings.append(message)
    return pools, findings


def refuse(findings: Sequence[str]) -> None:
    """Raise all findings as one error, if there are any."""
    messages = tuple(dict.fromkeys(findings))
    if not messages:
        return
    if len(messages) == 1:
        raise PreflightError(messages[0], messages)
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(messages, 1))
    raise PreflightError(
        f"{len(messages)} problems prevent this run; nothing was computed:\n{listed}",
        messages,
    )


def packed(
    pipeline: Pipeline, stages: Sequence[str]
) -> tuple[dict[str, CodeBundle], dict[str, CodeIdentity], list[str]]:
    """Pack the code of each stage that runs user code."""
    code: dict[str, CodeBundle] = {}
    identities: dict[str, CodeIdentity] = {}
    findings = []
    for spec in _with_code(pipeline, stages):
        udf = spec.udf
        payload = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
        try:
            identities[spec.name] = identity = spec.code(pipeline)
            code[spec.name] = pack(identity.modules, payload, spec.local_files())
        except VaneError as error:
            findings.append(f"stage '{pipeline.name}/{spec.name}': {udf.name}: {error}")
    return code, identities, findings


def _with_code(pipeline: Pipeline, stages: Sequence[str]) -> Iterator[MapBatchesSpec]:
    """Yield the stages that run user code."""
    specs = (pipeline[stage].spec for stage in stages)
    return (spec for spec in specs if spec.runs_udf)


def misplaced(pipeline: Pipeline, stages: Sequence[str], capacity: Capacity) -> Iterator[str]:
    """Find the stages that need a Ray cluster in a run without one."""
    for spec in _with_code(pipeline, stages) if not capacity.is_cluster else ():
        if (declared := spec.workers.execution_backend) is None or spec.on_driver:
            continue
        yield (
            f"stage '{pipeline.name}/{spec.name}': declares execution_backend={declared!r}, but "
            "the compute resource of this run is LocalCompute, which has no Ray cluster. Write "
            f'execution_backend="{declared.replace("ray", "subprocess")}", or leave it '
            "out to compute where the resource says; or give the run a RayCompute"
        )


def missing_keys(pipeline: Pipeline, stages: Sequence[str], capacity: Capacity) -> Iterator[str]:
    """Find the stages whose provider lacks its key in the environment that its workers get.

    Nothing is known of the workers on a cluster if the stage sends them no key.
    """
    for spec in _with_code(pipeline, stages):
        if (variable := spec.key_variable) is None:
            continue
        is_known = not capacity.is_cluster or spec.on_driver or variable in spec.workers._env_vars
        is_known |= spec.in_batches  # the driver needs it too
        if is_known and not os.environ.get(variable):
            yield (
                f"stage '{pipeline.name}/{spec.name}': {spec.udf.name} needs a key in the "
                f"environment variable {variable!r}, which its workers do not have. Set it where "
                "the run is launched. An endpoint that needs no key has the option api_key_env=None"
            )


def too_large(pipeline: Pipeline, stages: Sequence[str], capacity: Capacity) -> Iterator[str]:
    """Find the stages whose workers do not fit where they belong even alone."""
    for spec in _with_code(pipeline, stages):
        place, needs = capacity.of(spec.on_driver), (spec.udf.name, spec.concurrency or (1, 1))
        if message := unsatisfiable(place, *needs, spec.bundle, ranks=spec.ranks):
            fix = _BESIDE_CLUSTER if place is not capacity else ""
            yield f"stage '{pipeline.name}/{spec.name}': {message}{fix}"


def _written(plan: RunPlan, stages: Sequence[str], store: Store) -> list[tuple[str, StoragePath]]:
    """The folders that a run writes to: the store's, and one target of each `write` stage."""
    pipeline = plan.pipeline
    folders = [(f"store of pipeline {pipeline.name!r}", store.root.child(pipeline.name))]
    for stage in stages:
        key = next(each.key for each in plan.partitions if each.stages[stage].missing)
        if publisher := pipeline[stage].spec.publisher(key):
            label = f"target of stage '{pipeline.name}/{stage}'"
            folders.append((label, publisher.staging))
    return folders


def _not_writable(location: str, write_target: StoragePath) -> list[str]:
    """Write and delete an empty file, with a name that all our listings ignore.

    On the local disk in the first folder above that exists, because a refused run creates none.
    """
    name = f"{TEMPORARY}{secrets.token_hex(6)}"
    try:
        if write_target.is_local:
            folder = write_target.path
            while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
                folder = os.path.dirname(folder)
            os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.unlink(os.path.join(folder, name))
        else:
            write_target.write(name, b"")
            write_target.delete([name])
    except OSError as error:
        fix = "Check the path, its permissions, and that there is room"
        return [f"{location}: {write_target.url!r} cannot be written: {error}. {fix}"]
    except StoreError as error:
        return [f"{location}: {error}"]
    return []
