"""Workers of pools and the servers that they call: who gets a call, starts, and is replaced."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from vane_dagster.compute.api import IO_WORKERS, CallResult, Worker
from vane_dagster.engine.pool_usage import PoolUsage
from vane_dagster.engine.worker_group import WorkerGroup, WorkerQueue
from vane_dagster.events import Noticed
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import Fault, LoadReport, WorkerStatus


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


FIRST, SECOND = Worker("m-1", "m"), Worker("m-2", "m")


def queue() -> WorkerQueue:
    both = WorkerQueue(2)
    both.mark_ready(FIRST)
    both.mark_ready(SECOND)
    return both


def test_the_least_loaded_worker_gets_the_next_call():
    both = queue()
    both.begin(FIRST, 10)
    assert both.pick_worker() == SECOND
    both.begin(SECOND, 20)
    assert both.pick_worker() == FIRST
    both.begin(FIRST, 1)
    both.begin(SECOND, 1)
    assert both.pick_worker() is None
    both.end(SECOND, 20)
    assert both.pick_worker() == SECOND


def test_a_call_that_tolerates_no_other_waits_for_an_idle_worker():
    both = queue()
    both.begin(FIRST, 10)
    both.begin(SECOND, 10)
    assert both.pick_worker(exclusive=True) is None
    both.end(FIRST, 10)
    both.begin(FIRST, 1, exclusive=True)
    assert both.pick_worker() == SECOND
    both.begin(SECOND, 5)
    assert both.pick_worker() is None


def leased(*workers: Worker, **options: Any) -> Leased:
    return Leased(*workers, pools={"model": PoolSpec("m", "Model", (1, 2), **options)})


def test_a_spent_worker_is_replaced_after_its_last_answer():
    group = leased(FIRST)
    group.answer(FIRST)
    queue = group.group.worker_queues["m"]
    queue.begin(FIRST, 10)
    queue.begin(FIRST, 20)
    group.group.finish_call(FIRST, 10, "has answered 2 calls")
    assert queue.pick_worker() is None
    assert group.lease.loading == [], "it has one more call"
    group.group.finish_call(FIRST, 20, "has answered 3 calls")
    assert [worker.name for worker in group.lease.loading] == ["m-1'"]
    assert group.notices == ["worker m-1 has answered 2 calls; it is replaced"]
    assert group.lease.ended_at_once == [], "other runs may have calls there"
    group.group.replace_lost(*group.lease.loading, "lost", starting=True)
    assert len(group.lease.ended_at_once) == 1


def test_a_pool_whose_rows_are_called_again_is_reported_every_half_minute():
    now = 0.0
    pools = {"label": PoolSpec("m", "Model", (1, 2))}
    group = Leased(FIRST, SECOND, Worker("m-3", "m"), pools=pools, more=(lambda: now,))
    for worker in (FIRST, SECOND, Worker("m-3", "m")):
        group.answer(worker)
    for worker in (FIRST, SECOND):
        group.group.worker_queues["m"].begin(worker, 10)
    for now in (29.0, 30.0, 61.0):
        group.group.check_starts()
        asked = {w: group.lease.calls.pop(("status", w)) for _, w in [*group.lease.calls]}
        assert asked.keys() == (set() if now == 29.0 else {FIRST, SECOND}), "not the idle one"
        for ticket in asked.values():
            group.group.handle_done(CallResult(ticket, WorkerStatus(waits="9 rows are called")))
    assert group.notices == ["label: 9 rows are called (worker m-1)"] * 2

    now = 92.0
    group.group.check_starts()
    for ticket in list(group.lease.calls.values()):
        group.group.handle_done(CallResult(ticket, None, lost="it died"))
    assert len(group.notices) == 2
    assert group.lease.replaced == [], "its calls tell"


def test_a_worker_on_a_draining_node_works_until_another_is_ready_and_ends_after_its_last_call():
    group = leased(FIRST)
    group.answer(FIRST)
    queue = group.group.worker_queues["m"]
    queue.begin(FIRST, 10)
    fresh = group.lease.move(FIRST)
    group.group.move_workers()
    assert group.lease.loading == [fresh]
    assert queue.pick_worker() == FIRST, "no other is ready"
    group.answer(fresh)
    queue.begin(fresh, 10)
    queue.begin(fresh, 10)
    assert queue.pick_worker() is None
    group.group.move_workers()
    assert group.lease.replaced == [], "it has a call"
    group.group.finish_call(FIRST, 10, "has answered 2 calls")
    group.group.move_workers()
    assert group.lease.replaced == [FIRST]
    assert group.lease.loading == [], "nothing starts twice"
    assert [*queue.calls_by_worker] == [fresh]
    notice = "worker m-1 is on a draining node; m-1' replaces it"
    assert group.notices == [notice, "worker m-1 has answered 2 calls; it is replaced"]


def test_an_unused_gpu_is_noticed_once_for_each_pool_that_reserves_one():
    group = leased(FIRST, SECOND)
    group.group.notice_unused_gpu(FIRST, "torch has used no memory of it")
    assert group.notices == [], "it reserves none"
    group = leased(FIRST, SECOND, bundle={"GPU": 0.5})
    for worker in (FIRST, SECOND):
        group.group.notice_unused_gpu(worker, "torch has used no memory of it")
    assert group.notices == [
        "'model': Model reserves 0.5 GPU per worker, but torch has used no memory of it"
    ]


def test_a_pool_whose_workers_die_as_they_start_is_given_up():
    group = leased(FIRST)
    for _ in range(4):
        (worker,) = group.lease.loading
        group.answer(worker, lost="exit code 1")
    assert group.lease.loading == []
    assert group.lease.evicted == ["m"]
    ((stages, error),) = group.given_up
    assert stages == ("model",)
    assert "died while constructing its model, 4 times in a row" in error


def test_starts_that_another_runs_calls_end_are_no_failed_ones():
    group = leased(FIRST)
    for _ in range(6):
        (worker,) = group.lease.loading
        group.answer(worker, lost="exit code 1", cause="shared")
    assert group.given_up == []
    assert len(group.lease.loading) == 1


def test_many_workers_that_die_with_their_node_are_no_pool_that_cannot_start():
    """Their replacements may have been placed on it too, before its loss was known."""
    workers = [Worker(f"m-{number}", "m") for number in range(8)]
    group = leased(*workers)
    for worker in workers:
        group.answer(worker, lost="its node has died")
    assert group.given_up == []
    assert len(group.lease.loading) == len(workers)


def test_a_model_that_cannot_be_constructed_is_given_up():
    io = Worker("io-1", IO_WORKERS)
    group = leased(FIRST, SECOND, io)
    group.answer(FIRST, fault=Fault("ModelLoadError", "no weights"))
    group.answer(io)
    assert [text for _, text in group.given_up] == ["no weights"]
    assert group.group.worker_queue("model", calls_model=False).pick_worker() == io


CLIENTS = [Worker("c1", "client"), Worker("c2", "client")]
REPLICAS = [Worker("s1", "server"), Worker("s2", "server")]
ENDPOINTS = [Endpoint("http://one:1", node_id="a"), Endpoint("http://two:2", node_id="b")]


class World(Leased):
    """A stage whose two workers call a server with two replicas."""

    def __init__(self, is_deferred: bool = False) -> None:
        self.now = 0.0
        self.usage = PoolUsage()
        client = PoolSpec("client", "ask", (2, 2), uses={"llm": "server"})
        server = PoolSpec("server", "vLLM server tiny", (2, 2), server="tiny")
        more = (lambda: self.now, {"server": server}, self.usage.server_changed, is_deferred)
        super().__init__(*CLIENTS, *REPLICAS, pools={"answers": client}, more=more)

    def ready(self, worker: Worker, endpoint: Endpoint | None = None) -> None:
        status = ServerStatus("ready", endpoint) if endpoint else None
        self.answer(worker, server=status)

    def report(self, worker: Worker, status: ServerStatus | None, lost: str = "") -> None:
        """The replica's worker answers the next question for its status."""
        self.now += 1.5
        self.group.check_starts()
        ticket = self.lease.calls.pop(("status", worker))
        answer = None if status is None else WorkerStatus(server=status)
        self.group.handle_done(CallResult(ticket, answer, lost=lost))

    def start(self) -> None:
        for worker, endpoint in zip(REPLICAS, ENDPOINTS):
            self.ready(worker, endpoint)
        for worker in CLIENTS:
            self.ready(worker)


