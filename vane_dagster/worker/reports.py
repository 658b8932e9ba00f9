"""What workers report to the driver: counts, errors as text, and the state of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields

import pyarrow as pa

from vane_dagster import errors
from vane_dagster._secrets import masked
from vane_dagster.errors import DamagedPartError, VaneError
from vane_dagster.servers.launch import ServerStatus
from vane_dagster.storage.batch_records import Recorded
from vane_dagster.storage.manifest import PartInfo


@dataclass(frozen=True)
class Tally:
    """Counts of the rows that a stage read, by outcome.

    Attributes:
        rows_in: Input rows.
        filtered: Input rows without output, as the stage declares.
        quarantined: Input rows without output, because of errors.
        nulled: Input rows with nulls as output, because of errors.
        unread: Of the quarantined and nulled rows, those that the source could not read.
        workers: Names of the workers that computed them.
        seconds: Seconds that all workers took together.
        wasted: Amounts spent on rows without output, such as tokens; see `CostlyError`.
        packages: The installed packages that the user's code imports, each "name==version".
    """

    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    wasted: Counter[str] = field(default_factory=Counter)
    packages: tuple[str, ...] = ()
    unread: int = 0

    @property
    def faults(self) -> int:
        """Rows that failed."""
        return self.quarantined + self.nulled

    def __add__(self, other: Tally) -> Tally:
        added = {
            each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)
        }
        for name in ("workers", "packages"):
            added[name] = tuple(sorted({*added[name]}))
        return Tally(**added)


ERRORS: Mapping[str, type[VaneError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, VaneError)
}
"""The classes of errors that a driver raises for failures in workers."""


@dataclass(frozen=True)
class Fault:
    """An error in a worker as text, which avoids unpickling classes of the user.

    Secrets that the worker knows are masked.

    Attributes:
        kind: The class of the error to raise.
        message: The error message.
        traceback: The traceback, from the user's first frame on if there is one.
        part: Name of the damaged part, if a part in the store is damaged.
        of_stage: Whether the stage has it in every partition.
        is_permanent: Whether it is one even if its class is not; see `VaneError`.
    """

    kind: str
    message: str
    traceback: str = ""
    part: str = ""
    of_stage: bool = False
    is_permanent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", masked(self.message))
        object.__setattr__(self, "traceback", masked(self.traceback))

    def error(self) -> VaneError:
        """Return the exception to raise in the driver."""
        text = f"{self.message}\n\n{self.traceback}".rstrip()
        if self.kind == "DamagedPartError":
            return DamagedPartError(text, self.part)
        error = ERRORS.get(self.kind, VaneError)(text)
        error.is_permanent |= self.is_permanent
        return error


class SharedSeconds:
    """Divides the time in which calls are in flight among those that make them.

    An owner's share of the time between two changes is its share of the calls in flight. All
    shares add up to the time in which there were any.
    """

    def __init__(self) -> None:
        self._at = self._seconds_a_call = 0.0
        self._calls = 0
        self._own: dict[Hashable, tuple[int, float]] = {}

    def change(self, owner: Hashable, calls: int, now: float) -> float:
        """Change an owner's calls in flight; return its seconds since its last change."""
        if self._calls:
            self._seconds_a_call += (now - self._at) / self._calls
        self._at = now
        self._calls += calls
        own, before = self._own.pop(owner, (0, 0.0))
        if own + calls:
            self._own[owner] = own + calls, self._seconds_a_call
        return own * (self._seconds_a_call - before)


@dataclass(frozen=True)
class GpuUse:
    """The use of a worker's GPUs, by NVML; all 0 without one.

    Attributes:
        seconds: Seconds over which it was measured.
        busy_seconds: Seconds of these in which a GPU ran a kernel, as the mean of all GPUs.
        memory: Bytes in use on all of them at last, by any process.
    """

    seconds: float = 0.0
    busy_seconds: float = 0.0
    memory: int = 0

    def __add__(self, other: GpuUse) -> GpuUse:
        busy = self.busy_seconds + other.busy_seconds
        return GpuUse(self.seconds + other.seconds, busy, other.memory or self.memory)

    @property
    def utilization(self) -> float | None:
        """The share of busy seconds; None if nothing was measured."""
        return self.busy_seconds / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Output:
    """Text that user code printed or logged, and whether it logged a warning or an error."""

    text: str = ""
    has_problem: bool = False


