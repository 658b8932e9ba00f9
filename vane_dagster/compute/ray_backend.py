"""Ray backend: the driver's side of the pool manager and its workers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from vane_dagster.compute.actor_names import NAMESPACE
from vane_dagster.compute.api import (
    TICKETS,
    CallResult,
    Cancelled,
    Capacity,
    LeaseTerms,
    TableLostError,
    Worker,
    forwarded,
    lease_expired,
)
from vane_dagster.compute.client import PoolManagerClient, brief, running_pools
from vane_dagster.compute.connection import alive_nodes
from vane_dagster.compute.head_watch import HeadWatch
from vane_dagster.compute.pool_state import LEASE_SECONDS, LeaseAnswer, LeaseRecord
from vane_dagster.compute.waits import short
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, Claims
from vane_dagster.errors import ClusterLostError, ComputeError
from vane_dagster.retries import Cause
from vane_dagster.servers.directory import Endpoints
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.code_digest import versions
from vane_dagster.worker.pools import IDLE_SECONDS, PoolSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Fault, LoadReport, WorkReport, load_failed

_BEATS = 6
_MAX_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 1800.0
_log = logging.getLogger(__name__)


class RayBackend:
    """Pools on the Ray cluster that this process is connected to."""

    def __init__(
        self,
        idle_seconds: float = IDLE_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._watch = HeadWatch.started()
        self._pool_manager = PoolManagerClient(self._watch)
        self._idle_seconds = idle_seconds
        self._lease_seconds = lease_seconds

    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        nodes = tuple(self._watch.call(alive_nodes).values())
        memory = int(sum(node.get("object_store_memory", 0) for node in nodes))
        return Capacity(nodes, memory, self._pool_manager.adds_nodes)

    def lease(
        self, run_id: str, pools: Sequence[PoolSpec], terms: LeaseTerms | None = None
    ) -> RayLease:
        """See `Backend.lease`."""
        claims = tuple(pool.request(self._idle_seconds) for pool in pools)
        id = f"{run_id}-{secrets.token_hex(4)}"
        terms = terms or LeaseTerms()
        request = LeaseRecord(id, run_id, claims, 0.0, self._lease_seconds, priority=terms.priority)
        granted = self._acquired(request, terms)
        return RayLease(self._pool_manager, self._watch, request, pools, granted)

    def gpus_here(self) -> int:
        """GPUs that this machine gives to the cluster; 0 if the machine is not a node of it."""
        import ray

        if ray.util.client.ray.is_connected():
            return 0
        own = ray.get_runtime_context().get_node_id()
        nodes = self._watch.call(ray.nodes)
        return sum(int(n["Resources"].get("GPU", 0)) for n in nodes if n["NodeID"] == own)

    def close(self) -> None:
        """Stop watching the cluster. Warm pools stay."""
        self._watch.close()

    def running(self) -> set[str]:
        """See `Backend.running`."""
        return self._watch.call(running_pools)

    def claims(self, run_id: str) -> RayClaims:
        """See `Backend.claims`."""
        return RayClaims(self._pool_manager, run_id, self._lease_seconds)

    def _acquired(self, request: LeaseRecord, terms: LeaseTerms) -> LeaseAnswer:
        pause, asked, since = 0.02, "", 0.0
        try:
            while True:
                answer: LeaseAnswer = self._pool_manager.call("acquire", request)
                if answer.workers is not None:
                    terms.waits.end("lease", f"{_wanted(request)}: leased after waiting")
                    return answer
                # What other runs hold may be why no node is added.
                if (wanted := "" if answer.blocking_runs else answer.asked) != asked:
                    asked, since = wanted, time.monotonic()
                if asked and time.monotonic() - since > _PATIENCE_SECONDS:
                    raise ComputeError(
                        f"{_wanted(request)}: the cluster's autoscaler was asked to make room for "
                        f"{asked} and has not done so within half an hour. Lower concurrency or "
                        "the resources of a worker, or raise the cluster's maximum size"
                    )
                terms.waits.begin("lease", _waiting(request, answer))
                if terms.cancelled.wait(pause):
                    raise Cancelled
                pause = min(_MAX_POLL_SECONDS, 2 * pause)
        except BaseException:
            self._pool_manager.send("release", request.id)
            raise


def _wanted(request: LeaseRecord) -> str:
    return ", ".join(claim.label for claim in request.claims if claim.bundle)


def _waiting(request: LeaseRecord, answer: LeaseAnswer) -> str:
    labels, ahead = _wanted(request), answer.blocking_runs
    if asked := answer.asked:
        return (
            f"waiting for {labels}: the cluster's autoscaler was asked to make room for {asked}; "
            "`ray status` shows its progress"
        )
    if ahead:
        return f"waiting for {labels}: its resources are in use or requested by {short(ahead)}"
    return f"waiting for {labels}: cluster nodes were lost or are draining"


def _connection_lost(error: ConnectionError) -> ClusterLostError:
    return ClusterLostError(
        f"lost the connection to the Ray cluster: {error}. Finished parts are kept. Run again "
        "when the cluster is reachable"
    )


class RayLease:
    """A lease on pools of Ray actors. See `api.Lease`."""

    def __init__(
        self,
        pool_manager: PoolManagerClient,
        watch: HeadWatch,
        record: LeaseRecord,
        pools: Sequence[PoolSpec],
        granted: LeaseAnswer,
    ) -> None:
        import ray

        self.id, self._run_id = record.id, record.run_id
        self._pool_manager, self._watch = pool_manager, watch
        self._pools = {pool.identity: pool for pool in pools}
        self._claims = {claim.identity: claim for claim in record.claims}
        workers = granted.workers or {}
        self._workers = [Worker(n, identity) for identity, ns in workers.items() for n in ns]
        self._actors = dict(granted.actors)
        self._archives = {p.identity: ray.put(p.archive) for p in pools if p.archive}
        self._pending: dict[Any, tuple[int, Any, Worker, str, bool]] = {}
        self._failed: list[CallResult] = []
        self._nodes: dict[str, str] = {}
        self._moves: dict[str, str] = {}
        self._moved: set[str] = set()
        self._over = threading.Event()
        self._expired = False
        _start_beating(self._over, record.ttl_seconds, lambda: self._beat(record))

    def _beat(self, record: LeaseRecord) -> bool:
        record.workers = tuple(worker.name for worker in self._workers)
        try:
            moves = self._pool_manager.call("heartbeat", record)
            self._expired, self._moves = moves is None, moves or {}
        except Exception as error:  # the pool manager is gone; the run continues without it
            _log.debug("heartbeat: %s", error)
        return not self._expired

    def workers(self) -> Sequence[Worker]:
        """See `Lease.workers`."""
        return list(self._workers)

    def load(self, worker: Worker, endpoints: Endpoints) -> int:
        """See `Lease.load`."""
        pool = self._pools[worker.pool]
        archive = self._archives.get(worker.pool, b"")
        call = LoadCall(
            pool.model,
            threads=pool.threads,
            env=forwarded(pool),
            lifecycle=pool.lifecycle,
            endpoints=endpoints,
            versions=versions(),
            run_id=self._run_id,
            stages=pool.stages,
            lease=self.id,
        )
        return self._called(worker, lambda a: (a.load.remote(call, archive), None), starting=True)

    def announce(self, worker: Worker, endpoints: Endpoints) -> None:
        """See `Lease.announce`."""
        if (actor := self._actors.get(worker.name)) is not None:  # else it gets them with its load
            actor.announce.remote(endpoints)

    def status(self, worker: Worker) -> int:
        """See `Lease.status`."""
        return self._called(worker, lambda a: (a.status.remote(), None))

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        """See `Lease.run`."""

        def call(actor: Any) -> tuple[Any, Any]:
            table, report = actor.run.options(num_returns=2).remote(work, *tables)
            return report, table if work.keep else None

        return self._called(worker, call, work.alone)

    def _called(
        self,
        worker: Worker,
        call: Callable[[Any], tuple[Any, Any]],
        alone: str = "",
        starting: bool = False,
    ) -> int:
        import ray

        ticket = next(TICKETS)
        try:
            if worker.name not in self._actors:
                self._actors[worker.name] = self._watch.call(
                    lambda: ray.get_actor(worker.name, namespace=NAMESPACE)
                )
            report, table = call(self._actors[worker.name])
            self._pending[report] = (ticket, table, worker, alone, starting)
        except (ValueError, ray.exceptions.RayActorError) as error:
            self._failed.append(CallResult(ticket, None, lost=brief(error), cause="outside"))
        return ticket

    def wait(self, timeout: float) -> list[CallResult]:
        """See `Lease.wait`."""
        self._check_in_force()
        try:
            return self._ended(timeout)
        except ConnectionError as error:  # raised by Ray Client
            raise _connection_lost(error) from error

    def _ended(self, timeout: float) -> list[CallResult]:
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

    def _done(self, ref: Any) -> CallResult:
        import ray

        ticket, table, worker, alone, starting = self._pending.pop(ref)
        try:
            report = ray.get(ref)
            if isinstance(report, LoadReport):
                self._nodes[worker.name] = report.ray_node
            return CallResult(ticket, report, table)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):  # its input was lost
                return CallResult(ticket, None, lost=brief(error.cause), cause="table")
            fault = Fault("ComputeError", f"worker {worker.name}: {brief(error.cause)}", str(error))
            return CallResult(ticket, load_failed(fault) if starting else WorkReport(fault=fault))
        except ray.exceptions.ObjectLostError as error:
            return CallResult(ticket, None, lost=brief(error), cause="table")
        except ray.exceptions.RayError as error:  # it died, or memory or its node was lost
            self._actors.pop(worker.name, None)
            cause, at, seconds = self._cause(worker, error), None, None
            if alone or starting:
                begun = self._pool_manager.call("begun_alone", worker.name)
                if begun and begun[:2] == (self.id, alone):
                    at, seconds = begun[2:]
                elif alone:
                    cause = "outside"
                elif begun:  # the model was loaded for another run, whose call may be the reason
                    cause = "shared"
            return CallResult(ticket, None, None, brief(error), cause, seconds, at)

    def _cause(self, worker: Worker, error: Exception) -> Cause:
        """Why a worker was lost.

        A node reports at once that a worker has died. If it does not, Ray says that the worker is
        unavailable, many seconds before it notices that the node is dead. Only the pool manager
        kills workers by `ray.kill`, for this run or for another one with the same pool.
        """
        import ray

        if isinstance(error, ray.exceptions.OutOfMemoryError):
            return "memory"
        is_ended = "killed by `ray.kill`" in str(error)  # Ray has no field for it
        is_unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
        if is_ended or is_unavailable or worker.name in self._moved:
            return "outside"
        node, nodes = self._nodes.get(worker.name), self._watch.call(ray.nodes)
        is_lost = any(each["NodeID"] == node and not each["Alive"] for each in nodes)
        return "outside" if is_lost else "unclear"

    def fetch(self, table: Any) -> pa.Table:
        """Return a table that a worker has passed on.

        The rows come to this machine's object store if it has one.
        """
        import ray

        return self._stored(lambda: ray.get(table))

    def put(self, rows: pa.Table) -> Any:
        """Store a table for the workers, and return the reference to it. This process owns it."""
        import ray

        return self._stored(lambda: ray.put(rows))

    def _stored(self, call: Callable[[], Any]) -> Any:
        import ray

        try:
            return self._watch.call(call)
        except ray.exceptions.RayError as error:
            raise TableLostError(brief(error)) from error
        except ConnectionError as error:  # raised by Ray Client
            raise _connection_lost(error) from error

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        """See `Lease.replace`."""
        self._check_in_force()
        claim = self._claims[worker.pool]
        name = self._pool_manager.call("replace", worker.name, claim, self.id, at_once)
        fresh = Worker(name, worker.pool)
        replaced = [fresh if w == worker else w for w in self._workers]
        self._workers = list(dict.fromkeys(replaced))
        return fresh

    def moves(self) -> Sequence[tuple[Worker, Worker]]:
        """See `Lease.moves`."""
        moves = self._moves
        left = [w for w in self._workers if w.name in moves and w.name not in self._moved]
        pairs = [(worker, Worker(moves[worker.name], worker.pool)) for worker in left]
        self._moved |= {worker.name for worker in left}
        self._workers = [*self._workers, *(fresh for _, fresh in pairs)]
        return pairs

    def _check_in_force(self) -> None:
        self._watch.check()
        if self._expired:
            raise lease_expired(self.id)

    def evict(self, pool: str) -> None:
        """See `Lease.evict`."""
        self._workers = [worker for worker in self._workers if worker.pool != pool]
        self._pending = {ref: call for ref, call in self._pending.items() if call[2].pool != pool}
        self._pool_manager.send("evict", pool, False, self.id)

    def release(self) -> None:
        """See `Lease.release`."""
        import ray

        self._over.set()
        if not ray.is_initialized() or self._watch.lost:
            return
        self._pending.clear()
        try:
            self._pool_manager.call("release", self.id)
        except ComputeError as error:  # it expires by itself
            _log.warning("the lease %s could not be released: %s", self.id, error)


class RayClaims(Claims):
    """A run's claims on partitions, held by the pool manager.

    They expire like a lease, some time after their process was killed. Those of a pool manager
    that was restarted are lost.
    """

    def __init__(self, pool_manager: PoolManagerClient, run_id: str, ttl_seconds: float) -> None:
        self._pool_manager, self._run_id, self._lasts = pool_manager, run_id, ttl_seconds
        self._holder = f"{run_id}-{secrets.token_hex(4)}"
        self._over = threading.Event()
        _start_beating(self._over, ttl_seconds, lambda: self.ask(()) is not None)

    def ask(
        self, wanted: Sequence[Sequence[str]], release: Sequence[str] = (), age: float = 0.0
    ) -> Sequence[ClaimAnswer]:
        """See `Claims.ask`. Without a pool manager everything is granted: claims only save work."""
        request = ClaimRequest(self._holder, self._run_id, self._lasts, wanted, release, age)
        try:
            answers: Sequence[ClaimAnswer] = self._pool_manager.call("claim", request)
            return answers
        except ClusterLostError:  # the driver detects it by itself
            pass
        except ComputeError as error:
            _log.warning("partitions are computed without claims: %s", error)
        return super().ask(wanted)

    def close(self) -> None:
        """See `Claims.close`."""
        import ray

        self._over.set()
        is_lost = bool(self._pool_manager.watch.lost)
        if ray.is_initialized() and not is_lost:
            self._pool_manager.send("end_claims", self._holder)


def _start_beating(over: threading.Event, ttl_seconds: float, beat: Callable[[], bool]) -> None:
    """Call a function several times in each `ttl_seconds`, on a thread, while it returns True."""
    import ray

    def body() -> None:
        while not over.wait(ttl_seconds / _BEATS) and ray.is_initialized() and beat():
            pass

    threading.Thread(target=body, daemon=True).start()
