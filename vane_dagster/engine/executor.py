"""Execution of a run from its plan to its commits: waves of stages, each under one lease."""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from vane_dagster.compute.admission import largest, plan_waves
from vane_dagster.compute.api import IO_WORKERS, Backend, LeaseTerms
from vane_dagster.compute.waits import Waits
from vane_dagster.compute.work_claims import Claims
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.preflight import Checked, check_all, refuse
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.scheduler import WaveScheduler
from vane_dagster.errors import StoreError
from vane_dagster.events import (
    Event,
    LeaseChanged,
    Noticed,
    WaveStarted,
)
from vane_dagster.fingerprint.bundle import CodeBundle
from vane_dagster.planning.inputs import stages_read
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.definition_texts import keep_texts
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.packages import distributions
from vane_dagster.storage.shipped_files import (
    discard,
    mark_needed,
    missing_contents,
    upload,
)
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import ModelSpec, PoolSpec

_BUDGET_SHARE = 0.4
_ANNOUNCED_BYTES = 1_000_000  # of local files; smaller copies take no time


def execute(
    plan: RunPlan,
    backend: Backend | None,
    store: Store,
    run_id: str,
    emit: Callable[[Event], None],
    cancelled: threading.Event,
    check_runner: CheckRunner,
    priority: int = 0,
    used: dict[str, Counter[str]] | None = None,
) -> None:
    """Compute and commit the remaining work of a plan; see `TokenBudget` for `used`."""
    needed = plan.needed()
    assert backend is not None or not needed, "a plan with missing parts needs a backend"
    backend = backend if needed else None
    claims = Claims() if backend is None or plan.is_sample else backend.claims(run_id)
    checked, pools = None, {}
    try:
        if backend is not None:
            checked = check_all(plan, store, backend)
            refuse(checked.findings)
            packed = checked.code.items()
            pools = {stage: _pool(plan, stage, code, checked, store) for stage, code in packed}
            refuse(edited(plan, needed))
            refuse(_ship_files(plan, needed, store, emit))
        for stage in () if plan.is_sample else needed:
            place = (plan.pipeline.name, stage, plan.definitions[stage])
            spec = plan.pipeline[stage].spec
            keep_texts(store, *place, functools.partial(spec.texts, plan.pipeline))
        state = RunState(plan, store, run_id, emit, check_runner, claims, pools, used)
        try:
            state.begin()
            if checked is not None and backend is not None:
                _compute(backend, state, needed, checked, pools, cancelled, priority)
                state.submit()
                state.fail_damaged()
        finally:
            state.close()
    finally:
        claims.close()


def _compute(
    backend: Backend,
    state: RunState,
    needed: tuple[str, ...],
    checked: Checked,
    pools: Mapping[str, PoolSpec],
    cancelled: threading.Event,
    priority: int,
) -> None:
    plan, capacity = state.plan, checked.capacity
    for stage, error in state.pending.refresh(needed).items():
        for index in state.fragments_left([stage]):
            state.fail(index, stage, error)
    terms = LeaseTerms(cancelled, priority, Waits(state.emit))
    upstream = {s: stages_read(plan.pipeline, plan.pipeline[s].spec) for s in needed}
    servers = largest(checked.servers.values())
    waves = plan_waves(capacity, needed, upstream, pools, servers)
    for index, stages in enumerate(waves):
        left = sum(map(len, state.fragments_left(stages).values()))
        if not left:  # their upstream stages failed
            continue
        own = {stage: pools[stage] for stage in stages if stage in pools}
        readers = 1 if plan.is_sample else min(capacity.cpus, left)
        used = {i: servers[i] for pool in own.values() for i in pool.uses.values()}
        io = PoolSpec(IO_WORKERS, "read and write", (1, max(1, readers)), threads=1)
        claimed = [*largest(own.values()).values(), *used.values()]
        labels = tuple(pool.label for pool in claimed)
        reserved = {"CPU", *(name for pool in own.values() for name in pool.bundle)}
        totals = {} if capacity.adds_nodes else {name: capacity.total(name) for name in reserved}
        of = tuple(stages), labels, totals, capacity.is_cluster
        state.emit(WaveStarted(index + 1, len(waves), *of))
        lease = backend.lease(state.run_id, [io, *claimed], terms)
        state.emit(LeaseChanged(labels, True))
        try:
            places = {False, *(pool.on_driver for pool in own.values())}
            object_bytes = min(capacity.of(place).object_bytes for place in places)
            budget = int(object_bytes * _BUDGET_SHARE)
            wave = (state, tuple(stages), lease, own, budget, cancelled)
            WaveScheduler(*wave, used).run()
        finally:
            lease.release()
            state.emit(LeaseChanged(labels, False))


