"""What a run tells while it goes: the executor emits, the report phase listens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

from vane_dagster.commit.manifest import Manifest, ManifestName
from vane_dagster.errors import VaneError
from vane_dagster.execute.work import LoadReport
from vane_dagster.plan.plan import RunPlan


@dataclass
class StageStats:
    """Counts of one stage in one partition of a run.

    Attributes:
        computed: Fragments computed.
        reused: Fragments whose part the store held.
        rows_in: Rows read by what was computed.
        rows_out: Rows of what was computed.
        batches: Calls of the user's code.
        retries: Calls repeated after an error that may pass.
        faults: Rows that could not be computed.
        fits: The batch size that workers have found, or that fitted into memory where one did not.
        call_seconds: Seconds in the user's code, all workers together.
        work_seconds: Seconds of all work on the stage, all workers together.
        first: When the first work began, by `time.perf_counter`.
        last: When the last ended.
    """

    computed: int = 0
    reused: int = 0
    rows_in: int = 0
    rows_out: int = 0
    batches: int = 0
    retries: int = 0
    faults: int = 0
    fits: int | None = None
    call_seconds: float = 0.0
    work_seconds: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        """Time from the first work to the last."""
        return max(0.0, self.last - self.first)

    @property
    def rows_per_second(self) -> float:
        """Rows out a second, 0 where nothing was computed."""
        return self.rows_out / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Planned:
    """What there is to do is known."""

    plan: RunPlan


@dataclass(frozen=True)
class WaveStarted:
    """A wave began: its stages, and the models that it leased."""

    index: int
    count: int
    stages: tuple[str, ...]
    models: tuple[str, ...]


@dataclass(frozen=True)
class WorkerReady:
    """A worker of a model's pool can be used."""

    stages: tuple[str, ...]
    model: str
    worker: str
    report: LoadReport


@dataclass(frozen=True)
class Printed:
    """A user's code printed something."""

    stage: str
    text: str


@dataclass(frozen=True)
class Noticed:
    """Something went wrong that the run has dealt with."""

    text: str


@dataclass(frozen=True)
class Progress:
    """How far each stage is: source rows behind it, and all, by stage."""

    done: dict[str, int]
    total: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Committed:
    """A stage's partition is in force."""

    stage: str
    partition: str | None
    name: ManifestName
    manifest: Manifest
    stats: StageStats = field(default_factory=StageStats)


@dataclass(frozen=True)
class Unchanged:
    """A stage's partition was in force already."""

    stage: str
    partition: str | None
    name: ManifestName


@dataclass(frozen=True)
class Failed:
    """A stage's partition could not be computed or committed."""

    stage: str
    partition: str | None
    error: VaneError
    because: str | None = None


Event = Union[
    Planned, WaveStarted, WorkerReady, Printed, Noticed, Progress, Committed, Unchanged, Failed
]


def about_plan(plan: RunPlan) -> Iterator[Event]:
    """What went wrong while a run was planned."""
    for text in plan.warnings:
        yield Noticed(text)
    first, *others = plan.selected
    for key, error in plan.failed.items():
        yield Failed(first, key, error)
        for stage in others:
            yield Failed(stage, key, error, because=first)
