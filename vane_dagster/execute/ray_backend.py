"""Ray as the place where pools live: the driver's side of keeper and workers."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vane_dagster.errors import ComputeError
from vane_dagster.execute.admission import check_can_fit
from vane_dagster.execute.backend import Capacity, Done, Worker
from vane_dagster.execute.pools import HEARTBEAT_SECONDS, IDLE_SECONDS, Claim
from vane_dagster.execute.work import Fault, PoolSpec, Report, Work

NAMESPACE = "vane_dagster"
_MOST_POLL = 1.0
_KEEPER_SECONDS = 60.0
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def protocol() -> str:
    """Digest of what runs in workers: code of another version never meets this one's workers."""
    state = hashlib.blake2b(digest_size=6)
    root = Path(__file__).resolve().parent.parent
    for name in ("commit", "declare", "execute", "plan"):
        for file in sorted((root / name).glob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()


def keeper_name() -> str:
    """Name of the keeper that this version of vane_dagster, Ray and Python talks to."""
    import ray

    return f"keeper-{protocol()}-ray{ray.__version__}-py{sys.version_info[0]}.{sys.version_info[1]}"


def find_keeper(create: bool = True) -> Any:
    """The cluster's keeper.

    Args:
        create: Whether to start one; without, None where there is none.

    Raises:
        ComputeError: If it cannot be started, as where vane_dagster is not installed there.
    """
    import ray

    if not create:
        try:
            return ray.get_actor(keeper_name(), namespace=NAMESPACE)
        except ValueError:
            return None
    from vane_dagster.execute.keeper import Keeper

    keeper = (
        ray.remote(Keeper)
        .options(
            name=keeper_name(),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=5,
            runtime_env={"env_vars": {"VANE_PROTOCOL": protocol()}},
        )
        .remote(protocol())
    )
    return keeper


class RayBackend:
    """Pools on the Ray cluster that this process is connected to.

    Args:
        idle_seconds: How long a pool stays warm without a lease.
        told: Called with a line of text while the run has to wait.
    """

    def __init__(
        self, idle_seconds: float = IDLE_SECONDS, told: Callable[[str], None] | None = None
    ) -> None:
        self._keeper = find_keeper()
        self._idle_seconds = idle_seconds
        self._told = told or _log.info

    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        import ray

        nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
        return Capacity(nodes, int(sum(node.get("object_store_memory", 0) for node in nodes)))

    def lease(self, run_id: str, pools: Sequence[PoolSpec]) -> RayLease:
        """See `Backend.lease`."""
        capacity = self.capacity()
        for pool in pools:
            check_can_fit(capacity, pool)
        claims = tuple(
            Claim(p.identity, p.label, p.workers, dict(p.bundle), p.slots, self._idle_seconds)
            for p in pools
        )
        id = f"{run_id}-{secrets.token_hex(4)}"
        answer = self._acquired(id, run_id, claims)
        return RayLease(self._keeper, id, run_id, claims, pools, answer["workers"])

    def _acquired(self, id: str, run_id: str, claims: Sequence[Claim]) -> dict[str, Any]:
        pause, said = 0.02, 0.0
        try:
            while True:
                answer: dict[str, Any] = self._ask("acquire", id, run_id, claims)
                if answer["granted"]:
                    return answer
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    self._told(
                        f"waiting for {', '.join(c.label for c in claims if c.bundle)}: the "
                        f"resources are leased by {', '.join(answer['ahead']) or 'other pools'}"
                    )
                time.sleep(pause)
                pause = min(_MOST_POLL, 2 * pause)
        except BaseException:
            self._keeper.release.remote(id)
            raise

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._keeper, method).remote(*args), timeout=_KEEPER_SECONDS)
        except ray.exceptions.RayError as error:
            raise ComputeError(
                f"the keeper of warm pools does not answer ({method}): {error}. Check that "
                "vane-dagster is installed on the cluster in the driver's version"
            ) from error


