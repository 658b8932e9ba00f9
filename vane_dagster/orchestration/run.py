"""A run: plan, execute on a thread, and hand its events to a listener on the caller's."""

from __future__ import annotations

import importlib.metadata
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from vane_dagster.compute.api import Backend
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.executor import execute
from vane_dagster.engine.preflight import Finding, beyond, check_all, refuse
from vane_dagster.errors import VaneError
from vane_dagster.events import (
    Committed,
    Event,
    Failed,
    Planned,
    Progress,
    Unchanged,
    Writing,
    about_plan,
)
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.signals import signals_deferred
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.store import Store


class EventQueue:
    """A queue in which log lines and progress overtake results.

    Results (`Committed`, `Unchanged`, `Failed`) take long to write to Dagster's event log. Of
    `Progress`, only the latest is kept. Once all events are there, a `Writing` event in front of
    each result says how many were handed out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._progress: Progress | None = None
        self._logged: deque[Event] = deque()
        self._results: deque[Event] = deque()
        self._handed_out = 0
        self._announced = 0
        self._is_complete = False

    def put(self, event: Union[Event, None]) -> None:
        """Adds an event; None says that no other will follow."""
        with self._changed:
            if event is None:
                self._is_complete = True
            elif isinstance(event, Progress):
                self._progress = event
            elif isinstance(event, (Committed, Unchanged, Failed)):
                self._results.append(event)
            else:
                self._logged.append(event)
            self._changed.notify()

    def get(self, timeout: float) -> Union[Event, None]:
        """The next event, or None after the last one.

        Raises:
            queue.Empty: If none came within the timeout, in seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_next, timeout):
                raise queue.Empty
            if self._logged:
                return self._logged.popleft()
            if self._progress is not None:
                progress, self._progress = self._progress, None
                return progress
            if not self._results:
                return None
            if self._is_complete and self._announced < self._handed_out:
                self._announced = self._handed_out
                return Writing(self._handed_out, self._handed_out + len(self._results))
            self._handed_out += 1
            return self._results.popleft()

    def _has_next(self) -> bool:
        return bool(self._logged or self._progress or self._results or self._is_complete)


