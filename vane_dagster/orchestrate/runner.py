"""A run: plan, execute on a thread, and hand its events to a listener on the caller's."""

from __future__ import annotations

import importlib.metadata
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from vane_dagster.commit.store import Store
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.execute.events import Event, Failed, Planned
from vane_dagster.execute.executor import execute
from vane_dagster.execute.judging import Judge
from vane_dagster.orchestrate.resources import Compute
from vane_dagster.plan.plan import RunPlan
from vane_dagster.plan.planner import plan_run

_STOP_SECONDS = 30.0
_CHECK_SECONDS = 2.0


def run_pipeline(
    pipeline: Pipeline,
    selected: Collection[str],
    partitions: Sequence[str | None],
    compute: Compute,
    store: Store,
    run_id: str,
    listen: Callable[[Event], None],
    log: Callable[[str], None],
    check: Callable[[], None],
    judge: Judge,
    force: bool = False,
    retry_quarantined: bool = False,
) -> RunPlan:
    """Brings stages of some partitions up to date.

    Args:
        pipeline: The pipeline.
        selected: Names of the stages.
        partitions: Keys; ``[None]`` for an unpartitioned pipeline.
        compute: Where the work is done.
        store: Where results are kept.
        run_id: Names the run in leases and manifests.
        listen: Called with each event, on this thread.
        log: Takes a line of text.
        check: Called every few seconds on this thread; what it raises stops the run.
        judge: Evaluates the stages' checks.
        force: Computes everything again.
        retry_quarantined: Computes the rows again that could not be computed.

    Returns:
        The plan that was carried out; what came of it went to `listen`.

    Raises:
        VaneError: If nothing could be planned, or the cluster cannot do it.
    """
    plan = plan_run(pipeline, selected, partitions, store, force, run_id, retry_quarantined)
    listen(Planned(plan))
    for key, error in plan.failed.items():
        first, *others = plan.selected
        listen(Failed(first, key, error))
        for stage in others:
            listen(Failed(stage, key, error, because=first))
    backend = compute.backend(log) if plan.needed() else None
    try:
        _on_a_thread(
            lambda emit, cancelled: execute(
                plan, backend, store, run_id, emit, cancelled, versions(), judge
            ),
            listen,
            check,
        )
    finally:
        if backend is not None:
            compute.close(backend)
    return plan


def _on_a_thread(
    work: Callable[[Callable[[Event], None], threading.Event], None],
    listen: Callable[[Event], None],
    check: Callable[[], None],
) -> None:
    """Runs `work` on a thread and hands its events over; a slow listener stalls nothing.

    An interruption of this thread, or what `check` raises, cancels the work and waits for it.
    """
    events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
    cancelled = threading.Event()
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work(events.put, cancelled)
        except BaseException as error:
            raised.append(error)
        finally:
            events.put(None)

    thread = threading.Thread(target=body, name="vane-execute", daemon=True)
    thread.start()
    try:
        for event in _events(events, check):
            listen(event)
    except BaseException:
        cancelled.set()
        thread.join(_STOP_SECONDS)
        raise
    thread.join()
    if raised:
        raise raised[0]


def _events(events: queue.SimpleQueue[Event | None], check: Callable[[], None]) -> Iterator[Event]:
    """The events up to the last one, with a check now and then."""
    checked = time.monotonic()
    while True:
        if time.monotonic() - checked > _CHECK_SECONDS:
            check()
            checked = time.monotonic()
        try:
            event = events.get(timeout=0.5)  # so that a signal is seen while nothing happens
        except queue.Empty:
            continue
        if event is None:
            return
        yield event


def versions() -> Mapping[str, Any]:
    """Versions that a manifest records."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("vane-dagster", "ray", "pyarrow", "duckdb"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": found}
