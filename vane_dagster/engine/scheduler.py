"""One wave of a run: fragments streamed through its stages over the leased workers."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vane_dagster.compute.api import (
    IO_WORKERS,
    CallResult,
    Cancelled,
    Lease,
    Worker,
    lease_expired,
)
from vane_dagster.compute.waits import Waits
from vane_dagster.engine.accounting import (
    PoolClock,
    WaveProgress,
    count_error,
)
from vane_dagster.engine.damaged_parts import remove_damaged
from vane_dagster.engine.fragment_queue import FragmentQueue
from vane_dagster.engine.fragment_state import FragmentState, Held, TaskKind
from vane_dagster.engine.memory_budget import MemoryBudget
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.engine.tasks import InFlightTask, Task, WorkBuilder
from vane_dagster.engine.worker_group import WorkerGroup, WorkerQueue
from vane_dagster.errors import ClusterLostError, ComputeError, StoreError, VaneError, names
from vane_dagster.events import CallEnded, CallStarted, Noticed, PoolTime, Printed
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning.plan import Part
from vane_dagster.retries import (
    MAX_CONSECUTIVE_FAILURES,
    FailureStreaks,
    Loss,
    LostCalls,
    RetriedRows,
    loss_after,
)
from vane_dagster.storage.batch_records import Recorded
from vane_dagster.storage.quarantine import fault_lines
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Fault, LoadReport, WorkReport

_TICK_SECONDS = 0.5
_CLAIM_TICK_SECONDS = 0.005
_FRAGMENTS_A_WORKER = 3
_FRAGMENTS_TO_LEARN = 2


class WaveScheduler:
    """Streams all fragments that a wave must compute."""

    def __init__(
        self,
        state: RunState,
        stages: tuple[str, ...],
        lease: Lease,
        pools: Mapping[str, PoolSpec],
        budget_bytes: int,
        cancelled: threading.Event,
        servers: Mapping[str, PoolSpec] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the scheduler, and start loading the leased workers.

        If all rows may be copies, models are loaded when the first one is not.
        """
        self._state, self._stages, self._lease = state, stages, lease
        self._pools, self._cancelled = pools, cancelled
        self._in_flight: dict[int, InFlightTask] = {}
        self._lost_calls = LostCalls()
        self._clock = clock
        self._slice_sizer = SliceSizer(pools)
        self._failure_streaks = FailureStreaks()
        without_code = tuple(stage for stage in stages if stage not in pools)
        self._pool_clocks = {IO_WORKERS: PoolClock(PoolTime(without_code, is_io=True))}
        for pool in pools.values():
            own = tuple(stage for stage, each in pools.items() if each.identity == pool.identity)
            bundle = {} if pool.on_driver else pool.bundle
            self._pool_clocks[pool.identity] = PoolClock(PoolTime(own, bundle=bundle))
        self._measured_at = clock()
        self._is_full = False
        self._ended = 0
        self._counts = WaveProgress(state, stages, clock, self._pool_clocks)
        self._fragments = FragmentQueue(
            state, stages, self._counts, Waits(state.emit, clock), clock
        )
        self._worker_group = WorkerGroup(
            lease,
            pools,
            state.emit,
            self._worker_ready,
            self._give_up,
            clock,
            servers,
            state.usage.server_changed,
            is_deferred=bool(pools) and all(map(self._fragments.lookups.finds, pools)),
        )
        self._builder = WorkBuilder(state, lease.id, self._slice_sizer)
        self._budget = MemoryBudget(
            budget_bytes, max(4, _FRAGMENTS_A_WORKER * self._worker_group.size)
        )
        self._active = self._budget.fragments

    def run(self) -> None:
        """Stream until every fragment is computed or given up."""
        try:
            while self._active or not self._fragments.is_empty:
                if self._cancelled.is_set():
                    raise Cancelled
                self._admit()
                self._worker_group.move_workers()
                self._assign_tasks()
                self._measure()
                tick = _CLAIM_TICK_SECONDS if self._fragments.is_claiming else _TICK_SECONDS
                for done in self._lease.wait(tick):
                    self._handle_done(done)
                self._report_progress()
        except ClusterLostError as error:
            stages = names(f"{self._state.pipeline.name}/{stage}" for stage in self._stages)
            raise ClusterLostError(f"stages {stages}: {error}") from error
        finally:
            self._fragments.close()
        self._measure()
        self._counts.emit_progress(last=True)

    # Fragments

    def _admit(self) -> None:
        self._fragments.apply_claims()
        self._is_full = False
        while fragment := self._fragments.peek():
            self._is_full = not self._budget.has_room_for(fragment)
            if self._is_full or self._is_learning() or not self._is_within_budgets(fragment):
                break
            self._fragments.pop()
            self._budget.charge(fragment)
            self._start_ready(fragment)
        self._fragments.claim_ahead(len(self._active))

    def _start_ready(self, fragment: FragmentState) -> None:
        for stage, task_state in fragment.task_states.items():
            if task_state.started or task_state.waits_for:
                continue
            task_state.started = True
            if stage not in self._pools or self._should_run_whole(fragment, stage):
                self._queue(fragment, stage, "whole")
            elif above := self._upstream_in_memory(fragment, task_state.spec):
                self._set_input(fragment, stage, replace(above, bytes=0))
            else:
                self._queue(fragment, stage, "load")

    def _is_learning(self) -> bool:
        """Whether admission waits until the first fragments show the speed of their stages."""
        is_learning = self._slice_sizer.is_learning
        if self._ended or len(self._active) < _FRAGMENTS_TO_LEARN or not is_learning(self._stages):
            return False
        return is_learning({s for each in self._active.values() for s in each.task_states})

    def _is_within_budgets(self, fragment: FragmentState) -> bool:
        """Whether the budgets of its stages let a fragment begin now."""

        def in_flight(stage: str) -> int:
            return sum(
                each.rows
                for each in self._active.values()
                if (task_state := each.task_states.get(stage)) and not task_state.done
            )

        may_begin = self._state.token_budget.may_begin
        stages = fragment.task_states
        return all(may_begin(s, fragment.rows, functools.partial(in_flight, s)) for s in stages)

    def _upstream_in_memory(self, fragment: FragmentState, spec: StageSpec) -> Held | None:
        """The upstream rows, if a map's workers can read them from memory in their order."""
        above = fragment.task_states.get(spec.upstream[0])
        return above.table if above and not fragment.is_arranged(spec) else None

    def _should_run_whole(self, fragment: FragmentState, stage: str) -> bool:
        if fragment.is_suspect or not fragment.expects_new_rows(stage):
            return False
        return self._slice_sizer.should_run_whole(stage, fragment.rows)

    def _set_input(self, fragment: FragmentState, stage: str, given: Held) -> None:
        fragment.task_states[stage].give(given)
        self._queue(fragment, stage, "slice" if given.rows else "gather")

    def _queue(
        self, fragment: FragmentState, stage: str, kind: TaskKind, retry: RetriedRows | None = None
    ) -> None:
        calls = stage in self._pools and kind in ("slice", "whole") and not (retry and retry.error)
        if calls:
            self._worker_group.load()
        self._worker_group.worker_queue(stage, calls).push(
            fragment.place, Task(fragment, fragment.epoch, stage, kind, retry)
        )

    # Assignment of tasks

    def _assign_tasks(self) -> None:
        last = self._budget.last_to_continue()
        for worker_queue in self._worker_group.worker_queues.values():
            while (task := worker_queue.peek()) is not None:
                if not task.is_current:
                    worker_queue.pop()
                elif task.fragment.place <= last and (
                    worker := worker_queue.pick_worker(task.alone)
                ):
                    self._assign(worker_queue, task, worker)
                else:
                    break

    def _assign(self, worker_queue: WorkerQueue, task: Task, worker: Worker) -> None:
        last = self._fragments.is_last
        work, tables, start, rows = self._builder.take_next(task, worker_queue, worker, last)
        self._counts.begin(task.fragment, task.stage)
        worker_queue.begin(worker, rows, task.alone)
        began = self._clock()  # before the worker's own clock, which ends a call at timeout_s
        ticket = self._lease.run(worker, work, tables)
        self._in_flight[ticket] = InFlightTask(worker, task, work, start, rows, began)
        called = CallStarted(
            ticket,
            task.stage,
            partition=self._state.plan.partitions[task.fragment.partition].key,
            fragment=task.fragment.index,
            kind=task.kind,
            worker=worker.name,
            at=time.time_ns(),
        )
        self._state.emit(called)

    # Completed calls

    def _handle_done(self, done: CallResult) -> None:
        if self._worker_group.handle_done(done):
            return
        in_flight = self._in_flight.pop(done.ticket)
        report = done.report if isinstance(done.report, WorkReport) else None
        self._state.emit(CallEnded(done.ticket, report, done.lost, time.time_ns()))
        self._worker_group.finish_call(
            in_flight.worker, in_flight.rows, report.recycle_reason if report else ""
        )
        if report is not None and report.unused_gpu:
            self._worker_group.notice_unused_gpu(in_flight.worker, report.unused_gpu)
        self._counts.end(in_flight.task.fragment, in_flight.task.stage, report)
        if report is None:
            loss, reason = self._loss_of(in_flight, done)
            self._lost(in_flight, loss, reason, None, done.at)
        elif report.unhealthy_reason:
            loss = "crash" if report.fault else "outside"
            self._lost(in_flight, loss, report.unhealthy_reason, report.fault, report.at)
        else:
            self._answered(in_flight, report, done)

    def _worker_ready(self, pool: str, stages: Sequence[str], report: LoadReport) -> None:
        if stages:
            self._state.usage.worker_ready(pool, report)
        for stage in stages:
            self._slice_sizer.seed_estimate(stage, report.row_seconds)

    def _answered(self, in_flight: InFlightTask, report: WorkReport, done: CallResult) -> None:
        task = in_flight.task
        if (output := report.output).text:
            key = self._state.plan.partitions[task.fragment.partition].key
            self._state.emit(Printed(task.stage, output, in_flight.worker.name, key))
        if report.cancelled:
            raise lease_expired(self._lease.id)
        if used_up := self._state.token_budget.record(task.stage, report.spent):
            self._fail_unstarted(task.stage, used_up)
        worker = in_flight.worker
        calls = worker.pool != IO_WORKERS
        counts = calls and not self._state.plan.retried  # rows that failed before may fail again
        if counts and not report.all_rows_failed:
            self._failure_streaks.record_success(worker, worker.pool)
        elif counts and self._failure_streaks.record_failure(
            worker, worker.pool, task.fragment.place
        ):
            reason = f"all rows failed in {MAX_CONSECUTIVE_FAILURES} consecutive fragments"
            self._lost(in_flight, "outside", reason)
            return
        if not task.is_current:
            return
        fragment, task_state = task.fragment, task.state
        if report.faults:
            self._state.add_failed_rows(fragment.partition, task.stage, report.faults)
        if report.fault:
            self._refused(task, report.fault)
            return
        if calls:
            self._lost_calls.answered(task.stage)
        self._budget.record_table(fragment, report.bytes_out)
        self._counts.add(fragment, task.stage, task.kind, report)
        if calls:
            self._slice_sizer.learn(task.stage, report.seconds, report.tally.rows_in)
        if report.faults:
            failed = "; ".join(fault_lines(report.faults))
            self._state.emit(Noticed(f"{in_flight.work.location}: some rows failed: {failed}"))
        if task.kind == "load":
            self._fragments.lookups.record(fragment, task.stage, report)
            given = Held(done.table, report.tally.rows_in, report.bytes_out)
            self._counts.set_input_rows(fragment, task.stage, report.rows_out)
            self._set_input(fragment, task.stage, given)
        elif task.kind == "slice":
            piece = Held(done.table, report.rows_out, report.bytes_out)
            task_state.pieces[in_flight.start] = piece
            task_state.tally += replace(
                report.tally, workers=(in_flight.worker.name,), seconds=report.seconds
            )
            task_state.slices_in_flight -= 1
            task_state.pending += [report.pending] if report.pending else []
            if not task_state.rows_left and not task_state.slices_in_flight:
                if task_state.pending:
                    self._pend(fragment, task.stage, task_state.pending)
                    return
                if not fragment.is_arranged(task_state.spec):
                    task_state.given = None
                self._queue(fragment, task.stage, "gather")
        elif report.pending:
            self._pend(fragment, task.stage, [report.pending])
        else:
            self._written(task, in_flight.work, report, done.table)

    def _written(self, task: Task, work: Work, report: WorkReport, table: Any) -> None:
        fragment, task_state, stage = task.fragment, task.state, task.stage
        assert report.part is not None
        assert work.target is not None
        part = Part(work.target.folder, report.part)
        if error := count_error(self._state, fragment, task.spec, part.info, work.location):
            work.target.folder.delete([report.part.name])  # so that no run finds it
            self._fail(fragment.partition, stage, error)
            return
        self._counts.add_part(fragment, task_state, part.info)
        task_state.done, task_state.given, task_state.pieces = True, None, {}
        if fragment.is_read(stage):
            task_state.table = Held(table, part.info.rows, report.bytes_out)
        self._state.add_part(fragment.partition, stage, fragment.index, part)
        self._state.token_budget.ended(stage, part.info, fragment.rows)
        for below in fragment.task_states.values():
            below.waits_for.discard(stage)
        self._start_ready(fragment)
        fragment.let_go()
        self._end_if_finished(fragment)

    def _pend(self, fragment: FragmentState, stage: str, recorded: Sequence[Recorded]) -> None:
        """Give up a stage and those downstream of it for a fragment that waits for batches."""
        waiting = self._state.pend(fragment.partition, stage, fragment.index, recorded)
        fragment.abandon(waiting)
        for each in recorded:
            if error := self._state.token_budget.submitted(
                stage, each, fragment.rows // len(recorded)
            ):
                self._fail_unstarted(stage, error)
        self._end_if_finished(fragment)

    def _end_if_finished(self, fragment: FragmentState) -> None:
        if fragment.finished and fragment.place in self._active:
            self._budget.release(fragment)
            self._fragments.end(fragment.partition)
            self._ended += 1

    # Failures

    def _refused(self, task: Task, fault: Fault) -> None:
        fragment, known = task.fragment, task.state.known
        groups = known.groups if known else ()
        looked_up = {file for group in groups for part in group.parts for file in part.files}
        try:
            removed = None
            if fault.part:
                removed = remove_damaged(self._state, fragment.partition, fault, looked_up)
        except StoreError as error:
            self._fail(fragment.partition, task.stage, error)
            return
        for other in list(self._active.values()):
            if other.place in self._state.damaged:
                other.abandon(set(other.task_states))
                self._end_if_finished(other)
        if removed == fragment.index:
            return
        if fault.part in looked_up:
            self._state.emit(Noticed(f"{fault.message}. Its rows are computed again"))
            fragment.unreadable.add(fault.part)
            self._start_over(fragment)
        elif fault.of_stage:
            self._give_up([task.stage], fault.error())
        else:
            self._fail(fragment.partition, task.stage, fault.error())

    def _fail(self, partition: int, stage: str, error: VaneError) -> None:
        given_up = self._state.fail(partition, stage, error)
        for fragment in [f for f in self._active.values() if f.partition == partition]:
            fragment.abandon(given_up)
            self._end_if_finished(fragment)

    def _fail_unstarted(self, stage: str, error: VaneError) -> None:
        """Fail a stage in partitions with unstarted fragments; finish fragments in progress."""
        self._state.emit(Noticed(str(error)))  # there may be no such partition
        begun = {f.place for f in self._active.values() if stage in f.task_states}
        for index, fragments in self._state.fragments_left([stage]).items():
            if any((index, i) not in begun for i in fragments):
                self._state.fail(index, stage, error)

    def _give_up(self, stages: Sequence[str], error: VaneError) -> None:
        """Fail stages in every partition that needs them: a pool cannot start, or is refused."""
        for stage in stages:
            for index in range(len(self._state.plan.partitions)):
                if self._state.due(index, [stage]):
                    self._fail(index, stage, error)

    def _loss_of(self, in_flight: InFlightTask, done: CallResult) -> tuple[Loss, str]:
        """Why a call was lost, and the description."""
        limit = None
        if in_flight.worker.pool != IO_WORKERS:
            limit = self._state.pipeline[in_flight.task.stage].spec.failures.timeout_s
        seconds = self._clock() - in_flight.began if done.seconds is None else done.seconds
        loss = loss_after(done.cause, seconds, limit)
        if loss != "timeout":
            return loss, done.lost
        took = "took" if done.cause == "timeout" else "may have taken"
        return loss, f"a call {took} longer than timeout_s={limit:g}: {done.lost}"

    def _lost(
        self,
        in_flight: InFlightTask,
        loss: Loss,
        reason: str,
        fault: Fault | None = None,
        at: range | None = None,
    ) -> None:
        """Handle a call without an answer: replace its worker, and retry what the policy says."""
        task, worker = in_flight.task, in_flight.worker
        if loss != "table":
            if loss != "outside" and not in_flight.work.alone:
                loss = "shared"
            self._worker_group.replace_lost(worker, reason, starting=False)
        if not task.is_current:
            return
        fragment, start = task.fragment, in_flight.start
        rows = range(start, start + in_flight.rows) if task.kind == "slice" else None
        retried = self._lost_calls.decide(
            loss,
            task.stage,
            fragment.place,
            rows,
            task.spec.isolates_rows,
            why=fault.message if fault else "",
            at=at,
        )
        if isinstance(retried, list):
            task.state.slices_in_flight += len(retried) - 1
            for part in retried:
                self._queue(fragment, task.stage, "slice", part)
        elif retried == "start over":
            fragment.is_suspect |= loss not in ("table", "outside")
            self._start_over(fragment)
        else:
            fix = "on_error='quarantine' isolates it"
            if task.spec.isolates_rows:
                fix = "and many do in a row, compute some of them alone with Stage.preview"
            error = ComputeError(
                f"{in_flight.work.location}: its worker or its data was lost "
                f"{self._lost_calls.fragment_counts[fragment.place]} times, the last time: "
                f"{reason}. "
                "If memory ran out, lower batch_size or concurrency, or reserve memory=; if a row "
                f"kills the process, {fix}" + (f"\n\n{fault.traceback}" if fault else "")
            )
            self._fail(fragment.partition, task.stage, error)

    def _start_over(self, fragment: FragmentState) -> None:
        self._counts.start_over(fragment)
        self._lost_calls.started_over(fragment.place)
        fragment.start_over(self._state.pipeline)
        self._start_ready(fragment)

    def _measure(self) -> None:
        """Measure what the workers do. All of it changes between two waits for answers alone."""
        before, self._measured_at = self._measured_at, self._clock()
        newest = next(reversed(self._active.values()), None)
        states = newest.task_states if newest else {}
        for identity, pool_clock in self._pool_clocks.items():
            if self._worker_group.is_deferred and identity != IO_WORKERS:
                continue
            worker_queue = self._worker_group.worker_queues[identity]
            is_next = any(states[s].waits_for for s in pool_clock.time.stages if s in states)
            lacks_room = len(worker_queue) > 0 or (self._is_full and not is_next)
            pool_clock.advance(self._measured_at - before, worker_queue, lacks_room)

    def _report_progress(self) -> None:
        self._counts.emit_progress(queued=self._worker_group.queued)
        self._worker_group.check_starts()
        self._fragments.report_waits(idle=not self._active)
