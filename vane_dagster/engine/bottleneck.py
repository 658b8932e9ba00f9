"""Which stages limit a run, and the one option that would shorten it most.

The pools of a wave work concurrently. So a wave takes as long as its slowest pool would if all of
its workers computed all the time; in addition, models are loaded, and the first fragments pass the
other stages. More workers shorten the first part, other options the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vane_dagster._texts import count, resource
from vane_dagster.errors import names
from vane_dagster.events import PoolTime

_MOST_WORKERS = 4
_FRAGMENTS = 4
_LEAST_ROWS = 100
"""Fragments of fewer rows are not worth splitting."""
_MOST_WAITING = 0.5
"""Workers that wait for input for longer would not compute sooner beside others."""
_LEAST_IN_CODE = 0.5
"""Workers that are less in their code do not wait in it, so more than CPUs do not help."""
_SMALL_FRAGMENTS = 10
_LEAST_GAIN = 1.1
_LEAST_SECONDS = 3.0
"""A run is not advised to save less."""


@dataclass
class WaveTime:
    """What a wave took.

    Attributes:
        resources: See `WaveStarted`.
        pools: Its pools.
        is_cluster: See `WaveStarted`.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    pools: Sequence[PoolTime] = ()
    is_cluster: bool = False

    @property
    def by_speed(self) -> list[PoolTime]:
        """Its pools, the slowest first."""
        return sorted(self.pools, key=lambda pool: pool.least_seconds, reverse=True)

    @property
    def slowest_start(self) -> PoolTime:
        """The pool that takes longest if the time its workers load in is added."""
        return max(self.pools, key=_with_loads)


def _with_loads(pool: PoolTime) -> float:
    return pool.loading / max(1, pool.workers) + pool.least_seconds


@dataclass(frozen=True)
class Advice:
    """What limits a run, and what would shorten it.

    Attributes:
        pool: The slowest pool.
        started: The slowest pool with its loads.
        option: The option that helps most; empty if none helps much.
        saved: Seconds that it is predicted to save.
        gain: The time that the run took, divided by the predicted time.
    """

    pool: PoolTime
    started: PoolTime
    option: str = ""
    saved: float = 0.0
    gain: float = 1.0

    def __str__(self) -> str:
        pool, shares, starts = self.pool, self.pool.shares, self.started.shares
        text = "bottleneck: "
        if starts["loading"] > starts["computing"]:
            share = f"{starts['loading']:.0%} of their time"
            text += f"starting the workers for {_name(self.started)}, {share}; then "
        limit = f", limited by {pool.limited_by}" if pool.limited_by else ""
        text += (
            f"{_name(pool)}, whose "
            f"{count(pool.workers, 'worker')} computed {shares['computing']:.0%} of the time{limit}"
        )
        if not self.option:
            least = f"{_LEAST_GAIN - 1:.0%} and at least {_LEAST_SECONDS:.0f} seconds"
            return f"{text}. No option is predicted to save {least}"
        return f"{text}. Predicted: the run is {self.gain:.1f} times as fast with {self.option}"


def _name(pool: PoolTime) -> str:
    return "reading and writing" if pool.is_io else names(pool.stages)


def advise(
    waves: Sequence[WaveTime],
    seconds: float,
    fragments: Mapping[str, int],
    fragment_rows: int,
    in_code: Mapping[str, float] = MappingProxyType({}),
    groups: float = 1.0,
) -> Advice | None:
    """Return what limits a run; None if it computed nothing.

    Args:
        waves: Its waves.
        seconds: Seconds that it took in all.
        fragments: Computed fragments by stage.
        fragment_rows: The most rows of a fragment; 0 if that is not known.
        in_code: The share of the computing that is in the user's code, by stage.
        groups: How many fragments ``small_files="group"`` would make one of, on average.
    """
    advices = [
        Advice(
            wave.by_speed[0],
            wave.slowest_start,
            option,
            saved,
            gain=seconds / max(seconds - saved, 1e-9),
        )
        for wave in waves
        if any(pool.computing for pool in wave.pools)
        for option, saved in [
            ("", 0.0),
            *_options(wave, fragments, fragment_rows, in_code, groups),
        ]
    ]
    best = max(advices, key=lambda advice: advice.saved, default=None)
    if best is None or (best.gain >= _LEAST_GAIN and best.saved >= _LEAST_SECONDS):
        return best
    slowest = max(advices, key=lambda each: each.pool.least_seconds)
    return Advice(slowest.pool, slowest.started)


def _options(
    wave: WaveTime,
    fragments: Mapping[str, int],
    fragment_rows: int,
    in_code: Mapping[str, float],
    groups: float,
) -> Iterator[tuple[str, float]]:
    """Yield the options that would shorten a wave, each with the seconds that it saves."""
    slowest, *others = wave.by_speed
    own = [stage for pool in wave.pools for stage in pool.stages]
    passed = max((fragments.get(stage, 0) for stage in own), default=0)
    next_slowest = others[0].least_seconds if others else 0.0
    needed = math.ceil(slowest.computing / next_slowest) if next_slowest else math.inf
    workers = int(min(needed, _MOST_WORKERS * slowest.workers))
    code = 0.0 if slowest.is_io else max(in_code.get(stage, 1.0) for stage in slowest.stages)
    cpus = wave.resources.get("CPU", math.inf)
    if not slowest.is_io and code < _LEAST_IN_CODE and "GPU" not in slowest.bundle:
        workers = int(min(workers, cpus))
    if groups >= _SMALL_FRAGMENTS:
        outside = (1 - code) * slowest.least_seconds
        yield 'small_files="group" of vd.parquet', outside * (1 - 1 / groups)
    if slowest.shares["input"] > _MOST_WAITING:
        workers = 0
    smaller = f"fragment_rows={fragment_rows // _FRAGMENTS}, a quarter of the current value"
    can_split = fragment_rows >= _LEAST_ROWS
    if workers > slowest.workers and not slowest.limited_by:
        saved = slowest.least_seconds - max(next_slowest, slowest.computing / workers)
        if passed >= 2 * workers:  # a worker computes a whole fragment, as long as now
            saved *= 1 - 1 / passed
        if not slowest.is_io:
            yield _more_workers(wave, slowest, workers), saved
        elif slowest.workers < cpus and can_split:
            yield smaller, saved
        elif slowest.workers >= cpus:
            yield f"{workers} CPUs for reading and writing instead of {slowest.workers}", saved
    if passed and can_split:
        first = sum(pool.least_seconds for pool in others) / passed
        room = slowest.room / max(1, slowest.workers)
        yield smaller, first * (1 - 1 / _FRAGMENTS) + room
    if not wave.is_cluster:
        yield (
            "warm workers, which RayCompute keeps after this process ends",
            _with_loads(wave.slowest_start) - slowest.least_seconds,
        )


def _more_workers(wave: WaveTime, pool: PoolTime, workers: int) -> str:
    """Describe more workers, and what they need beyond the resources of the cluster."""
    reserved = {
        name: sum(each.bundle.get(name, 0.0) * each.workers for each in wave.pools)
        + amount * (workers - pool.workers)
        for name, amount in pool.bundle.items()
    }
    short = [
        resource(name, reserved[name] - total)
        for name, total in wave.resources.items()
        if reserved.get(name, 0.0) > total
    ]
    text = f"concurrency={workers} instead of {pool.workers}"
    if short:
        return f"{text}, which needs {' and '.join(short)} more than there are"
    cpus = wave.resources.get("CPU", math.inf)
    if workers > cpus and "GPU" not in pool.bundle:
        return f"{text}, if its code waits more than it computes: there are {cpus:g} CPUs"
    return text
