"""Plans a run, executes it on a thread, and delivers its events on the caller's thread."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Union

from vane_dagster._texts import count, minute
from vane_dagster.checks.context import RecomputedRows
from vane_dagster.compute.api import Backend
from vane_dagster.compute.client import make_room
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.executor import execute
from vane_dagster.engine.inference import SchemaInference
from vane_dagster.engine.recompute import delete_parts, read_sample
from vane_dagster.engine.stage_batches import stage_batches
from vane_dagster.errors import ComputeError, VaneError
from vane_dagster.events import (
    Connected,
    Event,
    Failed,
    Noticed,
    Printed,
    Recomputed,
    RunPlanned,
    Submitted,
    WorkerReady,
    about_plan,
)
from vane_dagster.orchestration.read_ahead import with_manifests
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.orchestration.signals import signals_deferred
from vane_dagster.orchestration.telemetry import RunTelemetry
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.forecast import CountedRows, check_limits
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.planning.sample_plan import SamplePlan
from vane_dagster.storage.store import Store

_STOP_SECONDS = 20.0
_TICK_SECONDS = 1.0
BATCH_POLL_SECONDS = 60.0
"""Seconds between looks at batches in a run that waits for them."""
UNANSWERED_SECONDS = 3600.0
"""How long a run goes on to wait for batches while looks at them fail."""


@dataclass(frozen=True)
class RunContext:
    """What the plans of a run are executed with, besides the plans and the compute resource.

    Attributes:
        store: The store.
        run_id: Id of the run.
        check_runner: Evaluates the checks.
        listen: Receives the events, on the thread that executes a plan.
        tick: Called every second, between events; an exception stops the run.
        priority: The run's priority when runs compete for workers; the highest goes first.
        used: What its stages have used of their budgets.
    """

    store: Store
    run_id: str
    check_runner: CheckRunner
    listen: Callable[[Event], None] = lambda event: None
    tick: Callable[[], None] = lambda: None
    priority: int = 0
    used: dict[str, Counter[str]] = field(default_factory=dict)


def run_pipeline(
    run: RunContext,
    pipeline: Pipeline,
    selected: Collection[str],
    partitions: Sequence[str | None],
    compute: Compute,
    options: RunOptions,
) -> None:
    """Bring stages of some partitions up to date.

    With the option `wait`, partitions that wait for batches are continued when these have ended.
    """
    given, waiting = run, list[Submitted]()

    def withhold(event: Event) -> None:
        if isinstance(event, Submitted):
            waiting.append(event)
        else:
            given.listen(event)

    listen = withhold if options.wait else run.listen
    listen = with_manifests(run.store, run.check_runner, listen)
    with (
        RunTelemetry(pipeline, run.run_id, listen) as telemetry,
        closing(Connection(compute, pipeline, selected)) as connection,
    ):
        run = replace(run, listen=telemetry.listen)

        def preview(first: RunPlan) -> tuple[Mapping[str, Sequence[Part]], VaneError | None]:
            return execute_preview(run, first, connection.backend())

        with SchemaInference(
            run.store,
            preview,
            run.run_id,
            run.listen,
            selected,
            partitions,
            connect=connection.connect,
        ) as inference:
            resolved = inference.resolve(pipeline)
        plan = plan_run(
            resolved,
            selected,
            partitions,
            run.store,
            options.force,
            options.continues or run.run_id,
            options.retry_quarantined,
            connect=connection.connect,
        )
        run.listen(RunPlanned(plan))
        for event in about_plan(plan):
            run.listen(event)
        counts = functools.partial(_counted, run, plan)
        for text in check_limits(plan, run.store, options.limits, compute.gpu_hour_price, counts):
            run.listen(Noticed(text))
        backend = connection.backend() if plan.needed() else None
        run.listen(Connected())
        _execute(run, plan, backend)
    if waiting:
        canceled = await_batches(given, pipeline, waiting)
        for event in (each for each in waiting if each.partition in canceled):
            given.listen(event)
        left = [each for each in waiting if each.partition not in canceled]
        if keys := list(dict.fromkeys(each.partition for each in left)):
            run_pipeline(given, pipeline, {each.stage for each in left}, keys, compute, options)


def _counted(run: RunContext, plan: RunPlan) -> CountedRows:
    from vane_dagster.engine.row_counts import count_rows  # imports what workers do

    return count_rows(plan, run.store, run.run_id, run.check_runner.before)


def await_batches(
    run: RunContext, pipeline: Pipeline, submitted: Sequence[Submitted]
) -> set[str | None]:
    """Wait until the batches that partitions wait for have ended; nothing is held meanwhile.

    Returns the partitions with a batch that a user has cancelled since.
    """
    keys = {each.partition for each in submitted}
    until = minute(max(each.expected for each in submitted))
    text = f"waiting for batches of {count(len(keys), 'partition')}, until {until}"
    run.listen(Noticed(text, False))
    every = stage_batches(pipeline, run.store, {each.stage for each in submitted})
    flying = {b.name for each in every for b in each.read() if not b.ended_at}
    answered = time.monotonic()
    while True:
        try:
            for each in every:
                each.refresh()
        except ComputeError as error:
            if time.monotonic() > answered + UNANSWERED_SECONDS:
                raise
            run.listen(
                Noticed(f"{error}; the run looks again, for {UNANSWERED_SECONDS / 60:g} min")
            )
        else:
            answered = time.monotonic()
            if all(keys.isdisjoint(each.waiting()) for each in every):
                ended = (batch for each in every for batch in each.batches)
                canceled = [batch for batch in ended if batch.is_canceled and batch.name in flying]
                return {key for batch in canceled for key in batch.partitions}
        looks_at = time.monotonic() + BATCH_POLL_SECONDS
        while time.monotonic() < looks_at:
            run.tick()
            time.sleep(min(_TICK_SECONDS, BATCH_POLL_SECONDS))


def execute_preview(
    run: RunContext, plan: RunPlan, backend: Backend
) -> tuple[Mapping[str, Sequence[Part]], VaneError | None]:
    """Execute the plan of a preview; see `Execute`."""
    heard = (Printed, Noticed, WorkerReady)

    def listen(event: Event) -> None:
        if isinstance(event, heard):
            run.listen(event)

    made, failed = _recomputed(replace(run, listen=listen, used={}), plan, backend)
    error = failed[0].error if failed else None
    return {each.stage: each.parts for each in made}, error


ReadSample = Callable[[str | None], Sequence[RecomputedRows]]
"""Reads the sampled rows of a partition, or raises the error that prevented their computation."""


@contextmanager
def recomputed(run: RunContext, sample: SamplePlan, compute: Compute) -> Iterator[ReadSample]:
    """Execute the plan of a sample; delete its parts at the end."""
    plan, made, failed = sample.plan, list[Recomputed](), list[Failed]()
    partitions = {each.key: each for each in plan.partitions}

    def read(key: str | None) -> Sequence[RecomputedRows]:
        if key in errors:
            raise errors[key]
        if key not in partitions:
            return ()
        return read_sample(plan, partitions[key], sample.stored[key], parts[key], run.store)

    try:
        if plan.partitions:
            with closing(Connection(compute, plan.pipeline, plan.selected)) as connection:
                made, failed = _recomputed(run, plan, connection.backend())
        errors = {**plan.failed, **{each.partition: each.error for each in failed}}
        parts = {each.partition: each.parts for each in made}
        yield read
    finally:
        delete_parts(plan, run.store)


def _recomputed(
    run: RunContext, plan: RunPlan, backend: Backend
) -> tuple[list[Recomputed], list[Failed]]:
    """Execute a plan that commits nothing; return its results and its failures."""
    made: list[Recomputed] = []
    failed: list[Failed] = []

    def listen(event: Event) -> None:
        if isinstance(event, Recomputed):
            made.append(event)
        elif isinstance(event, Failed):
            failed.append(event)
        else:
            run.listen(event)

    _execute(replace(run, listen=listen), plan, backend)
    return made, failed


class Connection:
    """The backend of a run, which its previews use too. It is connected when it is first needed.

    Subprocesses are beside it if a selected stage runs in them.
    """

    def __init__(self, compute: Compute, pipeline: Pipeline, selected: Collection[str]) -> None:
        self._compute = compute
        specs = [stage.spec for stage in pipeline if stage.name in selected]
        self._on_driver = any(spec.runs_udf and spec.on_driver for spec in specs)
        self._backend: Backend | None = None
        self._lock = threading.Lock()

    def backend(self) -> Backend:
        """Return the backend."""
        with self._lock:
            if self._backend is None:
                self._backend = self._compute.backend()
                if self._on_driver:
                    self._backend = self._compute.with_subprocesses(self._backend)
            return self._backend

    def connect(self, room: bool) -> bool:
        """Connect; return whether it is a cluster, where room is made on request."""
        is_cluster = self.backend().capacity().is_cluster
        if is_cluster and room:
            make_room()
        return is_cluster

    def close(self) -> None:
        """Release everything that must not outlive the run."""
        if self._backend is not None:
            self._compute.close(self._backend)


def _execute(run: RunContext, plan: RunPlan, backend: Backend | None) -> None:
    """Execute a plan on a thread, and deliver its events here."""
    on_a_thread(
        lambda emit, cancelled: execute(
            plan,
            backend,
            run.store,
            run.run_id,
            emit,
            cancelled,
            run.check_runner,
            run.priority,
            run.used,
        ),
        run,
    )


def on_a_thread(
    work: Callable[[Callable[[Event], None], threading.Event], None], run: RunContext
) -> None:
    """Run `work` on a thread and deliver its events here; a slow listener does not block the work.

    An interrupt of this thread, or an exception from `tick`, cancels the work. Results that are
    committed until it has stopped are still delivered, for at most `_STOP_SECONDS`.
    """
    events = queue.SimpleQueue[Union[Event, None]]()  # None after the last one
    cancelled = threading.Event()
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work(events.put, cancelled)
        except BaseException as error:
            raised.append(error)
        finally:
            events.put(None)

    def deliver(seconds: float) -> bool:
        """Deliver events for some time; return whether the last one is delivered."""
        until = time.monotonic() + seconds
        with suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                with signals_deferred():  # a dequeued event is not lost
                    if (event := events.get(timeout=left)) is None:
                        return True
                    run.listen(event)
        return False

    thread = threading.Thread(target=body, name="vane-execute", daemon=True)
    thread.start()
    try:
        while not deliver(_TICK_SECONDS):
            run.tick()
    except BaseException:
        cancelled.set()
        with signals_deferred():
            deliver(_STOP_SECONDS)
        raise
    thread.join()
    if raised:
        raise raised[0]