@pytest.fixture
def world():
    made = World()
    made.start()
    return made


def test_workers_wait_until_all_replicas_are_ready():
    world = World()
    assert {worker.name for _, worker in world.lease.calls} == {"s1", "s2"}
    world.ready(REPLICAS[0], ENDPOINTS[0])
    assert ("load", CLIENTS[0]) not in world.lease.calls, "the other replica still starts"
    world.ready(REPLICAS[1], ENDPOINTS[1])
    assert {("load", worker) for worker in CLIENTS} <= set(world.lease.calls)
    for worker in CLIENTS:
        world.ready(worker)
    assert world.lease.told == {
        "c1": ["http://one:1", "http://two:2"],
        "c2": ["http://two:2", "http://one:1"],
    }, "each prefers another replica"
    assert world.group.size == len(CLIENTS), "servers get no work"
    assert world.group.stages(REPLICAS[0]) == ("answers",)


def test_nothing_starts_before_there_is_a_row_for_it():
    world = World(is_deferred=True)
    world.now += 100.0
    world.group.check_starts()
    assert not world.lease.calls
    assert not world.notices
    world.group.load()
    assert world.lease.loading == REPLICAS
    world.start()
    world.group.load()
    assert not world.lease.loading


def test_workers_wait_while_no_replica_is_up():
    """The server may be restarting when it is leased, and draining when it is stopped."""
    world = World()
    for worker in REPLICAS:
        ticket = world.lease.calls.pop(("load", worker))
        down = LoadReport(True, 1.0, 1, "cpu", "node", server=ServerStatus("restarting"))
        world.group.handle_done(CallResult(ticket, down))
    assert ("load", CLIENTS[0]) not in world.lease.calls
    world.report(REPLICAS[1], ServerStatus("ready", ENDPOINTS[1]))
    world.ready(CLIENTS[0])
    assert world.lease.told["c1"] == ["http://two:2"]
    world.report(REPLICAS[1], ServerStatus("stopped"))
    world.group.replace_lost(CLIENTS[0], "killed", starting=False)
    fresh = Worker("c1'", "client")
    assert ("load", fresh) not in world.lease.calls
    world.report(REPLICAS[0], ServerStatus("ready", ENDPOINTS[0]))
    assert ("load", fresh) in world.lease.calls


