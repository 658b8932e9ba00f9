"""Progress of a run: periodic log lines, and the final summary."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from vane_dagster._secrets import masked
from vane_dagster._texts import EqualErrors, amount, count, duration, in_partition, minute, rate
from vane_dagster.engine.bottleneck import Advice, WaveTime, advise
from vane_dagster.events import (
    Committed,
    Connected,
    Event,
    Failed,
    Noticed,
    PoolLoads,
    PoolTime,
    Printed,
    Progress,
    RunPlanned,
    Submitted,
    Unchanged,
    WaveStarted,
    WorkerReady,
)
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.manifest import Manifest

_LOG_SECONDS = 5.0
_STALLED_SECONDS = 30.0
_MIN_SHARE = 0.05
SHOWN_ERRORS = 5
"""The error of a run has the text of this many errors."""
_MAX_CHARACTERS = 1_000
_MOST_REFUSED = 0.1
"""The share of requests after HTTP 429 from which the endpoint limits a stage."""
_PACED = 0.8
"""The share of its limit per minute from which a stage is limited by it."""


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


PRINTED = SimpleNamespace(info=print, warning=print, error=lambda text: None)
"""A log that is printed, without errors, which a run raises."""


def log_text(log: Any, event: Event) -> None:
    """Log an event that is a text, and no other, by `log.info` or `log.warning`."""
    if isinstance(event, Printed):
        say = log.warning if event.output.has_problem else log.info
        text = masked(event.output.text.rstrip())
        say(
            f"{event.stage}{in_partition(event.partition)} printed (worker {event.worker}):\n{text}"
        )
    elif isinstance(event, Noticed):
        (log.warning if event.is_problem else log.info)(masked(event.text))


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


_PHASES = {RunPlanned: "plan", Connected: "connection", WorkerReady: "first worker"}
"""The phases before a run computes, by the event that ends each first."""
_SUMMED = (
    "rows_in", "copied", "computed", "seconds", "work_seconds", "call_seconds",
    "retries", "rate_limited",
)  # fmt: skip


class _StageSummary(defaultdict[str, Any]):
    """Totals of a stage over all partitions, by the names of `StageStats` and others."""

    @property
    def partitions(self) -> str:
        """The number of partitions in each state."""
        stored = count(self["stored_rows"], "row"), count(self["stored_fragments"], "fragment")
        partitions = (
            (self["committed"], "committed"),
            (self["up_to_date"], f"up to date ({' in '.join(stored)})"),
            (self["submitted"], "submitted to a batch or waiting for one"),
            (self["failed"], "failed"),
        )
        return ", ".join(f"{number:,} {state}" for number, state in partitions if number)

    @property
    def in_code(self) -> float:
        """The share of the computing that is in the user's code."""
        share: float = self["call_seconds"] / (self["work_seconds"] or 1.0)
        return min(1.0, share)  # async calls overlap

    def text(self, pool: PoolTime | None) -> str:
        """Return the totals in one line, with what the workers did."""
        lines = [f"partitions: {self.partitions}"]
        rows, seconds = self["rows_in"] + self["copied"], self["seconds"]
        if rows:
            speed = f", {rate(rows / seconds)}" if seconds else ""
            kinds = f" ({self['rows_in']:,} computed, {self['copied']:,} copied)"
            rows_done = count(rows, "row") + kinds * bool(self["copied"])
            lines.append(f"{rows_done} in {duration(seconds)}{speed}")
        if self["tokens"]:
            cost = f", a cost of {amount(self['cost'], 3)}" if self["cost"] else ""
            lines.append(f"{count(self['requests'], 'request')}, {self['tokens']:,} tokens{cost}")
        if self["retries"]:
            limited = f", {self['rate_limited']:,} of them after HTTP 429"
            retried = f"{count(self['retries'], 'call')} retried"
            lines.append(retried + limited * bool(self["rate_limited"]))
        if pool is not None and pool.workers:
            shown = {"input": "waiting for input", "room": "waiting for memory"}
            texts = {shown.get(name, name): f"{share:.0%}" for name, share in pool.shares.items()}
            shares = [f"{name} {share}" for name, share in texts.items() if share != "0%"]
            lines.append(f"{count(pool.workers, 'worker')}: {', '.join(shares)}")
            if self.in_code:
                lines.append(f"{self.in_code:.0%} of the computing time in your code")
        if self["committed"]:
            lines.append(f"fragments: {self['computed']:,} computed, {self['reused']:,} reused")
        if self["quarantined"]:
            lines.append(f"{count(self['quarantined'], 'row')} quarantined")
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
        expected: Unix time by which batches have ended; 0 if none was submitted.
    """

    models: dict[str, ModelUse] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    expected: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._marked = self.clock()
        self._phases: dict[str, float] = {}
        self._stages = defaultdict[str, _StageSummary](lambda: _StageSummary(int))
        self._waves: list[WaveTime] = []
        self._fragments: dict[str, int] = {}
        self._fragment_rows, self._groups = 0, 1.0
        self._pipeline: Pipeline | None = None

    def take(self, event: Event) -> None:
        """Add an event."""
        if (phase := _PHASES.get(type(event))) and phase not in self._phases:
            now = self.clock()
            self._phases[phase], self._marked = now - self._marked, now
        if isinstance(event, WorkerReady):
            kind: Any = (event.server and "server") or (event.is_function and "function")
            use = self.models.setdefault(event.model, ModelUse(kind=kind or "model"))
            use.add(event.report)
        elif isinstance(event, RunPlanned):
            plan = event.plan
            self._fragments = {stage: plan.missing(stage) for stage in plan.selected}
            self._pipeline = plan.pipeline
            every = [each for partition in plan.partitions for each in partition.fragments]
            self._fragment_rows = max((each.rows for each in every), default=0)
            if getattr(plan.source, "small_files", "") == "separate":
                rows = [each.source_rows for each in plan.partitions]
                groups = sum(-(-each // plan.rule.rows) for each in rows)
                self._groups = len(every) / max(1, groups)
        elif isinstance(event, WaveStarted):
            self._waves.append(WaveTime(event.resources, is_cluster=event.is_cluster))
        elif isinstance(event, Progress) and self._waves:
            self._waves[-1].pools = event.pools
        elif isinstance(event, Failed):
            self._stages[event.stage]["failed"] += 1
        elif isinstance(event, Submitted):
            self._stages[event.stage]["submitted"] += 1
            self.expected = max(self.expected, event.expected)
        elif isinstance(event, (Committed, Unchanged)) and event.manifest is not None:
            self._in_force(event, event.manifest)

    def _in_force(self, event: Committed | Unchanged, manifest: Manifest) -> None:
        stage = self._stages[event.stage]
        if isinstance(event, Committed):
            for name in _SUMMED:
                stage[name] += getattr(event.stats, name)
            spent = event.stats.spent
            stage["requests"] += spent["requests"]
            stage["tokens"] += spent["prompt_tokens"] + spent["completion_tokens"]
            stage["cost"] += manifest.figures.get("cost_spent", 0)
            stage["committed"] += 1
            stage["reused"] += max(0, len(manifest.parts) - event.stats.computed)
        else:
            stage["up_to_date"] += 1
            stage["stored_rows"] += manifest.rows
            stage["stored_fragments"] += len(manifest.parts)
        stage["quarantined"] += sum(part.quarantined for part in manifest.parts)

    def advice(self, finished: bool = True) -> Advice | None:
        """What limits a run; None if it computed nothing, failed in a partition or was stopped."""
        if not finished or any(stage["failed"] for stage in self._stages.values()):
            return None
        for wave in self._waves:
            wave.pools = [replace(pool, limited_by=self._limit(pool)) for pool in wave.pools]
        return advise(
            self._waves,
            self.clock() - self._began,
            self._fragments,
            self._fragment_rows,
            {name: stage.in_code for name, stage in self._stages.items()},
            self._groups,
        )

    def _limit(self, pool: PoolTime) -> str:
        """Return what limits the requests of a pool, however many workers it has."""
        for name in self._stages.keys() & {*pool.stages}:
            stage = self._stages[name]
            requests = stage["rows_in"] + stage["retries"]
            if stage["rate_limited"] > _MOST_REFUSED * requests:
                return "the endpoint's rate limit (HTTP 429)"
            done = {"requests_per_minute": requests, "tokens_per_minute": stage["tokens"]}
            usage = self._pipeline[name].spec.usage if self._pipeline else None
            for option, limit in usage.per_minute.items() if usage else ():
                if 60 * done[option] > _PACED * limit * stage["seconds"]:
                    return f"their {option}"
        return ""

    def _pool(self, stage: str) -> PoolTime | None:
        pools = [pool for wave in self._waves for pool in wave.pools if stage in pool.stages]
        return pools[-1] if pools else None

    def figures(self, finished: bool = True) -> dict[str, Any]:
        """Return what limits the run, and what the workers of each pool did, as JSON."""
        pools = [asdict(pool) for wave in self._waves for pool in wave.pools]
        advice = self.advice(finished)
        shown = asdict(advice) if advice else None
        return {"seconds": self.clock() - self._began, "pools": pools, "advice": shown}

    def text(self, finished: bool = True) -> str:
        """Return the summary lines of a run that finished or was stopped."""
        ended = "finished in" if finished else "stopped after"
        phases = "".join(f", {name} {duration(took)}" for name, took in self._phases.items())
        lines = [f"{ended} {duration(self.clock() - self._began)}{phases}"]
        planned = dict.fromkeys([*self._fragments, *self._stages])
        named = [(name, self._stages[name]) for name in planned if name in self._stages]
        lines += [f"  {name}: {stage.text(self._pool(name))}" for name, stage in named]
        if self.expected:
            until, collect = minute(self.expected), "`vane-dagster batches collect`"
            lines.append(f"  batches submitted, expected to end by {until}; then run {collect}")
        lines += [
            f"  {'' if use.kind == 'server' else f'{use.kind} '}{name}: {use}"
            for name, use in self.models.items()
        ]
        if advice := self.advice(finished):
            lines.append(f"  {advice}")
        return "\n".join(lines)


class RunLog:
    """Logs a run's progress, texts and errors, and sums its events up.

    Attributes:
        summary: The sums.
        failed: The failures.
        errors: The errors that caused them.
    """

    def __init__(self, log: Any, pipeline: str) -> None:
        self._log, self._pipeline = log, pipeline
        self.summary, self.failed, self.errors = RunSummary(), list[Failed](), EqualErrors()
        self._progress = ProgressReport(log.info)

    def take(self, event: Event) -> None:
        """Add an event."""
        self.summary.take(event)
        if isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Failed):
            self.failed.append(event)
            if event.because is None:
                self._add_error(event)
        else:
            log_text(self._log, event)

    def _add_error(self, event: Failed) -> None:
        """Log the first of equal errors, in one line if the run's error has all of it."""
        message = failure_message(event, self._pipeline)
        if number := self.errors.add(event.partition, message, event.stage):
            self._log.error(first_line(message) if number <= SHOWN_ERRORS else message)


def failure_message(failure: Failed, pipeline: str) -> str:
    """Return the error, masked, with its stage and partition unless it begins with a place."""
    text = masked(str(failure.error))
    if text.startswith(("stage ", "pipeline ")):
        return text
    return f"stage '{pipeline}/{failure.stage}'{in_partition(failure.partition)}: {text}"


def first_line(message: str) -> str:
    """Return the first line of a message, truncated."""
    line = message.partition("\n")[0]
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"
