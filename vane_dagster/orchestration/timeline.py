"""The timeline of a step: the seconds of each phase, from the events of Dagster and of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import dagster as dg

from vane_dagster.events import (
    Committed,
    Connected,
    Event,
    Progress,
    RunPlanned,
    Unchanged,
    WaveStarted,
    WorkerReady,
)

PROFILE = "VANE_DAGSTER_PROFILE"
"""The environment variable with which each step logs its timeline."""

PHASES = {
    "RUN_START": "start of the run",
    "RESOURCE_INIT_STARTED": "launch of the step by Dagster",
    "STEP_START": "resources: connection to a cluster that runs",
    "step": "import of the code of a step",
    "planned": "plan",
    "connected": "connection, or start of the local head",
    "leased": "preflight validation",
    "ready": "lease, start of the workers",
    "loaded": "load of the model",
    "computed": "read, compute, write",
    "committed": "commit",
    "end": "events in Dagster",
}
"""The phases of a step in their order, by the mark that ends each."""
_ENDED_BY: dict[type, str] = {
    RunPlanned: "planned",
    Connected: "connected",
    Progress: "computed",
    Committed: "committed",
    Unchanged: "committed",
}


class Timeline:
    """The time at which each phase of a step ended.

    A mark is the time at which this process handled the event. In a run of several waves, only the
    first wave's start of workers is a phase; the others count as computing.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._marks = {"step": clock()}

    def take(self, event: Event) -> None:
        """Mark the end of the phase that an event ends."""
        now = self._clock()
        if isinstance(event, WorkerReady) and "loaded" not in self._marks:
            self._marks["loaded"] = now
            self._marks["ready"] = now - (0 if event.report.warm else event.report.seconds)
        elif isinstance(event, WaveStarted):
            self._marks.setdefault("leased", now)
        elif phase := _ENDED_BY.get(type(event)):
            self._marks[phase] = now

    def text(self, context: dg.AssetExecutionContext) -> str:
        """Return the timeline until now, as a table."""
        return "\n".join(self._lines({**self._marks, **_dagster_marks(context)}))

    def _lines(self, marks: Mapping[str, float]) -> Iterator[str]:
        marks = {**marks, "end": self._clock()}
        known = [(name, marks[name]) for name in PHASES if name in marks]
        last = began = known[0][1]
        yield "timeline of the step\n     at s  seconds  share  phase"
        for name, mark in known:
            at, mark = last, max(last, mark)
            last = mark
            if mark > at:
                share = (mark - at) / (marks["end"] - began)
                yield f"{at - began:9.2f}{mark - at:9.2f}{share:7.0%}  {PHASES[name]}"
        yield f"{last - began:9.2f}  until here"


def _dagster_marks(context: dg.AssetExecutionContext) -> dict[str, float]:
    """The times of the first events of each kind in the run's log, for this step."""
    kinds = {dg.DagsterEventType[name] for name in PHASES if name.isupper()}
    found = context.instance.get_records_for_run(context.run.run_id, of_type=kinds).records
    marks: dict[str, float] = {}
    for record in found:
        entry = record.event_log_entry
        event = entry.dagster_event
        if event and event.step_key in (None, context.op_execution_context.op_def.name):
            marks.setdefault(event.event_type.name, entry.timestamp)
    return marks