@dataclass(frozen=True)
class WorkReport:
    """The report of a task to the driver: a few numbers, and the errors of a few rows.

    Attributes:
        tally: Counts of the input rows by outcome, without those that were copied.
        rows_out: Output rows, without those that were copied; also of a task that failed later.
        found_elsewhere: Rows that were found in other partitions, if rows were looked up.
        bytes_out: Bytes of the rows that are passed on in memory.
        seconds: The call's share of its worker's time, in seconds; see `SharedSeconds`.
        call_seconds: Seconds of these in the user's code.
        batches: Calls of the user's code.
        retries: Calls that repeat one after a transient error; see `BatchOutcome`.
        rate_limited: Of these, those after HTTP 429.
        fits: The batch size that the worker measured, or that fit into memory.
        faults: Error records of the first rows that failed; None without.
        part: The part that was written.
        pending: The rows that wait for answers of batches, so no part was written; None without.
        output: What the user's code printed or logged.
        fault: Why the task failed.
        cancelled: Whether the lease had ended, so the task was not done.
        unhealthy_reason: Why the worker must be replaced at once. `fault` is then that of the rows
            being computed, if any.
        at: The places of these rows in the input, if they are known.
        recycle_reason: Why the worker should be replaced when it is idle.
        unused_gpu: Why the user's code uses no GPU; empty if it does, or if that is unknown.
        gpus: The use of the worker's GPUs while the user's code ran.
        spent: Usage of answers, by the names of `COUNTS`; also of a task that failed.
    """

    tally: Tally = field(default_factory=Tally)
    rows_out: int = 0
    found_elsewhere: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    call_seconds: float = 0.0
    batches: int = 0
    retries: int = 0
    rate_limited: int = 0
    fits: int | None = None
    faults: pa.Table | None = None
    part: PartInfo | None = None
    pending: Recorded | None = None
    output: Output = Output()
    fault: Fault | None = None
    cancelled: bool = False
    unhealthy_reason: str = ""
    at: range | None = None
    recycle_reason: str = ""
    unused_gpu: str = ""
    gpus: GpuUse = field(default_factory=GpuUse)
    spent: Counter[str] = field(default_factory=Counter)

    @property
    def all_rows_failed(self) -> bool:
        """Whether user code was called for rows, and all of them failed."""
        if self.fault is not None:
            return self.fault.kind == "UdfError" and not self.rows_out
        return 0 < self.tally.rows_in == self.tally.quarantined + self.tally.nulled


@dataclass(frozen=True)
class Computed:
    """The result of an operation in a worker.

    Attributes:
        rows: The rows.
        report: The counts of the operation, for the driver.
        fault_records: Records of the quarantined or nulled rows; None if there are none.
        called: What the user's code computed, if other rows may have been copied.
        row_records: Row records of the input rows; None if they have no keys.
        copied: See `PartInfo`.
        inherited: See `PartInfo`.
    """

    rows: pa.Table
    report: WorkReport
    fault_records: pa.Table | None = None
    called: Computed | None = None
    row_records: pa.Table | None = None
    copied: int = 0
    inherited: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadReport:
    """The report of a worker that is ready, or failed to start.

    Attributes:
        warm: Whether the model was already loaded.
        seconds: Seconds that its construction took, in this run or an earlier one.
        pid: Process id.
        device: The device that it computes on: "cpu", or the GPU's name.
        node: Host name of the machine.
        output: What the user's code printed or logged during construction.
        fault: Why the model could not be constructed.
        row_seconds: Seconds per row in the last task; None before the first.
        unhealthy_reason: Why a warm worker must be replaced.
        outdated: Why a warm worker cannot run this run's version of the code; empty if it can.
        server: The state of the server, if the worker runs one.
        ray_node: Id of its Ray node; empty for a subprocess.
    """

    warm: bool
    seconds: float
    pid: int
    device: str
    node: str
    output: Output = Output()
    fault: Fault | None = None
    row_seconds: float | None = None
    unhealthy_reason: str = ""
    outdated: str = ""
    server: ServerStatus | None = None
    ray_node: str = ""


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is doing, answered while it works.

    Attributes:
        seconds: Seconds since the construction of its model began; None if none is running.
        at: The stack of the thread that constructs it.
        server: The state of the server, if the worker runs one.
        waits: Rows that are called again, or a call that takes long, for people; empty for neither.
    """

    seconds: float | None = None
    at: str = ""
    server: ServerStatus | None = None
    waits: str = ""


def load_failed(fault: Fault) -> LoadReport:
    """Return the report of a load that was never answered."""
    return LoadReport(warm=False, seconds=0.0, pid=0, device="", node="", fault=fault)
