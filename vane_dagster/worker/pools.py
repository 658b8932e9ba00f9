"""Pools of workers, as the driver asks for them and the pool manager places them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypedDict

from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.storage.filesystem import StoragePath

IDLE_SECONDS = 600.0
"""Seconds that a pool stays warm without a lease, by default."""

_LEAST = 0.0001
"""Ray's unit of resources. `Workers.accelerator_type` reserves ten of them."""


def shares(bundle: Mapping[str, float], ranks: int) -> list[Mapping[str, float]]:
    """Divide a bundle evenly among ranks, into amounts that Ray does not round to 0."""
    share = {name: max(_LEAST, amount / ranks) for name, amount in bundle.items()}
    return [share] * ranks


@dataclass(frozen=True)
class ModelSpec:
    """The model that a pool's workers construct.

    Attributes:
        label: The user's class or function, for people.
        stateful: Whether it is constructed.
        payload: The pickled class or function with its constructor's arguments.
        content: Digest of the archive and the payload.
        packages: The installed packages that the code imports. Parts record their versions.
        exact: Whether a model that other code constructed must not be used.
        is_kept: Whether only a model that other code constructed is used.
        files: The store with the local files among its arguments; None without such files.
    """

    label: str
    stateful: bool
    payload: bytes = field(repr=False)
    content: str = ""
    packages: tuple[str, ...] = ()
    exact: bool = False
    is_kept: bool = False
    files: StoragePath | None = None


@dataclass(frozen=True)
class _Pool:
    """What the driver and the pool manager know of a pool.

    Attributes:
        identity: Digest of the model definition; stages with the same share the workers.
        label: Name for people.
        workers: Number of workers wanted, (min, max).
        bundle: The resources that each worker reserves, under Ray's resource names.
        slots: Calls that one worker runs at the same time.
        threads: Threads that a worker computes with; 0 for its share of the machine's CPUs.
        server: Name of the server that each worker runs; empty for a pool of models.
        stop_seconds: Seconds that a worker needs at most to stop its server.
        per_node: Maximum number of workers on one node; None for any number.
        ranks: Number of equal shares of the bundle, each of which may be on a node of its own.
        stages: The run's stages that call the model, such as "docs/embedding".
    """

    identity: str
    label: str
    workers: tuple[int, int]
    bundle: Mapping[str, float] = field(default_factory=dict)
    slots: int = 1
    threads: int = 0
    server: str = ""
    stop_seconds: float = 0.0
    per_node: int | None = None
    ranks: int = 1
    stages: tuple[str, ...] = ()

    @property
    def shares(self) -> list[Mapping[str, float]]:
        """What a worker reserves, for each of its ranks."""
        return shares(self.bundle, self.ranks)

    def threads_on(self, cpus: int) -> int:
        """Threads of a worker on a node with so many CPUs: those that it reserves, or its share."""
        return self.threads or int(self.bundle.get("CPU", 0)) or max(1, cpus // self.workers[1])


@dataclass(frozen=True)
class PoolRequest(_Pool):
    """The part of a `PoolSpec` that the pool manager needs.

    Attributes:
        idle_seconds: Seconds that the pool stays warm without a lease.
    """

    idle_seconds: float = IDLE_SECONDS


Whereabouts: TypeAlias = tuple[PoolRequest, tuple[str, ...], set[str]]
"""A worker's pool, the Ray nodes of its shares, and the ids of the leases that use it."""


@dataclass(frozen=True)
class PoolSpec(_Pool):
    """A pool of workers, as a lease requests it.

    Attributes:
        model: The model to construct; None for workers that only read, project, join and write.
        archive: The user's modules, as a zip.
        env_vars: Names of environment variables to forward.
        unset_vars: Names of those that the workers must not have, because the driver has none and
            that counts in keys.
        lifecycle: When a worker times out, or is replaced.
        on_driver: Whether the workers are subprocesses on the driver's machine, wherever the run
            computes.
        uses: Identities of the pools of servers that the code calls, by the servers' keys.
        idle_seconds: Seconds that the pool stays warm without a lease; None for the backend's.
    """

    model: ModelSpec | None = None
    archive: bytes = field(default=b"", repr=False)
    env_vars: tuple[str, ...] = ()
    unset_vars: tuple[str, ...] = ()
    lifecycle: WorkerLifecycle = field(default_factory=WorkerLifecycle)
    on_driver: bool = False
    uses: Mapping[str, str] = field(default_factory=dict)
    idle_seconds: float | None = None

    def request(self, idle_seconds: float = IDLE_SECONDS) -> PoolRequest:
        """Return what the pool manager needs."""
        shared = {each.name: getattr(self, each.name) for each in fields(_Pool)}
        own = idle_seconds if self.idle_seconds is None else self.idle_seconds
        return PoolRequest(**shared, idle_seconds=own)


WorkerState = Literal["busy", "ready", "unloaded", "starting", "dead"]


class WorkerInfo(TypedDict, total=False):
    """The state of a worker for `vane-dagster pools`.

    It has plain values only, because the worker may run another release. `server` is a
    `ServerStatus` with the fields of its endpoint in it, but for the key, and the worker's GPUs.
    """

    name: str
    state: WorkerState
    pid: int
    node: str
    device: str | None
    load_seconds: float | None
    batches: int
    server: dict[str, Any]