def test_replicas_on_draining_nodes_serve_until_another_one_is_ready(world):
    fresh = [world.lease.move(worker) for worker in REPLICAS]
    world.group.move_workers()
    assert world.lease.told["c1"] == ["http://one:1", "http://two:2"]
    world.ready(fresh[0], Endpoint("http://three:3", node_id="c"))
    world.group.move_workers()
    assert world.lease.replaced == REPLICAS
    assert world.lease.told["c1"] == world.lease.told["c2"] == ["http://three:3"]


def test_a_restart_is_noticed_and_keeps_the_url(world):
    told = dict(world.lease.told)
    world.lease.told.clear()
    down = replace(ENDPOINTS[0], life=(0, True))
    world.report(REPLICAS[0], ServerStatus("restarting", down, reason="exit code 3"))
    assert world.lease.told == told, "it comes back at the same URL"
    world.lease.told.clear()
    world.report(REPLICAS[0], ServerStatus("restarting", down, reason="exit code 3"))
    assert world.lease.told == {}, "they know"
    back = ServerStatus("ready", ENDPOINTS[0], restarts=1, reason="exit code 3")
    world.report(REPLICAS[0], back)
    assert world.notices == ["vLLM server tiny: replica s1 was restarted: exit code 3"]
    moved = replace(ENDPOINTS[0], url="http://one:9")
    world.report(REPLICAS[0], replace(back, endpoint=moved))
    assert world.lease.told["c1"] == ["http://one:9", "http://two:2"]
    assert told["c1"] == ["http://one:1", "http://two:2"]


def test_a_replica_whose_worker_died_is_replaced_and_the_others_go_on(world):
    world.report(REPLICAS[0], None, lost="killed")
    assert world.lease.told["c1"] == ["http://two:2"]
    fresh = Worker("s1'", "server")
    world.ready(fresh, replace(ENDPOINTS[0], url="http://one:7"))
    assert sorted(world.lease.told["c1"]) == ["http://one:7", "http://two:2"]


def test_a_server_that_has_failed_for_good_fails_its_stages(world):
    world.report(REPLICAS[0], ServerStatus("failed", reason="crashed 8 times\nlast line"))
    assert world.lease.evicted == ["server"]
    stages, error = world.given_up[0]
    assert stages == ("answers",)
    assert "vLLM server tiny has failed: crashed 8 times\nlast line" in error
    world.lease.calls.clear()
    world.now += 3600
    world.group.check_starts()
    assert not world.lease.calls, "no worker of a pool is left that could say how it does"


def test_restarts_and_the_state_of_replicas_are_counted_once(world):
    world.report(REPLICAS[0], ServerStatus("ready", ENDPOINTS[0], restarts=2))
    world.report(REPLICAS[0], ServerStatus("ready", ENDPOINTS[0], restarts=3))
    world.report(REPLICAS[1], None, lost="its node is gone")
    used = world.usage.take_servers(["server"])
    assert used.restarts == 3
    assert [(one["server"], one["url"], one["state"]) for one in used.replicas] == [
        ("tiny", "http://one:1", "ready")
    ]
    assert world.usage.take_servers(["server"]).restarts == 0