_STOP_SECONDS = 20.0
_CHECK_SECONDS = 2.0
_TICK_SECONDS = 0.5
_TOLD = 5


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
    judge: CheckRunner,
    force: bool = False,
    retry_quarantined: bool = False,
    flush: Callable[[], None] = lambda: None,
    priority: int = 0,
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
        flush: Called on this thread when no event has come for a moment, and after the last one,
            so that `listen` may hold events back until then.
        priority: Where runs compete for workers, the one with the highest priority goes first.

    Returns:
        The plan that was carried out; what came of it went to `listen`.

    Raises:
        VaneError: If nothing could be planned, or the cluster cannot do it.
    """
    look = _Look(pipeline, selected, partitions, compute, store, log)

    def plan_again(keys: Sequence[str | None]) -> RunPlan:
        return plan_run(pipeline, selected, keys, store, force, run_id, retry_quarantined)

    try:
        plan = plan_again(partitions)
    except VaneError as unplanned:
        look.refuse_with([unplanned])
        raise
    listen(Planned(plan))
    for event in about_plan(plan):
        listen(event)
    if plan.failed and not plan.partitions:
        look.refuse_with(list(plan.failed.values()))
    backend = look.backend() if plan.needed() else None
    try:
        _on_a_thread(
            lambda emit, cancelled: execute(
                plan,
                backend,
                store,
                run_id,
                emit,
                cancelled,
                versions(),
                judge,
                plan_again,
                priority,
            ),
            listen,
            check,
            flush,
        )
    finally:
        if backend is not None:
            compute.close(backend)
    return plan


def recompute(
    plan: RunPlan,
    compute: Compute,
    store: Store,
    run_id: str,
    listen: Callable[[Event], None],
    log: Callable[[str], None],
    check: Callable[[], None],
    judge: CheckRunner,
    priority: int = 0,
) -> None:
    """Carries out the plan of a sample; see `run_pipeline` for the arguments.

    Raises:
        VaneError: If the cluster cannot do it.
    """
    backend = compute.backend(log)
    given = (plan, backend, store, run_id)
    try:
        _on_a_thread(
            lambda emit, cancelled: execute(*given, emit, cancelled, {}, judge, priority=priority),
            listen,
            check,
            lambda: None,
        )
    finally:
        compute.close(backend)


@dataclass(frozen=True)
class _Look:
    """Looks for what else stands in the way, where the plan or the cluster has failed already."""

    pipeline: Pipeline
    selected: Collection[str]
    partitions: Sequence[str | None]
    compute: Compute
    store: Store
    log: Callable[[str], None]

    def backend(self) -> Backend:
        """Where the work is done.

        Raises:
            PreflightError: If it cannot be reached.
        """
        try:
            return self.compute.backend(self.log)
        except VaneError as error:
            refuse([error, *self._findings([error], None)])
            raise

    def refuse_with(self, errors: Sequence[VaneError]) -> None:
        """Raises a PreflightError with these errors, if there is more than they tell.

        A cluster is asked if it runs: a plan that fails does not start one.
        """
        if not self.compute.is_up():
            found = self._findings(errors, None)
        else:
            try:
                backend = self.compute.backend(self.log)
            except VaneError as error:
                refuse([*_few(errors), error, *self._findings(errors, None)])
                return
            try:
                found = self._findings(errors, backend)
            finally:
                self.compute.close(backend)
        if found:
            refuse([*_few(errors), *found])

    def _findings(self, errors: Sequence[VaneError], backend: Backend | None) -> Sequence[Finding]:
        stages = [stage.name for stage in self.pipeline if stage.name in self.selected]
        first = dict.fromkeys(stages, next(iter(self.partitions), None))
        checked = check_all(self.pipeline, stages, first, self.store, backend)
        return beyond(checked.findings, errors)


def _few(errors: Sequence[VaneError]) -> list[VaneError]:
    """The first errors of partitions, which are often the same; all are logged."""
    distinct = list({str(error): error for error in errors}.values())
    return distinct[:_TOLD]


def _on_a_thread(
    work: Callable[[Callable[[Event], None], threading.Event], None],
    listen: Callable[[Event], None],
    check: Callable[[], None],
    flush: Callable[[], None],
) -> None:
    """Runs `work` on a thread and hands its events over; a slow listener stalls nothing.

    An interruption of this thread, or what `check` raises, cancels the work. What is committed
    until it has stopped is handed over all the same, for at most `_STOP_SECONDS`.
    """
    events = EventQueue()
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
    handover = _Handover(events, listen, check, flush)
    try:
        ended = False
        while not ended:
            with signals_deferred() as received:  # an event that was taken is not lost
                ended = handover.run(received)
    except BaseException:
        cancelled.set()
        with signals_deferred():
            handover.finish()
        raise
    thread.join()
    if raised:
        raise raised[0]


class _Handover:
    """Hands the events of a run's thread to a listener on another one.

    Args:
        events: The queue; None ends it.
        listen: Called with each event.
        check: Called every few seconds.
        flush: Called when no event has come for a moment, and after the last.
    """

    def __init__(
        self,
        events: EventQueue,
        listen: Callable[[Event], None],
        check: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._events, self._listen, self._check, self._flush = events, listen, check, flush
        self._checked = time.monotonic()

    def run(self, received: Sequence[Any]) -> bool:
        """Hands over events up to the last one, or until a signal is received.

        Returns:
            Whether it was the last one.
        """
        while not received:
            if time.monotonic() - self._checked > _CHECK_SECONDS:
                self._check()
                self._checked = time.monotonic()
            try:
                event = self._events.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self._flush()
                continue
            if event is None:
                self._flush()
                return True
            self._listen(event)
        return False

    def finish(self) -> None:
        """Hands over what cancelled work has still committed, for at most `_STOP_SECONDS`."""
        until = time.monotonic() + _STOP_SECONDS
        while (left := until - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if event is None:
                break
            self._listen(event)
        self._flush()


def versions() -> Mapping[str, Any]:
    """Versions that a manifest records."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("vane-dagster", "ray", "pyarrow", "duckdb"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": found}
