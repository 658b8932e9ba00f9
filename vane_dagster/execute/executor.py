"""A run from its plan to its commits: waves of stages, each under one lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from vane_dagster.commit.store import Store
from vane_dagster.declare.stage import MapBatchesSpec
from vane_dagster.execute.admission import pack_waves
from vane_dagster.execute.backend import IO_POOL, Backend, Capacity
from vane_dagster.execute.events import Event, WaveStarted
from vane_dagster.execute.judging import Judge
from vane_dagster.execute.pacing import DEFAULT_BATCH
from vane_dagster.execute.requests import Requests
from vane_dagster.execute.run_state import RunState
from vane_dagster.execute.stream import Stream
from vane_dagster.execute.work import ModelSpec, PoolSpec
from vane_dagster.plan.definition import pool_identity, udf_code
from vane_dagster.plan.plan import RunPlan
from vane_dagster.plan.shipping import pack

_BUDGET_SHARE = 0.4


def execute(
    plan: RunPlan,
    backend: Backend | None,
    store: Store,
    run_id: str,
    emit: Callable[[Event], None],
    cancelled: threading.Event,
    info: Mapping[str, Any],
    judge: Judge,
) -> None:
    """Computes and commits what a plan has left.

    Args:
        plan: What is to be done.
        backend: Where the work is done; None only where nothing has to be computed.
        store: Where parts and manifests go.
        run_id: For leases and manifests.
        emit: Called with each event, also from another thread.
        cancelled: Set to stop at the next occasion; finished parts are kept.
        info: Kept in each manifest.
        judge: Evaluates the stages' checks.

    Raises:
        Cancelled: If it was stopped.
        ComputeError: If the cluster cannot do it.
    """
    state = RunState(plan, store, run_id, emit, info, judge)
    try:
        state.begin()
        if needed := plan.needed():
            assert backend is not None, "there is something to compute, and nothing to do it"
            _compute(plan, backend, store, state, needed, cancelled)
    finally:
        state.close()


def _compute(
    plan: RunPlan,
    backend: Backend,
    store: Store,
    state: RunState,
    needed: tuple[str, ...],
    cancelled: threading.Event,
) -> None:
    capacity = backend.capacity()
    pools = stage_pools(plan, needed, capacity)
    upstream = {stage: plan.pipeline[stage].spec.upstream for stage in needed}
    waves = pack_waves(capacity, needed, upstream, pools)
    for index, stages in enumerate(waves):
        if not state.fragments_left(stages):  # what is above them failed
            continue
        own = {stage: pools[stage] for stage in stages if stage in pools}
        claimed = _merged(own, min(capacity.cpus, state.fragments_left(stages)))
        labels = tuple(p.label for p in claimed.values() if p.identity != IO_POOL)
        state.emit(WaveStarted(index + 1, len(waves), tuple(stages), labels))
        lease = backend.lease(state.run_id, list(claimed.values()), cancelled)
        try:
            requests = Requests(
                plan, store, state.parts, lease.id, state.run_id, state.faults_allowed
            )
            budget = int(capacity.object_bytes * _BUDGET_SHARE)
            Stream(state, tuple(stages), lease, own, requests, budget, cancelled).run()
        finally:
            lease.release()


def _merged(pools: Mapping[str, PoolSpec], readers: int) -> dict[str, PoolSpec]:
    """A wave's pools by identity, the largest of each, and the one for reading and writing."""
    claimed = {IO_POOL: PoolSpec(IO_POOL, "read and write", (1, max(1, readers)), threads=1)}
    for pool in pools.values():
        known = claimed.get(pool.identity)
        if known is None or pool.workers > known.workers:
            claimed[pool.identity] = pool
    return claimed


def stage_pools(plan: RunPlan, stages: tuple[str, ...], capacity: Capacity) -> dict[str, PoolSpec]:
    """The pool of each stage that runs user code.

    Raises:
        CodeIdentityError: If its code cannot be packed.
    """
    specs = [plan.pipeline[stage].spec for stage in stages]
    return {
        spec.name: _pool(plan, spec, capacity) for spec in specs if isinstance(spec, MapBatchesSpec)
    }


def _pool(plan: RunPlan, spec: MapBatchesSpec, capacity: Capacity) -> PoolSpec:
    udf = spec.udf
    payload = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
    bundle = pack(udf_code(plan.pipeline, spec).modules, payload)
    useful = min(capacity.cpus, plan.missing_batches(spec.name, spec.batch_size or DEFAULT_BATCH))
    return PoolSpec(
        identity=pool_identity(plan.pipeline, spec),
        label=udf.name,
        workers=spec.concurrency or (1, max(1, useful)),
        bundle=spec.resources.bundle(),
        slots=2 if udf.is_async else 1,
        model=ModelSpec(udf.name, udf.stateful, udf.style, bundle.digest, bundle.payload),
        archive=bundle.archive,
        env_vars=spec.env_vars,
    )