def edited(plan: RunPlan, stages: Sequence[str]) -> list[str]:
    """Return a finding for each stage with code other than that in its keys.

    Called when the code is packed, so no row is stored under the key of other code.
    """
    messages = []
    for stage in stages:
        spec = plan.pipeline[stage].spec
        components = plan.components.get(stage, ())
        planned = {each for each in components if each.kind == "code"}
        parts = spec.code(plan.pipeline).parts if planned and spec.runs_udf else ()
        if planned != {Component(*part) for part in parts if part[0] == "code"}:
            where = f"stage '{plan.pipeline.name}/{stage}'"
            messages.append(f"{where}: its code was edited while the run started. Run it again")
    return messages


def _ship_files(
    plan: RunPlan, stages: Sequence[str], store: Store, emit: Callable[[Event], None]
) -> list[str]:
    """Put the local files of some stages into the store; return a finding for each edited one."""
    shipped = []
    for stage in stages:
        for file, content in plan.files.get(stage, {}).items():
            mark_needed(store.root, content.digest, content.record)
            sizes = {blob.digest: blob.size for blob in content.blobs}
            missing = missing_contents(store.root, sizes)
            size = sum(sizes[digest] for digest in missing)
            if size >= _ANNOUNCED_BYTES:
                text = f"copying {file} into the store ({size / 1e6:,.1f} MB)"
                emit(Noticed(text, is_problem=False))
            paths = {blob.digest: blob.path for blob in content.blobs}
            try:
                upload(store.root, {digest: paths[digest] for digest in missing})
            except StoreError:
                if file.content() == content:
                    raise
            if file.content() != content:
                discard(store.root, missing)
                where = f"stage '{plan.pipeline.name}/{stage}'"
                shipped.append(
                    f"{where}: {file} was edited while the run started. Run it again when it is "
                    "complete"
                )
    return shipped


def _pool(
    plan: RunPlan, stage: str, bundle: CodeBundle, checked: Checked, store: Store
) -> PoolSpec:
    """The pool of a stage that runs user code."""
    spec = plan.pipeline[stage].spec
    assert spec.runs_udf
    on_driver = spec.on_driver and checked.capacity.is_cluster
    identity, name = plan.pool(spec), plan.pipeline.name
    others = [plan.pipeline[each].spec for each in plan.needed()]
    sharing = [each.name for each in others if each.runs_udf and plan.pool(each) == identity]
    udf, held = spec.udf, checked.capacity.of(on_driver).held(spec.bundle)
    useful = min(held, plan.missing_batches(stage, spec.usual_batch_size))
    workers = spec.concurrency or (1, max(1, useful))
    return PoolSpec(
        identity=identity,
        label=f"{name}/{stage}" if udf.name.endswith("<lambda>") else udf.name,
        workers=(1, 1) if plan.is_sample else workers,  # a warm pool does not grow for a sample
        bundle=spec.bundle,
        slots=spec.slots,
        ranks=spec.ranks,
        model=ModelSpec(
            udf.name,
            udf.stateful,
            bundle.payload,
            bundle.content,
            distributions((*checked.identities[stage].packages, *spec.packages)),
            exact=plan.forced,
            is_kept=stage in plan.kept,
            files=store.root if plan.files.get(stage) else None,
        ),
        archive=bundle.archive,
        env_vars=spec.workers._env_vars,
        unset_vars=tuple(name for name in spec.workers.keyed_env_vars if name not in os.environ),
        lifecycle=spec.workers._lifecycle,
        on_driver=on_driver,
        uses={key: checked.servers[one].identity for key, one in udf.servers.items()},
        stages=tuple(f"{name}/{each}" for each in sharing),
    )
