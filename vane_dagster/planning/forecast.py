"""Forecasts: what a run would compute and why, and what it would cost by former partitions."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Union

import numpy as np

from vane_dagster._texts import EqualErrors, Printed, amount, count, duration, listed
from vane_dagster.errors import BudgetError, StoreError, names
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.causes import RETRIED, describe
from vane_dagster.planning.plan import RunPlan
from vane_dagster.providers.batch_api import WINDOW_SECONDS
from vane_dagster.storage.adoptions import latest
from vane_dagster.storage.definition_texts import differences, read_texts
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.store import Store

Interval = tuple[float, float]
"""The lowest and the highest value to expect."""
Known = Literal["exact", "at_most", "about", "unknown"]
Place = tuple[Union[str, None], str, int]
"""A partition, a node, and the index of a fragment."""

_ORDER: Sequence[Known] = ("exact", "at_most", "about", "unknown")
_MAX_PARTITIONS, _MAX_VERSIONS = 20, 3
"""The partitions to measure by, and the latest manifests of each."""
_MAX_UNPLANNED = 10
_TAIL = 0.1
_MARGIN, _FEW_PARTS_MARGIN = 0.1, 0.25
_MAX_LINES = 40
_LIMITED = {"max_gpu_hours": ("gpu_hours", "take {} GPU hours"), "max_cost": ("cost", "cost {}")}
"""The limits of a run's config: the amount of a stage's forecast that each bounds, as text."""


@dataclass(frozen=True)
class StageForecast:
    """What a run would compute of a stage.

    Attributes:
        stage: The stage.
        partitions: Number of partitions that could be planned.
        up_to_date: Number of these that need nothing.
        fragments: Fragments to compute.
        rows: Input rows of the fragments to compute.
        rows_are: "exact"; "at_most" if rows that equal others are copied, or if a stage upstream
            that is computed first may drop some; "about" if it makes several of one, and "unknown"
            if it never ran: one of each is counted then.
        copied: Input rows of these fragments that equal stored rows, where rows were counted.
        due: The partitions that are not up to date. Each has a count for each cause, for example
            of changed files; the key is None for an unpartitioned pipeline.
        worker_seconds: Seconds that all workers together would take; None without stored parts to
            measure by.
        seconds: Seconds on the clock if nothing else uses the workers; likewise.
        load_seconds: Seconds in which a worker loads the model, if it is not loaded yet; None for a
            stage without one, or if it is not known.
        gpu_hours: GPU hours reserved while workers compute; None for a stage without GPUs.
        tokens: Tokens of prompts and answers; None for a stage without any.
        token_cost: Price of these tokens; None without prices.
        cost: Price of tokens and GPU hours together; None without prices.
        sampled: Rows of a sample by which it was measured; 0 if stored rows are the measure.
        is_sampled_on_request: A plan with a sample may measure it, where none was asked for: a
            stage that does not publish.
        before_edit: Whether the stored rows that are the measure are from before an edit.
        adopted: The adoptions by which stored results stay in force, each in a line, the latest
            last.
        by_fragment: Why a changed row costs its whole fragment; empty if it does not, or if the
            fragment is computed because of an edit.
        edits: What was edited since the stored results were made, as lines of a unified diff; empty
            if that is not known.
    """

    stage: str
    partitions: int
    up_to_date: int
    fragments: int
    rows: int
    rows_are: Known
    due: Mapping[str | None, Mapping[str, int]]
    copied: int = 0
    worker_seconds: Interval | None = None
    seconds: Interval | None = None
    load_seconds: float | None = None
    gpu_hours: Interval | None = None
    tokens: Interval | None = None
    token_cost: Interval | None = None
    cost: Interval | None = None
    sampled: int = 0
    is_sampled_on_request: bool = True
    before_edit: bool = False
    adopted: Sequence[str] = ()
    by_fragment: str = ""
    edits: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the forecast in words: what is to be computed, why, and what it costs."""
        todo = self.partitions - self.up_to_date
        adopted = latest(self.adopted)  # --json has all
        if not todo:
            yield "up to date" if self.partitions else "not planned"
            yield from adopted
            return
        unknown = "if each row makes one, "
        rows = {"at_most": "at most ", "about": "about ", "unknown": unknown}.get(self.rows_are, "")
        rows += f"{count(self.rows, 'row')} in {count(self.fragments, 'fragment')}"
        rows = rows if self.fragments else "nothing to compute"
        copied = f", {count(self.copied, 'row')} copied from equal ones" if self.copied else ""
        yield f"{todo:,} of {count(self.partitions, 'partition')}: {rows}{copied}"
        yield from adopted
        yield f"because: {describe(self.due, self.partitions)}"
        if self.by_fragment:
            yield f"by whole fragments: {self.by_fragment}"
        if self.fragments:
            yield f"cost: {', '.join(self._costs())}"
        yield from self.edits[:_MAX_LINES]
        if len(self.edits) > _MAX_LINES:
            yield f"... {len(self.edits) - _MAX_LINES:,} more lines; --json shows all"

    def _costs(self) -> Iterator[str]:
        hint = "; plan --sample 50 measures it" if self.is_sampled_on_request else ""
        if self.seconds is None or self.worker_seconds is None:
            unknown = f"unknown without stored results{hint}"
            yield unknown if self.rows else "less than a second"
            return
        shared = self.seconds != self.worker_seconds and self.seconds[1] >= 1
        yield _times(self.seconds) + f" ({_times(self.worker_seconds)} of worker time)" * shared
        if self.sampled:
            yield f"measured on a sample of {count(self.sampled, 'row')}"
        if self.load_seconds and self.load_seconds >= 1:
            yield f"{duration(self.load_seconds)} to load the model where it is not loaded"
        for taken, unit in ((self.gpu_hours, "GPU hours"), (self.tokens, "tokens")):
            if taken:
                yield f"{between(taken)} {unit}"
        if self.cost:
            yield f"a price of {between(self.cost)}"
        if self.before_edit:
            yield f"estimated from results before the edit{hint}"


