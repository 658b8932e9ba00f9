"""Metrics and traces of a run by OpenTelemetry's API, recorded from the run's events.

Without an SDK in the process, which is the user's, the API drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from opentelemetry import metrics, trace

from vane_dagster._secrets import masked
from vane_dagster.compute.api import IO_WORKERS
from vane_dagster.events import (
    CallEnded,
    CallStarted,
    Committed,
    Event,
    Failed,
    LeaseChanged,
    Noticed,
    PoolTime,
    Progress,
    Submitted,
    Unchanged,
    WorkerReady,
    WorkerReplaced,
)
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.worker.reports import WorkReport

_FLUSH_MILLISECONDS = 5000
_tracer = trace.get_tracer("vane_dagster")


def _made(kind: str, name: str, unit: str, description: str) -> Any:
    create = getattr(metrics.get_meter("vane_dagster"), f"create_{kind}")
    return create(f"vane_dagster.{name}", unit, description)


_rows = _made("counter", "rows", "{row}", "Input rows of a stage, by outcome")
_tokens = _made("counter", "tokens", "{token}", "Tokens of answers")
_cost = _made("counter", "cost", "{currency}", "Cost of answers, by the stage's prices")
_partitions = _made("counter", "partitions", "{partition}", "Partitions of a stage, by outcome")
_call_time = _made("counter", "call.time", "s", "Time in calls, by worker")
_pool_time = _made("counter", "worker.time", "s", "Time of the workers of stages, by state")
_queue = _made("gauge", "queue.length", "{task}", "Tasks that wait for a worker")
_leases = _made("up_down_counter", "leases", "{lease}", "Leases on pools")
_loads = _made("counter", "loads", "{load}", "Workers that became ready")
_load_time = _made("counter", "load.time", "s", "Time to construct models")
_restarts = _made("counter", "restarts", "{restart}", "Workers and servers replaced, by cause")
_gpu_busy = _made("gauge", "gpu.utilization", "1", "Busy share of a worker's GPUs")
_gpu_memory = _made("gauge", "gpu.memory", "By", "Memory in use on a worker's GPUs")

_Place = tuple[str, "str | None"]
"""A stage, and the key of a partition."""


class RunTelemetry:
    """Records the events of a run, and passes them on.

    The run's span contains a span for each partition of a stage, which contains a span for each of
    its calls.
    """

    def __init__(self, pipeline: Pipeline, run_id: str, listen: Callable[[Event], None]) -> None:
        self._pipeline, self._listen = pipeline, listen
        self._is_broken = False
        self._run: trace.Span = trace.INVALID_SPAN
        self._partitions: dict[_Place, trace.Span] = {}
        self._in_flight: dict[int, tuple[CallStarted, trace.Span]] = {}
        self._queued: set[str] = set()
        self._pools: dict[tuple[str, ...], PoolTime] = {}
        self._recorded(self._began, run_id)

    def __enter__(self) -> RunTelemetry:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """End the spans, and export what is recorded: the process may end without `atexit`."""
        self._recorded(self._ended, error)
        for provider in (metrics.get_meter_provider(), trace.get_tracer_provider()):
            with suppress(Exception):  # of the SDK, such as an exporter without a connection
                getattr(provider, "force_flush", lambda _: None)(_FLUSH_MILLISECONDS)

    def listen(self, event: Event) -> None:
        """Record an event, and pass it on."""
        self._recorded(self._record, event)
        self._listen(event)

    def _recorded(self, record: Callable[[Any], None], what: Any) -> None:
        """Record something, unless the SDK has raised an exception: it must not fail the run."""
        try:
            if not self._is_broken:
                record(what)
        except Exception as error:
            self._is_broken = True
            text = f"this run records no more telemetry, because recording it raised {error!r}"
            self._listen(Noticed(text))

    def _began(self, run_id: str) -> None:
        given = {**self._of(), "dagster.run_id": run_id}
        self._run = _tracer.start_span(f"run {self._pipeline.name}", attributes=given)

    def _ended(self, error: BaseException | None) -> None:
        for _, span in self._in_flight.values():
            span.end()
        for place in [*self._partitions]:
            self._end(place)
        if error is not None:
            _fail(self._run, str(error))
        self._run.end()

    def _record(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._call_started(event)
        elif isinstance(event, CallEnded):
            self._call_ended(event)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, LeaseChanged):
            self._pools.clear()
            for model in event.models:
                _leases.add(1 if event.is_held else -1, self._of(pool=model))
        elif isinstance(event, WorkerReady):
            given = self._of(*event.stages, pool=event.model)
            _loads.add(1, {**given, "vane_dagster.warm": event.report.warm})
            if not event.report.warm:
                _load_time.add(event.report.seconds, given)
        elif isinstance(event, WorkerReplaced):
            _restarts.add(1, self._of(*(event.stages or (IO_WORKERS,)), cause=event.cause))
        elif isinstance(event, (Committed, Unchanged, Submitted, Failed)):
            _partitions.add(1, self._of(event.stage, outcome=type(event).__name__.lower()))
            error = event.error if isinstance(event, Failed) else None
            self._end((event.stage, event.partition), error)
            if isinstance(event, Committed) and event.stats.servers is not None:
                restarts = event.stats.servers.restarts
                _restarts.add(restarts, self._of(event.stage, cause="server"))

    def _of(self, *stages: str, **others: Any) -> dict[str, Any]:
        """Return the attributes of stages, or of the pipeline."""
        given = {"pipeline": self._pipeline.name, "stage": ", ".join(stages), **others}
        return {f"vane_dagster.{name}": value for name, value in given.items() if value != ""}

    def _call_started(self, event: CallStarted) -> None:
        if not self._run.is_recording():
            self._in_flight[event.ticket] = event, trace.INVALID_SPAN
            return
        place, at = (event.stage, event.partition), event.at
        given = self._of(event.stage, partition=event.partition or "")
        if (partition := self._partitions.get(place)) is None:
            partition = self._partitions[place] = _span("partition", self._run, at, given)
        of_call = self._of(fragment=event.fragment, worker=event.worker, kind=event.kind)
        self._in_flight[event.ticket] = event, _span("call", partition, at, {**given, **of_call})

    def _call_ended(self, event: CallEnded) -> None:
        call, span = self._in_flight.pop(event.ticket)
        report = event.report or WorkReport()
        if problem := report.fault.message if report.fault else event.lost:
            _fail(span, problem)
        span.set_attribute("vane_dagster.rows", report.rows_out)
        span.end(event.at)
        self._count(call, report)

    def _count(self, call: CallStarted, report: WorkReport) -> None:
        """Count what a call did. Rows that are computed again are counted again."""
        stage, tally, part = call.stage, report.tally, report.part
        outcomes = {"copied": part.copied if part else 0}
        if call.kind in ("slice", "whole"):
            outcomes |= {n: getattr(tally, n) for n in ("filtered", "quarantined", "nulled")}
            outcomes["computed"] = tally.rows_in - tally.filtered - tally.faults
        for outcome, rows in outcomes.items():
            if rows:
                _rows.add(rows, self._of(stage, outcome=outcome))
        by_worker = self._of(stage, worker=call.worker)
        _call_time.add(report.seconds, by_worker)
        if part is not None and (usage := self._pipeline[stage].spec.usage) is not None:
            used = usage.used(part.spent)
            for kind, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
                _tokens.add(used[name], {**self._of(stage), "gen_ai.token.type": kind})
            if usage.prices:
                _cost.add(max(0.0, usage.cost(used)), self._of(stage))
        if (busy := report.gpus.utilization) is not None:
            _gpu_busy.set(busy, by_worker)
            _gpu_memory.set(report.gpus.memory, by_worker)

    def _progress(self, event: Progress) -> None:
        for pool in event.pools:
            before = self._pools.get(pool.stages, PoolTime(pool.stages))
            self._pools[pool.stages] = pool
            for state in pool.shares:
                spent = getattr(pool, state) - getattr(before, state)
                _pool_time.add(spent, self._of(*(pool.stages or (IO_WORKERS,)), state=state))
        self._queued.update(event.queued)
        for stage in self._queued:
            _queue.set(event.queued.get(stage, 0), self._of(stage))

    def _end(self, place: _Place, error: BaseException | None = None) -> None:
        """End the spans of a stage's partition."""
        span = self._partitions.pop(place, trace.INVALID_SPAN)
        if error is not None:
            _fail(span, str(error))
            _fail(self._run, str(error))
        span.end()


def _span(kind: str, parent: trace.Span, at: int, given: Mapping[str, Any]) -> trace.Span:
    context = trace.set_span_in_context(parent)
    name = f"{kind} {given['vane_dagster.stage']}"
    return _tracer.start_span(name, context, attributes=given, start_time=at)


def _fail(span: trace.Span, message: str) -> None:
    text = masked(message).partition("\n")[0]
    span.set_status(trace.Status(trace.StatusCode.ERROR, text))
