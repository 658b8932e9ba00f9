"""A run in a few lines, for the end of its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vane_dagster.events import Committed, Event, Failed, Unchanged, WorkerReady
from vane_dagster.orchestration.number_format import count, duration, rate


@dataclass
class _Stage:
    """What became of a stage over all partitions."""

    committed: int = 0
    up_to_date: int = 0
    failed: int = 0
    rows: int = 0
    seconds: float = 0.0
    computed: int = 0
    reused: int = 0
    quarantined: int = 0

    def __str__(self) -> str:
        partitions = (
            (self.committed, "committed"),
            (self.up_to_date, "up to date"),
            (self.failed, "failed"),
        )
        told = [f"{number:,} {state}" for number, state in partitions if number]
        lines = [f"partitions: {', '.join(told)}"]
        if self.computed:
            speed = f", {rate(self.rows / self.seconds)}" if self.seconds else ""
            lines.append(f"{count(self.rows, 'row')} in {duration(self.seconds)}{speed}")
        if self.committed:
            lines.append(f"fragments: {self.computed:,} computed, {self.reused:,} reused")
        if self.quarantined:
            lines.append(f"{count(self.quarantined, 'row')} quarantined")
        return "; ".join(lines)


@dataclass
class ModelUse:
    """How the workers of a model came by it in a run."""

    loads: int = 0
    load_seconds: float = 0.0
    warm: int = 0

    def __str__(self) -> str:
        if not self.loads:
            return f"no load, {count(self.warm, 'warm worker')}"
        loads = f"{count(self.loads, 'load')} in {duration(self.load_seconds)}"
        return f"{loads}, {count(self.warm, 'warm worker')}"


@dataclass
class RunSummary:
    """Adds up a run's events.

    Attributes:
        models: What each model's workers reported, by the model's name.
        clock: Gives seconds; only differences count.
    """

    models: dict[str, ModelUse] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._stages: dict[str, _Stage] = {}

    def take(self, event: Event) -> None:
        """Takes in an event."""
        if isinstance(event, WorkerReady):
            use = self.models.setdefault(event.model, ModelUse())
            use.loads += not event.report.warm
            use.load_seconds += 0.0 if event.report.warm else event.report.seconds
            use.warm += event.report.warm
        elif isinstance(event, (Committed, Unchanged, Failed)):
            stage = self._stages.setdefault(event.stage, _Stage())
            if isinstance(event, Unchanged):
                stage.up_to_date += 1
            elif isinstance(event, Failed):
                stage.failed += 1
            else:
                self._committed(stage, event)

    def _committed(self, stage: _Stage, event: Committed) -> None:
        stats, parts = event.stats, event.manifest.parts
        stage.committed += 1
        stage.rows += stats.rows_out
        stage.seconds += stats.seconds
        stage.computed += stats.computed
        stage.reused += max(0, len(parts) - stats.computed)
        stage.quarantined += sum(part.quarantined for part in parts)

    def text(self, finished: bool = True) -> str:
        """The lines, of a run that has finished or was stopped before it had."""
        ended = "finished in" if finished else "stopped after"
        lines = [f"{ended} {duration(self.clock() - self._began)}"]
        lines += [f"  {name}: {stage}" for name, stage in self._stages.items()]
        lines += [f"  model {name}: {use}" for name, use in self.models.items()]
        return "\n".join(lines)
