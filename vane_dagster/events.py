"""Events of a run: the executor emits them, and the report phase consumes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vane_dagster.errors import VaneError
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.worker.reports import GpuUse, LoadReport, Output, WorkReport


@dataclass
class PoolLoads:
    """Workers of a pool that became ready.

    Attributes:
        loads: Workers that constructed the model, or started the server.
        load_seconds: Seconds that they took, summed over all workers.
        warm: Workers that already had it.
    """

    loads: int = 0
    load_seconds: float = 0.0
    warm: int = 0

    def add(self, report: LoadReport) -> None:
        """Count a ready worker."""
        self.loads += not report.warm
        self.load_seconds += 0.0 if report.warm else report.seconds
        self.warm += report.warm


@dataclass(frozen=True)
class ServerUse:
    """The servers that a stage calls, counted as its model loads are.

    Attributes:
        starts: Replicas that were started.
        start_seconds: Seconds until they were ready, summed over all replicas.
        warm_hits: Replicas that were ready already.
        restarts: Restarts of replicas that had ended.
        replicas: Their servers, URLs, host names and states (`ServerState`). The URL and the host
            name are empty of a replica that is not ready.
    """

    starts: int = 0
    start_seconds: float = 0.0
    warm_hits: int = 0
    restarts: int = 0
    replicas: tuple[Mapping[str, str], ...] = ()


@dataclass
class StageStats:
    """Statistics of a run for one stage of one partition.

    Attributes:
        computed: Fragments computed.
        rows_in: Input rows that were computed.
        rows_out: Output rows that were computed.
        batches: Calls of the user's code.
        retries: Calls retried after a transient error; each request of a prompt is one.
        rate_limited: Of these, those after HTTP 429.
        faults: Rows that failed in stored parts, in those that it wrote, and in slices of others.
        copied: Input rows with the outcome of an equal row, of this run or an earlier one.
        spent: Usage of the rows that were computed, by the names of the stage's `sums`.
        fits: The batch size that fit into memory after a larger one did not.
        gpus: The use of the workers' GPUs.
        call_seconds: Seconds in the user's code, summed over all workers.
        work_seconds: Seconds of all work on the stage, summed over all workers.
        seconds: Seconds in which calls for the stage were in flight. Partitions with calls in
            flight at the same time share it, so the partitions add up to the run's time.
        loads: Workers that constructed the model. Each is counted for one partition of one stage:
            the pool's first to be committed with work of this run.
        servers: The servers that it calls; None if it calls none.
    """

    computed: int = 0
    rows_in: int = 0
    rows_out: int = 0
    batches: int = 0
    retries: int = 0
    rate_limited: int = 0
    faults: int = 0
    copied: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    fits: int | None = None
    gpus: GpuUse = field(default_factory=GpuUse)
    call_seconds: float = 0.0
    work_seconds: float = 0.0
    seconds: float = 0.0
    loads: PoolLoads = field(default_factory=PoolLoads)
    servers: ServerUse | None = None

    @property
    def rows_done(self) -> int:
        """Input rows that were computed or copied."""
        return self.rows_in + self.copied

    @property
    def rows_per_second(self) -> float:
        """Output rows per second; 0 if nothing was computed."""
        return self.rows_out / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PoolTime:
    """How the workers of a pool spent a wave, from its start to the pool's last call.

    Times are seconds, summed over all workers. A worker with calls in flight computes. One without
    waits for room if fragments in progress use up the memory budget and none of them needs it next,
    and for input otherwise.

    Attributes:
        stages: The stages that they compute; of the workers that read and write, those without code
            of the user.
        is_io: Whether they read and write for all stages.
        workers: The most workers at a time.
        bundle: The resources that each reserves on the cluster.
        computing: Time with calls in flight.
        input: Time in which they waited for input.
        room: Time in which they waited for room.
        loading: Time until they had constructed the model.
        limited_by: What limits them that more of them do not raise; empty for nothing.
    """

    stages: tuple[str, ...]
    is_io: bool = False
    workers: int = 0
    bundle: Mapping[str, float] = field(default_factory=dict)
    computing: float = 0.0
    input: float = 0.0
    room: float = 0.0
    loading: float = 0.0
    limited_by: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """The four times as shares of their sum; all 0 without any."""
        times = {name: getattr(self, name) for name in ("computing", "input", "room", "loading")}
        return {name: time / (sum(times.values()) or 1.0) for name, time in times.items()}

    @property
    def least_seconds(self) -> float:
        """Seconds that its calls take if all of its workers compute all the time."""
        return self.computing / max(1, self.workers)


class Event:
    """What the executor emits, or a run before and after it."""


@dataclass(frozen=True)
class RunPlanned(Event):
    """The run is planned.

    Attributes:
        plan: The plan.
    """

    plan: RunPlan


@dataclass(frozen=True)
class Connected(Event):
    """The run is connected to the machines that compute, if it needs them."""


@dataclass(frozen=True)
class WaveStarted(Event):
    """A wave started.

    Attributes:
        index: The wave's number, counted from 1.
        count: The number of waves.
        stages: The wave's stages.
        models: The models that it leased.
        resources: Resources of all nodes; empty if an autoscaler may add nodes.
        is_cluster: Whether its workers run on a cluster, which keeps them from run to run.
    """

    index: int
    count: int
    stages: tuple[str, ...]
    models: tuple[str, ...]
    resources: Mapping[str, float] = field(default_factory=dict)
    is_cluster: bool = False


@dataclass(frozen=True)
class LeaseChanged(Event):
    """A wave's lease was granted, or has ended.

    Attributes:
        models: The models that it leased.
        is_held: Whether it was granted.
    """

    models: tuple[str, ...]
    is_held: bool


@dataclass(frozen=True)
class CallStarted(Event):
    """A call was sent to a worker.

    Attributes:
        ticket: The call's number, unique in the process.
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        fragment: Index of the fragment in the partition.
        kind: What it does with the fragment; see `TaskKind`.
        worker: The worker's name.
        at: Unix time in nanoseconds.
    """

    ticket: int
    stage: str
    partition: str | None
    fragment: int
    kind: str
    worker: str
    at: int


@dataclass(frozen=True)
class CallEnded(Event):
    """A worker answered a call, or was lost with it.

    Attributes:
        ticket: The call's number.
        report: The answer; None if it was lost.
        lost: Why it was lost; empty otherwise.
        at: Unix time in nanoseconds.
    """

    ticket: int
    report: WorkReport | None
    lost: str
    at: int


@dataclass(frozen=True)
class WorkerReady(Event):
    """A worker of a model's or a server's pool is ready.

    Attributes:
        stages: The stages that use the model.
        model: The model.
        worker: The worker's name.
        report: The worker's report on loading the model.
        server: Name of the server, if the worker runs one.
        is_function: Whether `model` is a plain function, which constructs no model.
    """

    stages: tuple[str, ...]
    model: str
    worker: str
    report: LoadReport
    server: str = ""
    is_function: bool = False


@dataclass(frozen=True)
class Printed(Event):
    """A user's code printed or logged text.

    Attributes:
        stage: The stage that runs the code.
        output: The text.
        worker: The worker's name.
        partition: The partition key; None during construction, or if unpartitioned.
    """

    stage: str
    output: Output
    worker: str
    partition: str | None = None


@dataclass(frozen=True)
class Noticed(Event):
    """The run handled a problem and continues.

    Attributes:
        text: The message.
        is_problem: False for a message about something normal.
    """

    text: str
    is_problem: bool = True


@dataclass(frozen=True)
class WorkerReplaced(Noticed):
    """A worker was replaced by a fresh one.

    Attributes:
        stages: The stages whose code it ran; see `WorkerGroup.stages`.
        cause: Why.
    """

    stages: tuple[str, ...] = ()
    cause: Literal["lost", "recycled", "outdated", "drained"] = "lost"


@dataclass(frozen=True)
class Progress(Event):
    """Progress of the stages of a wave.

    Attributes:
        done: Input rows computed or copied, by stage.
        total: Total input rows, by stage; estimated until the input of every fragment is known.
        seconds: Seconds since the wave started.
        pools: How the workers of each pool spent these seconds.
        queued: Tasks that wait for a worker, by stage.
    """

    done: dict[str, int]
    total: dict[str, int]
    seconds: float
    pools: tuple[PoolTime, ...] = ()
    queued: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed(Event):
    """A stage's partition is committed.

    Attributes:
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        name: The name of the manifest.
        manifest: The committed manifest.
        stats: Statistics of the run for this partition.
    """

    stage: str
    partition: str | None
    name: ManifestName
    manifest: Manifest
    stats: StageStats = field(default_factory=StageStats)


@dataclass(frozen=True)
class Recomputed(Event):
    """The sampled rows of a stage's partition are computed; the parts are not committed.

    Attributes:
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        parts: One part for each fragment of the sample.
    """

    stage: str
    partition: str | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Unchanged(Event):
    """A stage's partition was already up to date.

    Attributes:
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        name: The name of the manifest.
        manifest: The manifest; None until `with_manifests` has read it.
    """

    stage: str
    partition: str | None
    name: ManifestName
    manifest: Manifest | None = None


@dataclass(frozen=True)
class Failed(Event):
    """A stage's partition could not be computed or committed.

    Attributes:
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        error: The error.
        because: The upstream stage that caused the failure, if any.
    """

    stage: str
    partition: str | None
    error: VaneError
    because: str | None = None


@dataclass(frozen=True)
class Submitted(Event):
    """A stage's partition waits for answers of batches, and the run does not commit it.

    Attributes:
        stage: The stage.
        partition: The partition key; None if unpartitioned.
        expected: Unix time in seconds by which the batches have ended.
        because: The upstream stage that waits, if it is not this one.
    """

    stage: str
    partition: str | None
    expected: float
    because: str | None = None


def about_plan(plan: RunPlan) -> Iterator[Event]:
    """Yield the problems found while a run was planned, as events."""
    for text in plan.warnings:
        yield Noticed(text)
    first = plan.selected[0]
    for key, error in plan.failed.items():
        for stage in plan.selected:
            yield Failed(stage, key, error, because=None if stage == first else first)
