"""What a run tells while it goes: the executor emits, the report phase listens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

from vane_dagster.errors import VaneError
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.worker.protocol import LoadReport


@dataclass
class StageStats:
    """What a run did for one stage of one partition.

    Attributes:
        computed: Fragments computed.
        rows_in: Rows read by what was computed.
        rows_out: Rows of what was computed.
        batches: Calls of the user's code.
        retries: Calls repeated after an error that may pass.
        faults: Rows that could not be computed.
        fits: The batch size that workers have found, or that fitted into memory where one did not.
        call_seconds: Seconds in the user's code, all workers together.
        work_seconds: Seconds of all work on the stage, all workers together.
        seconds: Seconds in which calls for the stage were in flight. While several partitions have
            calls in flight, they share the time, so that partitions add up to the run's time.
        loads: Workers that constructed the model; each is counted for one partition of one stage,
            the first of the pool's that was committed with work of this run.
        load_seconds: Seconds that they took to construct it, all workers together.
        warm: Workers that had the model already, counted in the same way.
    """

    computed: int = 0
    rows_in: int = 0
    rows_out: int = 0
    batches: int = 0
    retries: int = 0
    faults: int = 0
    fits: int | None = None
    call_seconds: float = 0.0
    work_seconds: float = 0.0
    seconds: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0
    warm: int = 0

    @property
    def rows_per_second(self) -> float:
        """Rows out a second, 0 where nothing was computed."""
        return self.rows_out / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RunPlanned:
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
class Waiting:
    """The run waits for other runs, or no longer does.

    Attributes:
        reason: What it waits for: "lease", "fragments", or "pool <model>". There is one wait for
            each reason at a time.
        text: A sentence for people.
        runs: Ids of the runs ahead of it, where they are known.
        over: Whether the wait has ended.
    """

    reason: str
    text: str
    runs: tuple[str, ...] = ()
    over: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether the run does nothing until the wait ends; where it shares a pool, it works on."""
        return not self.reason.startswith("pool ")


@dataclass(frozen=True)
class Progress:
    """How far each stage of a wave is.

    Attributes:
        done: Input rows computed, by stage.
        total: Input rows in all, by stage; estimated until every fragment's input is known.
        seconds: Since the wave began.
    """

    done: dict[str, int]
    total: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Writing:
    """Everything is computed, and some results are not yet in Dagster's event log.

    Attributes:
        written: Results written; a result is one stage of one partition.
        total: Results of the run.
    """

    written: int
    total: int


@dataclass(frozen=True)
class Committed:
    """A stage's partition is in force."""

    stage: str
    partition: str | None
    name: ManifestName
    manifest: Manifest
    stats: StageStats = field(default_factory=StageStats)


@dataclass(frozen=True)
class Recomputed:
    """The sampled rows of a stage's partition are computed; the parts are not committed.

    Attributes:
        parts: A part for each fragment of the sample.
    """

    stage: str
    partition: str | None
    parts: tuple[Part, ...]


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
    RunPlanned,
    WaveStarted,
    WorkerReady,
    Printed,
    Noticed,
    Waiting,
    Progress,
    Committed,
    Recomputed,
    Unchanged,
    Failed,
    Writing,
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
