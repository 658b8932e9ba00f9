"""The disturbances of a round, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from support.chaos_pipeline import KEYS
from vane_dagster import testing

_START_SECONDS, _WORK_SECONDS = 1.5, 2.5
TINY_KB = (40, 110)
"""Minimum and maximum size in KB of a disk that is too small."""


@dataclass(frozen=True)
class Poison:
    """Rows that fail on every computation, by the stage in which they fail."""

    raising: dict[str, tuple[int, ...]]
    killing: dict[str, tuple[int, ...]]

    def ids(self, stage: str) -> set[int]:
        return {*self.raising.get(stage, ()), *self.killing.get(stage, ())}

    def errors(self, stage: str) -> dict[int, str]:
        found = dict.fromkeys(self.raising.get(stage, ()), "PoisonError")
        return {**found, **dict.fromkeys(self.killing.get(stage, ()), "WorkerDied")}

    def faults(self) -> list[testing.Fault]:
        raising = [
            testing.CallFault(stage, ids=ids, error="PoisonError")
            for stage, ids in self.raising.items()
        ]
        killing = [testing.CallFault(stage, "kill", ids=ids) for stage, ids in self.killing.items()]
        return [*raising, *killing]


@dataclass(frozen=True, order=True)
class Kill:
    """A process that is killed.

    Attributes:
        at_work: Whether the clock starts with the first file that the run writes, or with the run.
        seconds: Seconds until the kill.
        kind: "driver", "worker", "pool_manager" or "idle".
    """

    at_work: bool
    seconds: float
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.seconds} s into the {'work' if self.at_work else 'run'}"


@dataclass(frozen=True)
class Disturbed:
    """A disturbed run; `partition` is None for all."""

    partition: str | None
    faults: tuple[testing.Fault, ...]
    kills: tuple[Kill, ...]


@dataclass(frozen=True)
class Plan:
    """The plan of one round.

    Attributes:
        seed: The seed of all draws.
        labels: Handling of rows that cannot be labeled.
        poison: Rows that fail, also in the last run.
        former: Whether other rows were published before.
        runs: The disturbed runs.
        tiny: Size in KB of a store's disk that is too small for the disturbed runs; 0 for a large
            one.
    """

    seed: int
    labels: str
    poison: Poison
    former: bool
    runs: tuple[Disturbed, ...]
    tiny: int

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: labels={self.labels}, former={self.former}, tiny={self.tiny}",
            *(f"  poison: {fault}" for fault in self.poison.faults()),
        ]
        for run in self.runs:
            lines.append(f"  run of {run.partition or 'all'}:")
            lines += [f"    kill {kill}" for kill in run.kills]
            lines += [f"    {fault}" for fault in run.faults]
        return "\n".join(lines)


def drawn(seed: int, ids: list[int], kinds: tuple[str, ...], mounts: bool) -> Plan:
    """Draw the plan of a round.

    Args:
        seed: The seed of all draws.
        ids: The source's ids.
        kinds: Processes that may be killed besides the driver.
        mounts: Whether small file systems can be mounted.
    """
    draw = random.Random(seed)
    poisoned = draw.sample(ids, 7)
    raising = {
        "scores": tuple(poisoned[: draw.randint(0, 3)]),
        "labels": tuple(poisoned[3 : 3 + draw.randint(0, 2)]),
    }
    killing = {}
    if draw.random() < 0.08:  # the search for such a row starts a dozen workers
        killing[draw.choice(("scores", "labels"))] = (poisoned[6],)
    tiny = draw.randint(*TINY_KB) if mounts and draw.random() < 0.12 else 0
    runs = []
    for number in range(2 if draw.random() < 0.25 else 1):
        partition = draw.choice((None, None, *KEYS))
        partitions = 1 if partition else len(KEYS)
        faults = [draw.choice(_FAULTS)(draw, partitions) for _ in range(draw.randint(0, 2))]
        killed = [draw.choice(kinds) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.4 or not (faults or killed or tiny or number):
            killed.append("driver")
        kills = sorted(_kill(draw, kind) for kind in killed)
        runs.append(Disturbed(partition, tuple(faults), tuple(kills)))
    labels = draw.choice(("quarantine", "null"))
    former = not tiny and draw.random() < 0.25
    if former:  # the scores that the former run has made are copied
        raising["scores"] = ()
        killing.pop("scores", None)
    poison = Poison({s: ids for s, ids in raising.items() if ids}, killing)
    return Plan(seed, labels, poison, former, tuple(runs), tiny)


def _kill(draw: random.Random, kind: str) -> Kill:
    at_work = draw.random() < 0.8
    most = _WORK_SECONDS if at_work else _START_SECONDS
    return Kill(at_work, round(draw.uniform(0.0, most), 2), kind)


def _some(draw: random.Random, most: int) -> list[int]:
    return sorted(draw.sample(range(1, most), draw.randint(1, 3)))


def _models(draw: random.Random) -> str:
    return draw.choice(("scores", "labels"))


# Each takes the number of partitions, to draw when the fault occurs. No fault exhausts memory: a
# warm worker remembers the batch size that fits, so after some rounds single rows would fail.
_FAULTS: tuple[Callable[[random.Random, int], testing.Fault], ...] = (
    lambda draw, n: testing.StorageFault(
        "*", "disconnect", draw.choice(("write", "read", "list")), calls=_some(draw, 30 * n)
    ),
    lambda draw, n: testing.StorageFault(
        draw.choice(("*/store/*", "*/out/*", "*/joined/parts/*")), calls=draw.randint(1, 6 * n)
    ),
    lambda draw, n: testing.StorageFault("*/manifests/*", "kill", calls=draw.randint(1, 6 * n)),
    lambda draw, n: testing.StorageFault("*/out/*", "kill", calls=draw.randint(1, 12 * n)),
    lambda draw, n: testing.StorageFault("*/parts/*", "kill", calls=draw.randint(1, 24 * n)),
    lambda draw, n: testing.StorageFault("*", "kill", "delete", calls=draw.randint(1, 3)),
    lambda draw, n: testing.StorageFault("*", "denied", "delete", calls=draw.randint(1, 3)),
    lambda draw, n: testing.StorageFault("*", "denied", "list", calls=draw.randint(1, 30)),
    lambda draw, n: testing.CallFault(_models(draw), "disconnect", calls=_some(draw, 20 * n)),
    lambda draw, n: testing.CallFault(_models(draw), "kill", calls=draw.randint(1, 20 * n)),
    lambda draw, n: testing.LoadFault(draw.choice(("Scorer", "Labeller")), "kill", calls=1),
)
