"""Calls of a user's function or model over the batches of a table, in any call style."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_arguments
from vane_dagster._user_errors import contained, hinted, is_shutdown
from vane_dagster.errors import RowErrors, UdfError, names
from vane_dagster.pipeline.contracts import CALL
from vane_dagster.providers.usage import spent_on
from vane_dagster.servers.directory import SERVER_MOVED, directory
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.storage.batch_records import record_requests
from vane_dagster.storage.packages import installed
from vane_dagster.types.schema import ERROR_COLUMN, empty_table
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker import callers
from vane_dagster.worker.batch_size import BatchSizer
from vane_dagster.worker.callers import Revoked, Room, UserCode, at_once, within
from vane_dagster.worker.event_loop import EventLoop
from vane_dagster.worker.health import Health, UnhealthyModelError, check_alive
from vane_dagster.worker.isolation import one_process
from vane_dagster.worker.open_calls import OpenCalls
from vane_dagster.worker.output_ids import with_ids
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.reports import Computed, Tally, WorkReport
from vane_dagster.worker.results import put_together
from vane_dagster.worker.retry import (
    Answer,
    BatchError,
    BatchOutcome,
    Partial,
    attempt,
)
from vane_dagster.worker.row_errors import combined, fault_table, reported
from vane_dagster.worker.unread_rows import split_unread
from vane_dagster.worker.user_code import load
from vane_dagster.worker.watchdog import deadline

T = TypeVar("T")
_PARTS = 64
"""In as many a batch that may end its process is divided; to pass a row takes 3 ms on Ray."""
_REVOKED_SECONDS = 0.5
_SERVER_POLL_SECONDS = 0.5
_numbers = itertools.count()


class UdfCaller:
    """A constructed model, or a function, and what its calls share.

    Attributes:
        sizes: The batch sizes that the worker has learned.
        health: The health check of the model.
        open_calls: Its calls in flight, and its rows that are called again.
    """

    def __init__(self, model: ModelSpec, target: Callable[..., Any]) -> None:
        self._target = target
        self._label = model.label
        self._packages = installed(model.packages)
        self.sizes = BatchSizer()
        self._events = EventLoop()
        self._rooms: dict[int, asyncio.Semaphore] = {}
        self._alone: dict[int, asyncio.Lock] = {}
        self.open_calls = OpenCalls()
        self.health = Health(target, self._events)

    def call(
        self,
        op: CallUdf,
        table: pa.Table,
        work: Work,
        revoked: Callable[[], bool],
        begin: Callable[[range], None] = lambda rows: None,
    ) -> Computed:
        """Call the user's code with each batch of a table.

        `begin` is told the places of each batch of synchronous code. If a row may end the process,
        a single batch is passed in parts: row by row, unless it has many rows.
        """
        self.health.check(now_and_then=True)
        kwargs = load(op.arguments, op.files)
        keep_arguments((), kwargs)
        target = _with_class(self._target, load(op.kept)) if op.kept else self._target
        call = getattr(target, op.method) if op.method != CALL else target
        keeps_nulls, own = op.policy.on_error == "null", work
        if keeps_nulls:  # only this package fills the column of errors
            schema = work.schema.remove(work.schema.get_field_index(ERROR_COLUMN))
            own = replace(work, schema=schema)
        run = _TableCalls(self, UserCode(call, op, own, kwargs, revoked, self.open_calls))
        started = time.perf_counter()
        readable, unread = split_unread(table)
        size, rows = op.batch_size, readable.num_rows
        isolates = work.alone and op.policy.on_error != "raise" and not op.is_async
        if isolates and self.sizes.of(size, rows) >= rows:
            size = max(1, rows // _PARTS)
        batches = self.sizes.cut(readable, size)
        try:
            if op.is_async:
                every = self._events.run(run.together(list(batches)))
            else:
                every = run.one_by_one(_begun(batches, table, begin))
        except BatchError as error:
            failed = fault_table(error.faults, work, op.ids, self._label) if error.faults else None
            error.report = WorkReport(
                faults=reported(failed),
                rows_out=sum(table.num_rows for table in run.made),
                spent=spent_on(run.made, error.wasted),
            )
            raise
        seconds = run.seconds or time.perf_counter() - started
        outcomes, is_revoked = [each for each in every if each is not None], None in every
        if any(outcome.pending for outcome in outcomes):
            assert op.batches is not None, "only batches have pending answers"
            requests = {d: body for each in outcomes for d, body in each.requests.items()}
            pending = record_requests(op.batches, requests)
            report = WorkReport(Tally(table.num_rows), pending=pending, cancelled=is_revoked)
            return Computed(empty_table(own.schema), report)
        faults = [fault for outcome in outcomes for fault in outcome.faults] + unread
        tables = [rows for outcome in outcomes for rows in outcome.tables]
        in_order = not faults and not any(outcome.mixed for outcome in outcomes)
        computed = combined(tables, faults, table, work, op, self._label, in_order)
        wasted = sum((outcome.wasted for outcome in outcomes), Counter[str]())
        report = replace(
            computed.report,
            tally=replace(
                computed.report.tally, wasted=wasted, packages=self._packages, unread=len(unread)
            ),
            spent=spent_on(run.made, wasted),
            call_seconds=seconds,
            batches=run.calls,
            retries=sum(outcome.retries for outcome in outcomes),
            rate_limited=sum(outcome.rate_limited for outcome in outcomes),
            fits=self.sizes.used(op.batch_size),
            cancelled=is_revoked,
        )
        return replace(computed, report=report)

    def room(self, size: int) -> asyncio.Semaphore:
        """Return the semaphore that bounds a stage's calls in flight, over all slices."""
        return self._rooms.setdefault(size, asyncio.Semaphore(size))

    @contextlib.asynccontextmanager
    async def alone(self, size: int) -> AsyncIterator[asyncio.Semaphore]:
        """Wait until a stage has no calls in flight, and yield the room of a single one."""
        room, taken = self.room(size), 0
        async with self._alone.setdefault(size, asyncio.Lock()):
            try:
                while taken < size:
                    await room.acquire()
                    taken += 1
                yield asyncio.Semaphore(1)
            finally:
                for _ in range(taken):
                    room.release()