@dataclass(frozen=True, repr=False)
class Forecast(Printed):
    """What a run would compute. It prints, draws itself in notebooks, and becomes a dict.

    Attributes:
        pipeline: The pipeline's name.
        stages: The selected stages, upstream first.
        unplanned: The partitions that cannot be planned, with the error; the key is None for an
            unpartitioned pipeline.
        holdups: What would stop the run or hold it up, each in a sentence: failed blocking checks,
            budgets, pools that do not fit, servers that have to start.
        warnings: What the run would warn of at its beginning.
    """

    pipeline: str
    stages: Sequence[StageForecast]
    unplanned: Mapping[str | None, str]
    holdups: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def is_up_to_date(self) -> bool:
        """Whether a run would compute nothing."""
        done = (0 < stage.up_to_date == stage.partitions for stage in self.stages)
        return not self.unplanned and all(done)

    @property
    def seconds(self) -> Interval | None:
        """Seconds on the clock: of the slowest stage, to all one after the other.

        None if the seconds of a stage are not known.
        """
        todo = [stage for stage in self.stages if stage.fragments]
        known = [stage.seconds for stage in todo if stage.seconds]
        if not known or len(known) < len(todo):
            return None
        loads = sum(stage.load_seconds or 0.0 for stage in todo)
        return max(low for low, _ in known), sum(high for _, high in known) + loads

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a dict of plain values, for JSON, with the sums of all stages."""
        sums = {name: _total(self, name) for name in ("gpu_hours", "tokens", "cost")}
        return {**asdict(self), "seconds": self.seconds, **sums}

    def __str__(self) -> str:
        lines = [f"pipeline {self.pipeline}: what a run would compute"]
        width = max((len(stage.stage) for stage in self.stages), default=0)
        for stage in self.stages:
            first, *others = stage.lines()
            lines.append(f"  {stage.stage:{width}}  {first}")
            lines += [f"  {'':{width}}  {line}" for line in others]
        errors = EqualErrors()
        for key, why in self.unplanned.items():
            errors.add(key, why)
        if unplanned := errors.texts():
            shown = [f"not planned: {text}" for text in unplanned]
            lines.append("  " + listed(shown, _MAX_UNPLANNED, "\n  "))
        if (in_all := [*self._in_all()]) and sum(bool(each.fragments) for each in self.stages) > 1:
            unknown = [each.stage for each in self.stages if each.rows and not each.seconds]
            without = f", without {names(unknown)}" if unknown else ""
            lines.append(f"  total{without}: {', '.join(in_all)}")
        lines += [f"  may stop or delay it: {text}" for text in self.holdups]
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def _in_all(self) -> Iterator[str]:
        """Yield what all stages with a known cost take together."""
        if self.seconds:
            yield f"{_times(self.seconds)} elapsed"
        for taken, text in (("tokens", "{} tokens"), ("cost", "a price of {}")):
            if (total := _total(self, taken))[1]:
                yield text.format(between(total))


@dataclass(frozen=True)
class CountedRows:
    """Rows of a plan that were counted by their keys; see `engine.row_counts`.

    Attributes:
        rows: The rows of stages that are not stored and follow from stored rows by SQL and copies
            alone, and how many others there are at most.
        computed: Of keyed stages, how many input rows are computed at least and at most, and how
            many are copied in any case.
        repeated: How many of these equal one of another fragment, by stage; the run may copy them.
        problems: Errors of rows that could not be counted.
    """

    rows: Mapping[Place, tuple[int, int]]
    computed: Mapping[Place, tuple[int, int, int]]
    repeated: Mapping[str, int]
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Sample:
    """What a preview took to compute some rows of a stage.

    Attributes:
        parts: The parts that it made; none if no row reached the stage.
        warm_up: Those of its first row, which was computed before the others: first calls are
            slower.
        load_seconds: Seconds in which a worker loaded the model; None if it was loaded before.
    """

    parts: Sequence[PartInfo]
    warm_up: Sequence[PartInfo]
    load_seconds: float | None = None


NOT_COUNTED = CountedRows({}, {}, {})


def forecast(
    plan: RunPlan,
    store: Store,
    gpu_hour_price: float | None = None,
    counted: CountedRows = NOT_COUNTED,
    measure: Callable[[Sequence[str]], Mapping[str, Sample]] | None = None,
) -> Forecast:
    """Return what a run by a plan would compute, and its cost by the store's manifests."""
    forecaster = _Forecaster(plan, store, gpu_hour_price, counted)
    if measure is not None:
        forecaster.take_samples(measure)
    stages = [forecaster.stage(stage) for stage in plan.selected]
    unplanned = {key: str(error) for key, error in plan.failed.items()}
    return Forecast(plan.pipeline.name, stages, unplanned, counted.problems, plan.warnings)


