"""One wave of a run: fragments streamed through its stages over the leased workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vane_dagster.compute.api import IO_POOL, Cancelled, Done, Lease, Worker
from vane_dagster.compute.waits import Waits
from vane_dagster.engine.accounting import Counts, RowCounts
from vane_dagster.engine.failures import (
    FAILURES_IN_A_ROW,
    Again,
    Loss,
    Losses,
    Mending,
    Streaks,
)
from vane_dagster.engine.fragment_queue import FoundParts, FragmentQueue
from vane_dagster.engine.fragment_state import FragmentRun, Node, TaskKind
from vane_dagster.engine.memory_budget import Budget
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.slicing import Pacing
from vane_dagster.engine.tasks import Dispatch, Flight, Item, Requests
from vane_dagster.engine.worker_group import Crew, Lane, Sharing
from vane_dagster.errors import ClusterLostError, ComputeError, VaneError
from vane_dagster.events import Noticed, Printed
from vane_dagster.planning.plan import Part
from vane_dagster.worker.protocol import Fault, LoadReport, PoolSpec, Report

_MOST_RESTARTS = 3
_TICK_SECONDS = 0.5
_ASKING_SECONDS = 0.005
_FRAGMENTS_A_WORKER = 3
_FRAGMENTS_TO_LEARN = 2


class Stream:
    """Streams all fragments that a wave has to compute."""

    def __init__(
        self,
        state: RunState,
        stages: tuple[str, ...],
        lease: Lease,
        pools: Mapping[str, PoolSpec],
        requests: Requests,
        budget_bytes: int,
        cancelled: threading.Event,
        mending: Mending,
        look_up: Callable[[int, Sequence[str]], FoundParts],
        priority: int = 0,
    ) -> None:
        """Streams `stages`, whose maps run on the workers of `pools` (by stage) under `lease`.

        `look_up` lists the parts of a partition's stages in the store.
        """
        self._state, self._stages, self._lease = state, stages, lease
        self._pools, self._requests, self._cancelled = pools, requests, cancelled
        self._flights: dict[int, Flight] = {}
        self._active: dict[int, FragmentRun] = {}
        self._losses = Losses()
        self._mending = mending
        self._waits = Waits(state.emit)
        self._sharing = Sharing(lease, pools, priority, self._waits)
        self._checker = RowCounts(state, requests)
        self._pacing = Pacing(pools)
        self._streaks = Streaks()
        self._crew = Crew(lease, pools, state.emit, self._worker_ready, self._give_up)
        self._dispatch = Dispatch(requests, self._pacing, self._workers)
        self._counts = Counts(state, stages)
        self._budget = Budget(budget_bytes, max(4, _FRAGMENTS_A_WORKER * self._crew.size))
        self._fragments = FragmentQueue(
            state, stages, state.claims, look_up, self._counts, self._waits
        )

    def run(self) -> None:
        """Streams until every fragment is computed or given up.

        Raises:
            Cancelled: If the run was asked to stop.
            ClusterLostError: If the cluster is gone.
            ComputeError: If the lease ended under way.
        """
        try:
            while self._active or not self._fragments.is_empty:
                if self._cancelled.is_set():
                    raise Cancelled
                self._admit()
                self._hand_out()
                tick = _ASKING_SECONDS if self._fragments.is_asking else _TICK_SECONDS
                for done in self._lease.wait(tick):
                    self._settle(done)
                self._tell()
        except ClusterLostError as error:
            raise ClusterLostError(f"{self._running()}: {error}") from error
        finally:
            self._fragments.close()
            self._sharing.close()
        self._counts.tell(last=True)

    def _running(self) -> str:
        """The stages that are being computed, each with a partition of it."""
        items = [flight.item for flight in self._flights.values()]
        stages = {item.stage: item.run.partition for item in items}
        for run in self._active.values() if not stages else ():
            stages |= dict.fromkeys(run.nodes, run.partition)
        told = []
        for stage, index in stages.items():
            key = self._state.plan.partitions[index].key
            where = "" if key is None else f", partition {key!r}"
            told.append(f"stage '{self._state.pipeline.name}/{stage}'{where}")
        return "; ".join(told) or f"pipeline {self._state.pipeline.name!r}"

    # Fragments

    def _admit(self) -> None:
        self._fragments.take_answer()
        self._fragments.drop_given_up()
        while run := self._fragments.peek():
            if self._is_learning() or not self._budget.admits(run):
                break
            self._fragments.pop()
            self._budget.charge(run)
            self._active[run.order] = run
            self._start_ready(run)
            self._fragments.drop_given_up()
        self._fragments.ask_ahead(idle=not self._active)

    def _start_ready(self, run: FragmentRun) -> None:
        for stage, node in run.nodes.items():
            if node.started or node.waits_for or self._is_undecided(stage):
                continue
            node.started = True
            if stage not in self._pools or self._goes_whole(run, stage):
                self._queue(run, stage, "whole")
            elif (above := self._held_for(run, node)) is not None:
                self._give(run, stage, above.table, above.table_rows)
            else:
                self._queue(run, stage, "load")

    def _is_undecided(self, stage: str) -> bool:
        """Whether it shows only with the first worker, which may know its speed, how a map goes."""
        maps = stage in self._pools and self._pacing.may_go_whole(stage)
        return maps and not self._crew.lane(stage, True).busy

    def _is_learning(self) -> bool:
        """Whether enough is under way until it shows how fast its stages are, so how they go."""
        stages = {s for run in self._active.values() for s in run.nodes}
        return len(self._active) >= _FRAGMENTS_TO_LEARN and self._pacing.is_learning(stages)

    def _held_for(self, run: FragmentRun, node: Node) -> Node | None:
        """The stage above, if a map's workers can be given its rows as they lie in memory."""
        return run.nodes.get(node.spec.upstream[0]) if run.order_of(node.spec) is None else None

    def _workers(self, stage: str) -> int:
        return self._crew.lane(stage, True).size

    def _goes_whole(self, run: FragmentRun, stage: str) -> bool:
        rows, workers = run.fragment.stop - run.fragment.start, self._workers(stage)
        if stage in run.suspects or stage in run.mends:
            return False
        return self._pacing.goes_whole(stage, rows, self._fragments.left, workers)

    def _give(
        self, run: FragmentRun, stage: str, table: Any, rows: int, shares: Sequence[int] = ()
    ) -> None:
        run.nodes[stage].give(table, rows, shares)
        self._counts.know(run, stage, rows)
        self._queue(run, stage, "slice" if rows else "gather")

    def _queue(
        self, run: FragmentRun, stage: str, kind: TaskKind, again: Again | None = None
    ) -> None:
        calls = stage in self._pools and kind in ("slice", "whole") and not (again and again.error)
        self._crew.lane(stage, calls).push(run.order, Item(run, run.epoch, stage, kind, again))

    # Handing out

    def _hand_out(self) -> None:
        for lane in self._crew.lanes.values():
            while (item := lane.peek()) is not None:
                if not item.wanted:
                    lane.pop()
                elif (worker := lane.free_worker(item.alone)) and self._budget.lets(item.run):
                    self._budget.make_room(item.run)
                    self._hand(lane, item, worker)
                else:
                    break

    def _hand(self, lane: Lane, item: Item, worker: Worker) -> None:
        last = self._fragments.is_last
        work, tables, start, rows = self._dispatch.work(item, lane, worker, last)
        self._counts.begin(item.run, item.stage)
        lane.begin(worker, rows, item.alone)
        began = time.monotonic()  # before the worker's own clock, which ends a call at timeout_s
        ticket = self._lease.run(worker, work, tables)
        self._flights[ticket] = Flight(worker, item, start, rows, began)

    # What came back

    def _settle(self, done: Done) -> None:
        if self._crew.settle(done):
            return
        flight = self._flights.pop(done.ticket)
        report = done.report if isinstance(done.report, Report) else None
        self._crew.ended(flight.worker, flight.rows, report.spent if report else "")
        self._counts.end(flight.item.run, flight.item.stage, report)
        if report is None:
            loss = Loss(done.lost, done.worker_lost, timed_out=done.timed_out)
            self._lost(loss, done.ticket, flight)
        elif report.sick:
            loss = Loss(report.sick, True, report.fault, innocent=report.fault is None)
            self._lost(loss, done.ticket, flight)
        else:
            self._answered(flight, report, done)

    def _worker_ready(self, stages: Sequence[str], report: LoadReport) -> None:
        if stages:
            self._state.worker_ready(self._pools[stages[0]].identity, report)
        for stage in stages:
            self._pacing.recall(stage, report.row_seconds)
        for run in list(self._active.values()):
            self._start_ready(run)

    def _printed(self, stages: Sequence[str], text: str) -> None:
        if text:
            self._state.emit(Printed(", ".join(stages) or IO_POOL, text))

    def _answered(self, flight: Flight, report: Report, done: Done) -> None:
        item = flight.item
        self._printed([item.stage], report.output)
        if report.cancelled:
            raise ComputeError(
                f"lease {self._lease.id} ended under way: the keeper had no heartbeat of this run. "
                "Start the run again; what is finished is kept"
            )
        calls = flight.worker.pool != IO_POOL
        if calls and not report.is_vain:
            self._streaks.record_success(flight.worker)
        elif calls:
            self._streaks.record_failure(flight.worker, item.run)
            if self._streaks.should_replace(flight.worker):
                self._streaks.record_replacement(flight.worker)
                reason = f"it failed at {FAILURES_IN_A_ROW} fragments in a row"
                self._lost(Loss(reason, True, innocent=True), done.ticket, flight)
                return
        if not item.wanted:
            return
        if report.fault:
            self._refused(item, report.fault)
            return
        run, node = item.run, item.run.nodes[item.stage]
        if calls:
            self._losses.answered(item.stage)
        self._budget.take(run, item.stage, item.kind, report.bytes_out)
        if self._counts.add(run, item.stage, item.kind, report):
            self._pacing.learn(item.stage, report.seconds, report.tally.rows_in)
            if error := self._checker.too_many_faults(run, item.stage, report):
                self._fail(run.partition, item.stage, error)
                return
            if report.faults:
                where, told = self._requests.culprit(run, item.stage), "; ".join(report.faults)
                self._state.emit(Noticed(f"{where}: some rows failed: {told}"))
        if item.kind == "load":
            self._give(run, item.stage, done.table, report.rows_out, report.shares)
        elif item.kind == "slice":
            node.pieces[flight.start] = (done.table, report.rows_out)
            node.tally += report.done_by(flight.worker.name)
            node.flying -= 1
            if not node.rows_left and not node.flying:
                if run.order_of(node.spec) is None:
                    node.given = None
                self._queue(run, item.stage, "gather")
        else:
            self._written(run, node, report, done.table)

    def _written(self, run: FragmentRun, node: Node, report: Report, table: Any) -> None:
        stage = node.spec.name
        assert report.part is not None
        part = Part(self._requests.folder(run, node.spec), report.part)
        if error := self._checker.violation(run, node.spec, part):
            part.folder.delete([part.info.name])  # so that nothing builds on it
            self._fail(run.partition, stage, error)
            return
        self._counts.add_part(run, stage, report.rows_out)
        node.done, node.given, node.pieces = True, None, {}
        node.table = table if node.readers else None
        node.table_rows = report.rows_out
        self._state.add_part(run.partition, stage, run.index, part)
        self._fragments.release(run, [stage])
        if error := self._state.spending.take(stage, part.info):
            self._begin_no_more(stage, error)
        for below in run.nodes.values():
            below.waits_for.discard(stage)
        self._start_ready(run)
        for upstream in node.spec.upstream:
            if upstream in run.nodes:
                run.read(upstream)
        self._end_if_finished(run)

    def _end_if_finished(self, run: FragmentRun) -> None:
        if run.finished and run.order in self._active:
            del self._active[run.order]
            self._budget.release(run)
            self._fragments.end(run)

    # Failures

    def _refused(self, item: Item, fault: Fault) -> None:
        if error := self._mending.remove_damaged(item.run, item.stage, fault):
            self._fail(item.run.partition, item.stage, error)
            return
        item.run.abandon(set(item.run.nodes))
        self._end_if_finished(item.run)

    def _fail(self, partition: int, stage: str, error: VaneError) -> None:
        given_up = self._state.fail(partition, stage, error)
        for run in [r for r in self._active.values() if r.partition == partition]:
            run.abandon(given_up)
            self._fragments.release(run, given_up)
            self._end_if_finished(run)

    def _begin_no_more(self, stage: str, error: VaneError) -> None:
        """Fails a stage where fragments of it have not begun; those under way are finished."""
        begun = {(run.partition, run.index) for run in self._active.values() if stage in run.nodes}
        for index, missing in self._state.missing(stage):
            if any((index, i) not in begun for i in missing):
                self._state.fail(index, stage, error)

    def _give_up(self, stages: Sequence[str], error: VaneError) -> None:
        """Fails stages whose pool cannot start in every partition that needs them."""
        for stage in stages:
            for index, partition in enumerate(self._state.plan.partitions):
                if len(self._state.parts[index, stage]) < len(partition.fragments):
                    self._fail(index, stage, error)

    def _lost(self, loss: Loss, ticket: int, flight: Flight) -> None:
        """A worker or its data is gone: the worker is replaced, what it was at is done again."""
        if loss.worker:
            self._record_loss(ticket, flight.worker)
        at_work = not loss.worker or self._losses.was_at_work(flight.worker, ticket)
        guilty = at_work and not loss.innocent
        item = flight.item
        spec = self._state.pipeline[item.stage].spec
        calls = guilty and flight.worker.pool != IO_POOL
        limit = loss.exceeded(spec, time.monotonic() - flight.began) if calls else None
        if loss.worker and limit is not None:
            took = "took" if loss.timed_out else "may have taken"
            reason = f"a call {took} longer than timeout_s={limit:g}: {loss.reason}"
            loss = replace(loss, reason=reason)
        if loss.worker:
            self._crew.lost(flight.worker, loss.reason, starting=False)
        if not item.wanted:
            return
        run = item.run
        if loss.worker and spec.isolates_rows and not self._losses.is_sick(item.stage):
            if item.kind == "slice":
                self._give_again(flight, guilty, loss, limit is not None)
                return
            guilty = guilty and item.stage in run.suspects
            run.suspects.add(item.stage)
        if run.restarts < _MOST_RESTARTS or not guilty:
            self._counts.start_over(run)
            run.start_over(guilty)
            self._start_ready(run)
            return
        culprit = self._requests.culprit(run, item.stage)
        error = ComputeError(
            f"{culprit}: lost its worker or its data {run.restarts + 1} times, the last time: "
            f"{loss.reason}. If a row kills the process, on_error='quarantine' finds it; if memory "
            "ran out, lower batch_size or concurrency, or reserve memory="
            + (f"\n\n{loss.fault.traceback}" if loss.fault else "")
        )
        self._fail(run.partition, item.stage, error)

    def _give_again(self, flight: Flight, guilty: bool, loss: Loss, hung: bool) -> None:
        """Gives the rows of a lost slice to other workers, halved if they may be at fault."""
        item, node = flight.item, flight.item.run.nodes[flight.item.stage]
        why = loss.fault.message if loss.fault else ""
        rows = (flight.start, flight.rows)
        if guilty:
            self._losses.record_death(item.run, node.spec, *rows)
        again = self._losses.again(item.run, node.spec, *rows, guilty, hung, why)
        node.flying += len(again) - 1
        for part in again:
            self._queue(item.run, item.stage, "slice", part)

    def _record_loss(self, ticket: int, worker: Worker) -> None:
        queued = [t for t, flight in self._flights.items() if flight.worker == worker]
        at_once = self._crew.lanes[worker.pool].slots - 1
        self._losses.record_loss(worker, [ticket, *queued], at_once)

    def _tell(self) -> None:
        self._counts.tell()
        self._crew.look_after_starts()
        self._fragments.tell_waits(idle=not self._active)
        self._sharing.follow(self._crew.lanes)