def _begun(
    batches: Iterator[pa.Table], table: pa.Table, begin: Callable[[range], None]
) -> Iterator[pa.Table]:
    """Yield the batches of a table's rows that were read, each after `begin` was told its place."""
    places: Sequence[int] = range(table.num_rows)
    if ROW_ERROR in table.column_names:
        places = pc.indices_nonzero(pc.is_null(table.column(ROW_ERROR))).to_pylist()
    stop = 0
    for batch in batches:
        start, stop = stop, stop + batch.num_rows
        begin(range(places[start], places[stop - 1] + 1))
        yield batch


def _with_class(instance: Any, cls: type) -> Any:
    """Return an object of a class with the state of an instance, which it shares."""
    made: Any = object.__new__(cls)
    made.__dict__ = instance.__dict__
    return made


class _TableCalls:
    """The calls for the batches of one table."""

    def __init__(self, caller: UdfCaller, code: UserCode) -> None:
        self.caller, self.code, self.op, self.work = caller, code, code.op, code.work
        self.revoked = code.revoked
        self.user_code = callers.caller(code)
        self.seconds = 0.0
        self.calls = 0
        self.made: list[pa.Table] = []

    def one_by_one(self, batches: Iterator[pa.Table]) -> list[BatchOutcome | None]:
        """Run the batches of synchronous code; those that follow may have other sizes."""
        outcomes = []
        for batch in batches:
            outcome = at_once(self._one(batch, contextlib.nullcontext()))
            outcomes.append(outcome)
            if outcome is None:
                break
            self.caller.sizes.limit(outcome.fits)
        return outcomes

    async def together(self, batches: list[pa.Table]) -> list[BatchOutcome | None]:
        """Run up to `max_concurrency` batches in flight; the first error cancels the others."""
        room = self.caller.room(self.op.max_concurrency)
        tasks = [asyncio.ensure_future(self._one(batch, room)) for batch in batches]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, batch: pa.Table, room: Room) -> BatchOutcome | None:
        """Return the outcome of a batch; None if the lease has ended."""
        op, began = self.op, 0.0

        async def call(rows: pa.Table, alone: bool) -> Answer:
            nonlocal began
            is_apart = alone and op.is_async
            async with (
                self.caller.alone(op.max_concurrency) if is_apart else contextlib.nullcontext(room)
            ) as own:
                if is_apart:  # it must not be blamed for a server that the call before has ended
                    await self._beside(self._await_servers, time.monotonic())
                began = time.monotonic()
                return await self._called(rows, own)

        async def server_ended() -> bool:
            return await self._beside(self._await_servers, began)

        async def wait(seconds: float, errors: Sequence[BaseException]) -> None:
            if errors:
                self.caller.open_calls.retried[batch_number] = errors
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0 and not self.revoked():
                await self._sleep(min(left, _REVOKED_SECONDS))

        batch_number = next(_numbers)
        try:
            return await attempt(
                batch,
                op.policy,
                op.ids[0],
                op.max_faults,
                call,
                wait,
                server_ended if op.servers else None,
            )
        except Revoked:
            return None
        finally:
            self.caller.open_calls.retried.pop(batch_number, None)

    async def _beside(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function of this package without blocking the event loop."""
        return await asyncio.to_thread(function, *args) if self.op.is_async else function(*args)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds) if self.op.is_async else time.sleep(seconds)

    def _await_servers(self, began: float) -> bool:
        """Wait until the servers can be used, or the lease has ended."""
        was_ready = directory.probe(self.op.servers, began)
        is_ready = was_ready
        while not (is_ready or directory.is_outdated or self.revoked()):
            time.sleep(_SERVER_POLL_SECONDS)
            directory.probe(self.op.servers, began)
            is_ready = directory.is_usable(self.op.servers)
        if self.revoked():
            raise Revoked
        if directory.is_outdated:
            raise UnhealthyModelError(ConnectionError(SERVER_MOVED), rows=False)
        return not was_ready

    async def _called(self, batch: pa.Table, room: Room) -> Answer:
        """Call the user's code with a batch; return its rows, or the error that it raised."""
        by_row = self.op.contract.by_row  # each row takes room of its own
        async with contextlib.nullcontext() if by_row else room:
            if self.revoked():
                raise Revoked
            self.calls += 1
            calls = self._answered(batch, room)
            if by_row and self.op.is_async:
                answer = await calls
            else:
                with self.caller.open_calls.one(batch.column(self.op.ids[0])):
                    answer = await self._within_limit(calls)
            if isinstance(answer, (Revoked, UnhealthyModelError)):
                raise answer
            if not isinstance(answer, pa.Table):
                await self._beside(self.caller.health.check, False, True)
            return answer

    async def _within_limit(self, calls: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the answer of a call; rows that are called one by one have limits of their own."""
        limit = self.op.policy.timeout_s
        if self.op.contract.by_row:
            return await calls
        if self.op.is_async:
            answer: Answer = await within(limit, calls)
            return answer
        with deadline(limit):
            return await calls

    async def _answered(self, batch: pa.Table, room: Room) -> Answer:
        """Return the rows of a call, or its error, including its own cancellation."""
        started = time.perf_counter()
        try:
            with one_process():
                ids = batch.column(self.op.ids[0])
                await _failpoints.at_call(self.work.stage, ids, self._sleep)
                answers = self.user_code.results(batch, room)
                results = [self.user_code.taken(answer) async for answer in answers]
                seconds = time.perf_counter() - started
                table = self._fitted(results, batch)
            if not self.op.is_async:
                self.seconds += seconds
                self.caller.sizes.learn(batch.num_rows, seconds)
            return table
        except Revoked:
            raise
        except asyncio.CancelledError as raised:
            if self.op.is_async and self.op.contract.by_row:  # user code runs in tasks of its own
                raise
            return self._failed(raised, batch)
        except BaseException as raised:
            if is_shutdown(raised):
                raise
            return self._failed(raised, batch)

    def _failed(self, raised: BaseException, batch: pa.Table) -> Answer:
        """Return the answer of a call that raised."""
        error = hinted(contained(raised), self.code.names(batch), batch.column_names)
        check_alive(error)
        return self._partial(error, batch) if isinstance(error, RowErrors) else error

    def _partial(self, error: RowErrors, batch: pa.Table) -> Answer:
        """Return the result of a batch with some failed rows, or an error if it is invalid."""
        places = error.errors
        if not places or not all(0 <= place < batch.num_rows for place in places):
            return UdfError(
                f"{self.work.location}: RowErrors names the positions {names(places)} in a batch "
                f"of {batch.num_rows} rows; give those of failed rows, counted from 0"
            )
        others = [i for i in range(batch.num_rows) if i not in places]
        given = unsliced(batch).take(pa.array(others, pa.int64()))
        try:
            table = empty_table(self.work.schema)
            if error.rows is not None:
                table = self._fitted([self.user_code.taken(error.rows)], given)
            return Partial(table, dict(sorted(places.items())), error.used)
        except BaseException as refused:  # reading the result may run the user's code
            return contained(refused)

    def _fitted(self, results: list[pa.Table], batch: pa.Table) -> pa.Table:
        output = put_together(results, self.work.schema, self.work.location)
        self.made.append(output)
        return with_ids(output, batch, self.work, self.op)