def check_limits(
    plan: RunPlan,
    store: Store,
    limits: Mapping[str, float | None],
    gpu_hour_price: float | None,
    count_rows: Callable[[], CountedRows],
) -> Iterator[str]:
    """Yield which stages have no cost to compare with a limit of the run, or raise `BudgetError`.

    `count_rows` counts rows by their keys; it is called if the run may exceed a limit otherwise.
    """
    given = {name: most for name, most in limits.items() if most is not None}
    if not given:
        return
    forecasted = forecast(plan, store, gpu_hour_price)
    if any(_total(forecasted, _LIMITED[name][0])[1] > most for name, most in given.items()):
        forecasted = forecast(plan, store, gpu_hour_price, count_rows())
    for name, most in given.items():
        field, text = _LIMITED[name]
        total = _total(forecasted, field)
        if total[1] > most:
            raise BudgetError(
                f"pipeline {plan.pipeline.name!r}: the run would {text.format(between(total))}, "
                f"and its {name} is {amount(most, 6)}; nothing was computed. Raise {name}, or run "
                "fewer partitions or stages; `vane-dagster plan --rows` shows what is due, and why"
            )
        for stage in forecasted.stages:
            is_priced = _is_priced(plan.pipeline[stage.stage].spec, field, gpu_hour_price)
            if stage.fragments and is_priced and not getattr(stage, field):
                why = "because it has no stored results to estimate from"
                yield f"{stage.stage}: {name} does not include it, {why}"


def _total(forecasted: Forecast, field: str) -> Interval:
    """Return an amount of all stages together."""
    known = [each for stage in forecasted.stages if (each := getattr(stage, field))]
    return sum(low for low, _ in known), sum(high for _, high in known)


def _is_priced(spec: StageSpec, field: str, gpu_hour_price: float | None) -> bool:
    has_gpus = spec.runs_udf and bool(spec.gpus)
    if field == "gpu_hours":
        return has_gpus
    return bool(spec.usage and spec.usage.prices) or (has_gpus and gpu_hour_price is not None)


@dataclass(frozen=True)
class _Count:
    """Rows of fragments.

    Attributes:
        most: How many there are at most.
        expected: How many to expect.
        known: What is known about that.
        computed: Of rows to compute, how many are computed at least.
        copied: Others that are copied, if they were counted.
    """

    most: int = 0
    expected: float = 0.0
    known: Known = "exact"
    computed: float = 0.0
    copied: int = 0


