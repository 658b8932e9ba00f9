"""Worker groups on a lease whose workers start and answer when the test says so."""

from __future__ import annotations

import itertools
from typing import Any

from vane_dagster.compute.api import CallResult, Worker
from vane_dagster.engine.worker_group import WorkerGroup
from vane_dagster.events import Noticed
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import LoadReport


class Lease:
    """Records what workers are asked, and what they are told."""

    def __init__(self, *workers: Worker) -> None:
        self.leased = [*workers]
        self.tickets = itertools.count(1)
        self.calls: dict[tuple[str, Worker], int] = {}
        self.told: dict[str, list[str]] = {}
        self.evicted: list[str] = []
        self.replaced: list[Worker] = []
        self.ended_at_once: list[Worker] = []
        self.moving: dict[Worker, Worker] = {}

    @property
    def loading(self) -> list[Worker]:
        return [worker for kind, worker in self.calls if kind == "load"]

    def workers(self) -> list[Worker]:
        return self.leased

    def _called(self, kind: str, worker: Worker) -> int:
        self.calls[kind, worker] = next(self.tickets)
        return self.calls[kind, worker]

    def load(self, worker: Worker, endpoints: Any = None) -> int:
        self.announce(worker, endpoints or {})
        return self._called("load", worker)

    def status(self, worker: Worker) -> int:
        return self._called("status", worker)

    def announce(self, worker: Worker, endpoints: Any) -> None:
        for urls in endpoints.values():
            self.told[worker.name] = [endpoint.url for endpoint in urls]

    def move(self, worker: Worker) -> Worker:
        """A node drains: a worker has to be left for another one."""
        self.moving[worker] = Worker(f"{worker.name}'", worker.pool)
        return self.moving[worker]

    def moves(self) -> list[tuple[Worker, Worker]]:
        moving, self.moving = self.moving, {}
        return [*moving.items()]

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        self.replaced.append(worker)
        self.ended_at_once += [worker] if at_once else []
        fresh = Worker(f"{worker.name}'", worker.pool)
        self.leased = [fresh if each == worker else each for each in self.leased]
        return fresh

    def evict(self, pool: str) -> None:
        self.evicted.append(pool)


class Leased:
    """A group of leased workers, with its events and the stages that it has given up."""

    def __init__(self, *workers: Worker, pools: dict[str, PoolSpec], more: tuple[Any, ...] = ()):
        self.events: list[Any] = []
        self.given_up: list[tuple[Any, str]] = []
        self.lease: Any = Lease(*workers)
        self.group = WorkerGroup(
            self.lease,
            pools,
            self.events.append,
            lambda pool, stages, report: None,
            lambda stages, error: self.given_up.append((stages, str(error))),
            *more,
        )

    def answer(self, worker: Worker, lost: str = "", cause: Any = "unclear", **report: Any) -> None:
        """A worker says how its start went, or died."""
        ticket = self.lease.calls.pop(("load", worker))
        answer = None if lost else LoadReport(False, 1.0, 1, "cpu", "node", **report)
        self.group.handle_done(CallResult(ticket, answer, lost=lost, cause=cause))

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Noticed)]