class RayLease:
    """A lease on pools of Ray actors. See `backend.Lease`."""

    def __init__(
        self,
        keeper: Any,
        id: str,
        run_id: str,
        claims: Sequence[Claim],
        pools: Sequence[PoolSpec],
        workers: dict[str, list[str]],
    ) -> None:
        import ray

        self.id = id
        self._keeper = keeper
        self._pools = {pool.identity: pool for pool in pools}
        self._workers = [Worker(n, identity) for identity, ns in workers.items() for n in ns]
        self._actors: dict[str, Any] = {}
        self._archives = {p.identity: ray.put(p.archive) for p in pools if p.archive}
        self._pending: dict[Any, tuple[int, Any, Worker]] = {}
        self._failed: list[Done] = []
        self._tickets = 0
        self._over = threading.Event()
        beat = (id, run_id, tuple(claims))
        threading.Thread(target=self._beat, args=beat, daemon=True).start()

    def _beat(self, *beat: Any) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                self._keeper.heartbeat.remote(*beat)
            except Exception as error:  # the keeper restarts; the run goes on without it
                _log.debug("heartbeat: %s", error)

    def workers(self) -> Sequence[Worker]:
        """See `Lease.workers`."""
        return list(self._workers)

    def load(self, worker: Worker) -> int:
        """See `Lease.load`."""
        pool = self._pools[worker.pool]
        env = {name: os.environ[name] for name in pool.env_vars if name in os.environ}
        archive = self._archives.get(worker.pool, b"")
        return self._called(
            worker, lambda a: (a.load.remote(pool.model, archive, pool.threads, env), None)
        )

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        """See `Lease.run`."""

        def call(actor: Any) -> tuple[Any, Any]:
            table, report = actor.run.options(num_returns=2).remote(work, *tables)
            return report, table if work.keep else None

        return self._called(worker, call)

    def _called(self, worker: Worker, call: Callable[[Any], tuple[Any, Any]]) -> int:
        import ray

        self._tickets += 1
        try:
            if worker.name not in self._actors:
                self._actors[worker.name] = ray.get_actor(worker.name, namespace=NAMESPACE)
            report, table = call(self._actors[worker.name])
            self._pending[report] = (self._tickets, table, worker)
        except (ValueError, ray.exceptions.RayActorError) as error:
            self._failed.append(Done(self._tickets, None, lost=str(error), worker_lost=True))
        return self._tickets

    def wait(self, timeout: float) -> list[Done]:
        """See `Lease.wait`."""
        import ray

        done, self._failed = self._failed, []
        if not self._pending:
            if not done and timeout:
                time.sleep(min(timeout, 0.01))
            return done
        refs = list(self._pending)
        ready, rest = ray.wait(refs, num_returns=1, timeout=0 if done else timeout)
        if ready and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        return done + [self._done(ref) for ref in ready]

    def _done(self, ref: Any) -> Done:
        import ray

        ticket, table, worker = self._pending.pop(ref)
        try:
            return Done(ticket, ray.get(ref), table)
        except ray.exceptions.RayActorError as error:
            self._actors.pop(worker.name, None)
            return Done(ticket, None, lost=_brief(error), worker_lost=True)
        except ray.exceptions.RayTaskError as error:
            fault = Fault("ComputeError", f"worker {worker.name}: {error.cause}", str(error))
            return Done(ticket, Report(fault=fault))
        except ray.exceptions.RayError as error:
            return Done(ticket, None, lost=_brief(error))

    def replace(self, worker: Worker) -> Worker:
        """See `Lease.replace`."""
        import ray

        name = ray.get(self._keeper.replace.remote(worker.name), timeout=_KEEPER_SECONDS)
        if not name:
            raise ComputeError(
                f"worker {worker.name} is gone and its pool was evicted meanwhile; start the run "
                "again: what is finished is kept"
            )
        fresh = Worker(name, worker.pool)
        self._workers = [fresh if w == worker else w for w in self._workers]
        return fresh

    def evict(self, pool: str) -> None:
        """See `Lease.evict`."""
        self._keeper.evict.remote(pool, True)

    def release(self) -> None:
        """See `Lease.release`."""
        import ray

        self._over.set()
        if not ray.is_initialized():
            return
        released = self._keeper.release.remote(self.id)
        self._pending.clear()
        try:
            ray.get(released, timeout=_KEEPER_SECONDS)
        except ray.exceptions.RayError as error:  # it expires by itself
            _log.warning("the lease %s could not be released: %s", self.id, _brief(error))


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