class _Forecaster:
    """Forecasts the stages of a plan."""

    def __init__(
        self, plan: RunPlan, store: Store, gpu_hour_price: float | None, counted: CountedRows
    ) -> None:
        self._gpu_hour_price = gpu_hour_price
        self._plan, self._pipeline, self._store = plan, plan.pipeline, store
        self._counted, self._is_sampled = counted, False
        # Only for stages with something to compute: a store that is up to date is listed once.
        self._history = functools.cache(self._read_history)
        self._partitions = {each.key: each for each in plan.partitions}
        self._rows = functools.cache(self._count_rows)
        self._read = functools.cache(functools.partial(store.read, plan.pipeline.name))

    def take_samples(self, measure: Callable[[Sequence[str]], Mapping[str, Sample]]) -> None:
        """Measure the stages to compute whose present definition has computed nothing yet."""
        self._is_sampled = True
        needed = self._plan.needed()
        unknown = [stage for stage in needed if not self._history(stage).is_current]
        samples = measure(unknown) if unknown else {}
        for stage in samples.keys() & {*unknown}:
            self._history(stage).take(samples[stage])

    def stage(self, stage: str) -> StageForecast:
        """Return what is to be computed of a stage, and what it costs."""
        plans = [partition.stages[stage] for partition in self._plan.partitions]
        due = self._plan.due(stage)
        counts = [
            self._due(key, stage, index)
            for key, partition in self._partitions.items()
            for index in partition.stages[stage].missing
        ]
        repeated, edits = self._counted.repeated.get(stage, 0), self._edits(stage) if due else ()
        spec, again = self._pipeline[stage].spec, any(p.former for p in plans if p.done is None)
        known: list[Known] = ["at_most" if repeated else "exact", *(each.known for each in counts)]
        estimate = StageForecast(
            stage=stage,
            partitions=len(plans),
            up_to_date=len(plans) - len(due),
            fragments=len(counts),
            rows=sum(each.most for each in counts),
            rows_are=max(known, key=_ORDER.index),
            due={key: dict(each) for key, each in due.items()},
            copied=sum(each.copied for each in counts),
            is_sampled_on_request=not (spec.publishes or self._is_sampled),
            adopted=[each.summary for each in self._plan.adopted.get(stage, ())],
            by_fragment=spec.why_by_fragment(self._pipeline) if again and not edits else "",
            edits=edits,
        )
        if not counts:
            return estimate
        least = max(0.0, sum(each.computed for each in counts) - repeated)
        expected = sum(each.expected for each in counts)
        estimate = self._history(stage).priced(estimate, spec, least, expected)
        if estimate.gpu_hours and self._gpu_hour_price is not None:
            of_gpus = [hours * self._gpu_hour_price for hours in estimate.gpu_hours]
            low, high = estimate.cost or (0.0, 0.0)
            estimate = replace(estimate, cost=(low + of_gpus[0], high + of_gpus[1]))
        return estimate

    def _due(self, key: str | None, stage: str, index: int) -> _Count:
        """Return the rows of a fragment of a stage to compute."""
        partition, rows = self._partitions[key], self._rows(key, self._base(stage), index)
        plan = partition.stages[stage]
        counted = self._counted.computed.get((key, stage, index))
        if counted is not None:
            least, most, copied = counted
            return replace(_counted(least, most - least), computed=least, copied=copied)
        if plan.row_definition or stage not in partition.schemas:  # the run infers one upstream
            rows = replace(rows, known=max(rows.known, "at_most", key=_ORDER.index))
            if plan.former and {*plan.causes} == {RETRIED}:
                part = self._read(stage, key, plan.former).parts[index]
                failed = part.quarantined + part.nulled
                rows = _Count(failed, failed, "at_most")
        history = self._history(stage)
        may_copy = plan.former and not self._plan.forced
        may_copy = may_copy and not plan.equal_rows.isdisjoint(history.row_definitions)
        return replace(rows, computed=0.0 if may_copy else rows.expected * history.computed)

    def _edits(self, stage: str) -> Sequence[str]:
        """Return how the definition differs from that of the last results to replace."""
        plans = [each.stages[stage] for each in self._plan.partitions]
        made_by = [each.made_by for each in plans if not each.done and each.made_by]
        others = [each for each in made_by if each not in self._equal(stage)]
        with contextlib.suppress(StoreError):  # the texts are damaged
            name = self._pipeline.name
            if others and (before := read_texts(self._store, name, stage, others[-1])) is not None:
                return [*differences(before, self._pipeline[stage].spec.texts(self._pipeline))]
        return ()

    def _equal(self, stage: str) -> Sequence[str]:
        """Return the definitions that count as a stage's own, itself included."""
        return self._plan.adoptions[stage].equals(self._plan.definitions[stage])

    def _read_history(self, stage: str) -> _History:
        """Open the latest manifests of some partitions that are whole, the latest first.

        Several of a partition: one whose run has retried some rows has copies of the others.
        """
        names: dict[str, list[str]] = {}
        for folder, name in self._store.history(self._pipeline.name, stage):
            names.setdefault(folder, []).append(str(name))

        def latest(folder: str) -> Sequence[Manifest]:
            opened = []
            for name in names[folder][: -_MAX_VERSIONS - 1 : -1]:
                with contextlib.suppress(StoreError):  # it is damaged, or was collected
                    opened.append(self._store.opened(self._pipeline.name, stage, folder, name))
            return opened

        chosen = sorted(names)[:: max(1, -(-len(names) // _MAX_PARTITIONS))]
        return _History(in_threads(latest, chosen), self._equal(stage))

    def _base(self, stage: str) -> str:
        """Return the node whose rows are the input rows of a stage."""
        return self._pipeline[stage].spec.base_node(self._pipeline)

    def _count_rows(self, key: str | None, stage: str, index: int) -> _Count:
        """Return the rows of a stage in a fragment: stored ones, or those to expect."""
        partition = self._partitions[key]
        if (counted := self._counted.rows.get((key, stage, index))) is not None:
            return _counted(*counted)
        if stage == SOURCE:
            rows = partition.fragments[index].rows
        elif stage in partition.inputs:
            rows = partition.inputs[stage].parts[index].rows
        elif index in partition.stages[stage].parts:
            rows = partition.stages[stage].parts[index].info.rows
        else:
            given = self._rows(key, self._base(stage), index)
            spec, measured = self._pipeline[stage].spec, self._history(stage).rows_ratio
            ratio = 1.0 if measured is None else measured
            if spec.runs_udf and spec.cardinality == "zero_to_many":
                made: Known = "unknown" if measured is None else "about"
                known = max(given.known, made, key=_ORDER.index)
                return _Count(round(given.most * ratio), given.expected * ratio, known)
            known = max(given.known, "at_most", key=_ORDER.index)
            return _Count(given.most, given.expected * min(1.0, ratio), known)
        return _counted(rows)


def _counted(rows: int, unknown: int = 0) -> _Count:
    """Return so many rows, and at most so many others."""
    return _Count(rows + unknown, rows + unknown, "at_most" if unknown else "exact")


class _History:
    """What some stored partitions of a stage took to compute.

    Attributes:
        is_current: Whether they were computed by the stage's present definition. If none was,
            former results are the measure.
        row_definitions: The row definitions of all of them.
    """

    def __init__(self, partitions: Sequence[Sequence[Manifest]], own: Collection[str]) -> None:
        every = [each for manifests in partitions for each in manifests]
        self.row_definitions = {each.row_definition for each in every}
        current = [[m for m in each if m.definition in own] for each in partitions]
        self.is_current = any(rows_computed(_distinct(each)) for each in current)
        chosen = current if self.is_current else partitions
        self._manifests = [each for manifests in chosen for each in manifests]
        self._latest: Sequence[PartInfo] = _distinct(each[0] for each in chosen if each)
        self._parts: Sequence[PartInfo] = _distinct(self._manifests)
        self._timed = self._parts
        self._sample: Sample | None = None

    def take(self, sample: Sample) -> None:
        """Measure by a sample."""
        if sample.parts:
            self._sample, self._latest = sample, sample.parts
            self._parts = [*sample.warm_up, *sample.parts]
            self._timed = sample.parts if rows_computed(sample.parts) else sample.warm_up

    @functools.cached_property
    def rows_ratio(self) -> float | None:
        """Output rows for each input row; None without stored parts, or if a sample has none."""
        rows_in, rows = (sum(getattr(p, of) for p in self._latest) for of in ("rows_in", "rows"))
        return rows / rows_in if rows_in and (rows or not self._sample) else None

    @functools.cached_property
    def computed(self) -> float:
        """The share of input rows that were computed, and not copied from equal ones."""
        rows_in = sum(part.rows_in for part in self._latest)
        return min(1.0, rows_computed(self._parts) / rows_in) if rows_in else 1.0

    def priced(
        self, estimate: StageForecast, spec: StageSpec, least: float, most: float
    ) -> StageForecast:
        """Return a forecast with what its rows cost.

        `least` are the input rows that are certainly computed, `most` those to expect.
        """

        def of(
            amount: Callable[[PartInfo], float | None], parts: Sequence[PartInfo] = self._parts
        ) -> Interval | None:
            taken = [(amount(part), part.rows_in - part.copied) for part in parts]
            rates = [(each / rows, rows) for each, rows in taken if each is not None and rows > 0]
            if not rates:
                return None
            amounts, rows = zip(*rates)
            shares: Any = (_TAIL, 1 - _TAIL)  # of all rows
            low, high = np.quantile(amounts, shares, weights=rows, method="inverted_cdf").tolist()
            margin = _MARGIN + _FEW_PARTS_MARGIN / math.sqrt(len(rates))
            return low * (1 - margin) * least, high * (1 + margin) * most

        work = of(lambda part: part.made.seconds if part.made else None, self._timed)
        if work is None:
            return estimate
        busy, most_busy = self._workers(spec)
        known: dict[str, Any] = {
            "worker_seconds": work,
            "seconds": (work[0] / most_busy, work[1] / busy),
            "load_seconds": self._load_seconds(),
            "sampled": sum(part.rows_in for part in self._latest) if self._sample else 0,
            "before_edit": not (self.is_current or self._sample),
        }
        if spec.runs_udf and spec.gpus:
            known["gpu_hours"] = tuple(each * spec.gpus / 3600 for each in work)
        if (usage := spec.usage) is not None:
            known["tokens"] = of(lambda part: tokens_of(usage.used(part.spent)))
            if usage.prices:
                cost = of(lambda part: usage.expected_cost(usage.used(part.spent)))
                known["token_cost"] = known["cost"] = cost
            for name, limit in usage.per_minute.items():
                amount = (least, most) if "request" in name else known["tokens"] or (0.0, 0.0)
                pace = [60 * each / limit for each in amount]
                known["seconds"] = tuple(map(max, known["seconds"], pace))
            if usage.in_batches:  # a provider may take all of its time for them
                known["seconds"] = 0.0, max(WINDOW_SECONDS, known["seconds"][1])
        return replace(estimate, **known)

    def _workers(self, spec: StageSpec) -> tuple[float, float]:
        """Return the number of workers to expect: at least those that were busy, at most all."""
        busy = max(1.0, self._mean("worker_seconds", "seconds") or 1.0)
        if not spec.runs_udf or spec.concurrency is None:
            return busy, busy
        most = max(1, spec.concurrency[1])
        return min(busy, most), most

    def _load_seconds(self) -> float | None:
        if self._sample is not None:
            return self._sample.load_seconds
        return self._mean("model_load_seconds", "model_loads")

    def _mean(self, name: str, unit: str) -> float | None:
        """Return a figure of the computations for each unit of another one."""
        known = [m.figures for m in self._manifests if name in m.figures and m.figures.get(unit)]
        units = sum(each[unit] for each in known)
        return sum(each[name] for each in known) / units if units else None


def _distinct(manifests: Iterable[Manifest]) -> Sequence[PartInfo]:
    """Return the parts of manifests, once each."""
    return [*{part.name: part for manifest in manifests for part in manifest.parts}.values()]


def rows_computed(parts: Iterable[PartInfo]) -> int:
    """Return the input rows of parts that were computed, and not copied from equal ones."""
    return sum(part.rows_in - part.copied for part in parts if part.made)


def tokens_of(used: Mapping[str, int]) -> int:
    """Return the tokens of prompts and answers together."""
    return used["prompt_tokens"] + used["completion_tokens"]


def between(interval: Interval, text: Callable[[float], str] = amount) -> str:
    """Return an interval as text."""
    low, high = map(text, interval)
    return high if low == high else f"up to {high}" if not interval[0] else f"{low} to {high}"


def _times(interval: Interval) -> str:
    return "less than a second" if interval[1] < 1 else between(interval, duration)
