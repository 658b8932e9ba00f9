"""Progress of a run: periodic log lines, and the final summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from vane_dagster._secrets import masked
from vane_dagster._texts import count, duration, rate
from vane_dagster.events import (
    Committed,
    Event,
    Failed,
    Noticed,
    PoolLoads,
    Printed,
    Progress,
    Waiting,
    WorkerReady,
)
from vane_dagster.storage.manifest import Manifest

_LOG_SECONDS = 5.0
_STALLED_SECONDS = 30.0
_MIN_SHARE = 0.05


class ProgressReport:
    """Turns `Progress` events into log lines."""

    def __init__(
        self,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._clock = log, clock
        self._stages: dict[str, _StageProgress] = {}
        self._seconds = 0.0
        self._said = clock()

    def __call__(self, event: Progress) -> None:
        """Report an event, unless the last report is too recent."""
        if event.seconds < self._seconds:  # another wave
            self._stages = {}
        self._seconds = event.seconds
        for stage, done in event.done.items():
            self._stages.setdefault(stage, _StageProgress()).take(event.seconds, done)
        if self._clock() - self._said < _LOG_SECONDS:
            return
        self._said = self._clock()
        for stage, total in event.total.items():
            if line := self._stages[stage].line(event.seconds, total):
                self._log(f"{stage}: {line}")


PRINTED = SimpleNamespace(info=print, warning=print)
"""A log that is printed."""


def log_text(log: Any, event: Event) -> None:
    """Log an event that is a text, and no other, by `log.info` or `log.warning`."""
    if isinstance(event, Printed):
        log.info(f"{event.stage} printed:\n{masked(event.text.rstrip())}")
    elif isinstance(event, Noticed):
        (log.warning if event.is_problem else log.info)(masked(event.text))
    elif isinstance(event, Waiting):
        log.info(masked(event.text))


@dataclass
class _StageProgress:
    """Progress of a stage in a wave: its first and latest rows, as seconds and their number."""

    first: tuple[float, int] | None = None
    latest: tuple[float, int] = (0.0, 0)

    def take(self, seconds: float, done: int) -> None:
        """Record the number of rows at a time."""
        if done != self.latest[1]:
            self.latest = (seconds, done)
            self.first = self.first or self.latest  # excludes the time to load the model

    def line(self, seconds: float, total: int) -> str:
        """Return one line; empty if there is nothing to report."""
        since, done = self.latest
        idle = seconds - since
        if done >= total or (self.first is None and idle < _STALLED_SECONDS):
            return ""
        summary = f"{done:,} of {total:,} rows ({100 * done // total}%)"
        if idle >= _STALLED_SECONDS:
            return f"{summary}, no rows for {duration(idle)}"
        began, before = self.first or self.latest
        if done > before and since > began:
            per_second = (done - before) / (since - began)
            summary += f", {rate(per_second)}"
            if done >= _MIN_SHARE * total:
                summary += f", {duration((total - done) / per_second)} left"
        return summary


@dataclass
class _StageSummary:
    """Totals of a stage over all partitions."""

    committed: int = 0
    up_to_date: int = 0
    failed: int = 0
    rows: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    call_seconds: float = 0.0
    computed: int = 0
    reused: int = 0
    stored_rows: int = 0
    stored_fragments: int = 0
    quarantined: int = 0
    given: int = 0
    copied: int = 0

    def __str__(self) -> str:
        stored = f"{count(self.stored_rows, 'row')} in {count(self.stored_fragments, 'fragment')}"
        partitions = (
            (self.committed, "committed"),
            (self.up_to_date, f"up to date ({stored})"),
            (self.failed, "failed"),
        )
        counts = [f"{number:,} {state}" for number, state in partitions if number]
        lines = [f"partitions: {', '.join(counts)}"]
        if self.rows:
            speed = f", {rate(self.rows / self.seconds)}" if self.seconds else ""
            lines.append(f"{count(self.rows, 'row')} in {duration(self.seconds)}{speed}")
        if self.seconds and self.work_seconds and self.call_seconds:
            workers = self.work_seconds / self.seconds
            share = min(1.0, self.call_seconds / self.work_seconds)  # calls of async code overlap
            lines.append(f"{workers:.1f} workers busy, {share:.0%} of it in your code")
        if self.committed:
            lines.append(f"fragments: {self.computed:,} computed, {self.reused:,} reused")
        if self.copied:
            lines.append(f"input rows: {self.given:,} computed, {self.copied:,} copied")
        if self.quarantined:
            lines.append(f"{count(self.quarantined, 'row')} quarantined")
        return "; ".join(lines)


@dataclass
class ModelUse(PoolLoads):
    """The workers of a model, a function or a server in a run.

    Attributes:
        kind: What it is.
    """

    kind: Literal["model", "function", "server"] = "model"

    def __str__(self) -> str:
        took = f" in {duration(self.load_seconds)}" if self.loads else ""
        return f"{self.loads:,} started{took}, {self.warm:,} warm"


@dataclass
class RunSummary:
    """Accumulates a run's events.

    Attributes:
        models: Loads and warm workers by the name of the model, function or server.
        clock: Returns seconds; only differences count.
    """

    models: dict[str, ModelUse] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._stages: dict[str, _StageSummary] = {}

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, WorkerReady):
            kind: Any = (event.server and "server") or (event.is_function and "function")
            use = self.models.setdefault(event.model, ModelUse(kind=kind or "model"))
            use.add(event.report)
        elif isinstance(event, Failed):
            self._stage(event.stage).failed += 1
        elif isinstance(event, Committed):
            self._committed(self._stage(event.stage), event)

    def up_to_date(self, manifest: Manifest) -> None:
        """Add a partition of a stage that was already up to date."""
        stage = self._stage(manifest.stage)
        stage.up_to_date += 1
        stage.stored_rows += manifest.rows
        stage.stored_fragments += len(manifest.parts)
        stage.quarantined += sum(part.quarantined for part in manifest.parts)

    def _stage(self, name: str) -> _StageSummary:
        return self._stages.setdefault(name, _StageSummary())

    def _committed(self, stage: _StageSummary, event: Committed) -> None:
        stats, parts = event.stats, event.manifest.parts
        stage.committed += 1
        stage.rows += stats.rows_out
        stage.seconds += stats.seconds
        stage.work_seconds += stats.work_seconds
        stage.call_seconds += stats.call_seconds
        stage.computed += stats.computed
        stage.reused += max(0, len(parts) - stats.computed)
        stage.given += stats.rows_in
        stage.copied += stats.copied
        stage.quarantined += sum(part.quarantined for part in parts)

    def text(self, finished: bool = True) -> str:
        """Return the summary lines of a run that finished or was stopped."""
        ended = "finished in" if finished else "stopped after"
        lines = [f"{ended} {duration(self.clock() - self._began)}"]
        lines += [f"  {name}: {stage}" for name, stage in self._stages.items()]
        lines += [
            f"  {'' if use.kind == 'server' else f'{use.kind} '}{name}: {use}"
            for name, use in self.models.items()
        ]
        return "\n".join(lines)
