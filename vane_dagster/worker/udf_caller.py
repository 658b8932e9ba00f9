"""Calls of a user's function or model over the batches of a table, in any call style."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_arguments
from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import RowErrors, UdfError, names
from vane_dagster.storage.packages import installed
from vane_dagster.types.schema import ERROR_COLUMN
from vane_dagster.worker.batch_formats import (
    Result,
    from_result,
    given_batch,
    put_together,
    with_ids,
)
from vane_dagster.worker.batch_size import BatchSizer
from vane_dagster.worker.health import Health, check_alive, worst
from vane_dagster.worker.isolation import begin_user_code, one_process, protect_tasks
from vane_dagster.worker.protocol import CallUdf, Computed, ModelSpec, Tally, Work
from vane_dagster.worker.retry import Answer, BatchOutcome, Partial, Step, Wait, attempt
from vane_dagster.worker.row_errors import describe_fault, fault_table, null_row
from vane_dagster.worker.watchdog import deadline

_FAULTS_REPORTED = 3
_REVOKED_SECONDS = 0.5
_GRACE_SECONDS = 1.0
"""Seconds past its deadline that a coroutine may take to end before its process is ended."""


class UdfCaller:
    """A constructed model, or a function, and the event loop of its async calls.

    Attributes:
        sizes: The batch sizes that the worker has learned.
        health: The health check of the model.
    """

    def __init__(self, model: ModelSpec, target: Callable[..., Any]) -> None:
        self._target = target
        self._label = model.label
        self._style = model.style
        self._packages = installed(model.packages)
        self.sizes = BatchSizer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rooms: list[asyncio.Semaphore] = []
        if model.style in ("async", "async_generator"):
            self._loop = asyncio.new_event_loop()
            protect_tasks(self._loop)
            threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        self.health = Health(target, self._loop)

    def of_version(self, model: ModelSpec, target: Callable[..., Any]) -> UdfCaller:
        """Return a caller of another version of the code.

        It shares the event loop, because the model's state may be bound to it, and the batch sizes.

        Args:
            model: The other version.
            target: Its instance or function.
        """
        other = copy.copy(self)
        other._target, other._label, other._style = target, model.label, model.style
        other._packages = installed(model.packages)
        other.health = Health(target, self._loop)
        return other

    def call(
        self, op: CallUdf, table: pa.Table, work: Work, revoked: Callable[[], bool]
    ) -> Computed:
        """Call the user's code with each batch of a table.

        Args:
            op: How batches are cut and passed.
            table: The rows.
            work: The task: its schema, id and location.
            revoked: Returns whether to stop; called between batches.

        Returns:
            The output, in the order of the batches.

        Raises:
            UdfError: If a result does not fit.
            UnhealthyModelError: If the model is dead.
        """
        import cloudpickle

        self.health.check(now_and_then=True)
        args, kwargs = cloudpickle.loads(op.arguments)
        keep_arguments(args, kwargs)
        run = _TableCalls(self, op, work, args, kwargs, revoked)
        started = time.perf_counter()
        batches = self.sizes.cut(table, op.batch_size)
        outcomes = self._run_async(run, list(batches)) if self._loop else run.one_by_one(batches)
        seconds = run.seconds or time.perf_counter() - started
        tables = [rows for outcome in outcomes for rows in run.rows(outcome)]
        rows = pa.concat_tables(tables) if tables else work.schema.empty_table()
        if any(outcome.mixed for outcome in outcomes):
            rows = _in_order(rows, op.parent or op.ids[0], table.column(op.ids[0]))
        faults = [fault for outcome in outcomes for _, fault in outcome.faults]
        passed = pc.count_distinct(rows.column(op.parent)).as_py() if op.parent else rows.num_rows
        quarantined = len(faults) if op.policy.on_error == "quarantine" else 0
        return Computed(
            rows,
            Tally(
                table.num_rows,
                table.num_rows - passed - quarantined,
                quarantined,
                len(faults) - quarantined,
                wasted=sum((outcome.wasted for outcome in outcomes), Counter()),
                packages=self._packages,
            ),
            fault_records=fault_table(faults, work, op, self._label) if faults else None,
            cancelled=run.stopped,
            call_seconds=seconds,
            batches=run.calls,
            retries=sum(outcome.retries for outcome in outcomes),
            fits=self.sizes.used(op.batch_size),
            faults=tuple(describe_fault(fault, op.ids[0]) for fault in faults[:_FAULTS_REPORTED]),
        )

    def _run_async(self, run: _TableCalls, batches: list[pa.Table]) -> list[BatchOutcome]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run.together(batches), self._loop).result()

    def room(self, size: int) -> asyncio.Semaphore:
        """Return the semaphore that bounds the worker's batches in flight, over all slices."""
        if not self._rooms:
            self._rooms.append(asyncio.Semaphore(size))
        return self._rooms[0]

    def answers(self, given: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """Call the user's code, and yield its one result or several.

        Args:
            given: The batch in the user's format.
            args: Further positional arguments.
            kwargs: Keyword arguments.
        """
        result = self._target(given, *args, **kwargs)
        if self._style == "generator" or inspect.isgenerator(result):
            yield from result
        else:
            yield result

    async def answers_later(self, given: Any, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        """Call async user code, and yield its one result or several.

        Args:
            given: The batch in the user's format.
            args: Further positional arguments.
            kwargs: Keyword arguments.
        """
        result = self._target(given, *args, **kwargs)
        if self._style == "async_generator":
            async for item in result:
                yield item
        else:
            yield await result


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop forever; asyncio stops it when a task of the user's raises SystemExit."""
    while not loop.is_closed():
        with contextlib.suppress(BaseException):
            loop.run_forever()


def _in_order(rows: pa.Table, origin: str, ids: pa.ChunkedArray) -> pa.Table:
    """Sort rows in the order of the rows that they were made from."""
    places = pc.index_in(rows.column(origin), value_set=ids.combine_chunks())
    return rows.take(pc.array_sort_indices(places.combine_chunks()))


class _TableCalls:
    """The calls for the batches of one table."""

    def __init__(
        self,
        caller: UdfCaller,
        op: CallUdf,
        work: Work,
        args: Any,
        kwargs: Any,
        revoked: Callable[[], bool],
    ) -> None:
        self.caller, self.op, self.work = caller, op, work
        self.args, self.kwargs, self.revoked = args, kwargs, revoked
        self.seconds = 0.0
        self.calls = 0
        self.stopped = False

    def one_by_one(self, batches: Iterator[pa.Table]) -> list[BatchOutcome]:
        outcomes = []
        for batch in batches:
            steps = self._attempt(batch)
            answer: Answer = None
            try:
                while not self.revoked():
                    step = steps.send(answer)
                    if isinstance(step, Wait):
                        self._wait(step.seconds)
                        answer = None
                    else:
                        answer = self._called(step.batch)
            except StopIteration as stop:
                outcomes.append(stop.value)
                self.caller.sizes.limit(stop.value.fits)
                continue
            self.stopped = True
            break
        return outcomes

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.revoked():
            time.sleep(min(left, _REVOKED_SECONDS))

    def _attempt(self, batch: pa.Table) -> Generator[Step, Answer, BatchOutcome]:
        return attempt(batch, self.op.policy, self.op.ids[0], self.op.max_faults)

    def _called(self, batch: pa.Table) -> Answer:
        """Call the user's code with a batch; return its rows, or the error that it raised."""
        given = self._given(batch)
        started = time.perf_counter()
        self.calls += 1
        answer: Answer
        with deadline(self.op.policy.timeout_s):  # an exception may run user code too
            try:
                with one_process():
                    _failpoints.at_call(self.work.stage, batch.column(self.op.ids[0]))
                    answers = self.caller.answers(given, self.args, self.kwargs)
                    results = [self._taken(answer) for answer in answers]
                    seconds = time.perf_counter() - started
                    answer = self._fitted(results, batch)
            except BaseException as raised:
                if is_shutdown(raised):
                    raise
                answer = self._failed(raised, batch)
        if not isinstance(answer, pa.Table):
            self.caller.health.check_after_error()
            return answer
        self.seconds += seconds
        self.caller.sizes.learn(batch.num_rows, seconds)
        return answer

    async def together(self, batches: list[pa.Table]) -> list[BatchOutcome]:
        """Run up to `max_concurrency` batches in flight; the first error cancels the others."""
        room = self.caller.room(self.op.max_concurrency)
        tasks = [asyncio.ensure_future(self._one(batch, room)) for batch in batches]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self.stopped = None in outcomes
        return [outcome for outcome in outcomes if outcome is not None]

    async def _one(self, batch: pa.Table, room: asyncio.Semaphore) -> BatchOutcome | None:
        steps = self._attempt(batch)
        answer: Answer = None
        try:
            while not self.revoked():
                step = steps.send(answer)
                if isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                    answer = None
                    continue
                async with room:
                    if not self.revoked():
                        answer = await self._called_later(step.batch)
        except StopIteration as stop:
            return cast(BatchOutcome, stop.value)
        return None

    async def _called_later(self, batch: pa.Table) -> Answer:
        self.calls += 1
        limit = self.op.policy.timeout_s
        # The deadline ends the process if a call blocks the loop, or ignores its cancellation.
        with deadline(None if limit is None else limit + _GRACE_SECONDS):
            call = asyncio.ensure_future(self._answered(batch))
            try:
                if not (await asyncio.wait([call], timeout=limit))[0]:
                    call.cancel()
                    await asyncio.wait([call])
                    return TimeoutError(f"took longer than timeout_s={limit:g}")
            finally:
                call.cancel()
        # Only the user's code can have cancelled this task: our cancellation never gets here.
        answer = contained(asyncio.CancelledError()) if call.cancelled() else call.result()
        if not isinstance(answer, pa.Table):
            await self.caller.health.check_after_error_async()
        return answer

    async def _answered(self, batch: pa.Table) -> Answer:
        """Return the rows of an async call, or its error, including its own cancellation."""
        given = self._given(batch)
        begin_user_code()
        try:
            with one_process():
                await _failpoints.at_call_later(self.work.stage, batch.column(self.op.ids[0]))
                answers = self.caller.answers_later(given, self.args, self.kwargs)
                results = [self._taken(answer) async for answer in answers]
                return self._fitted(results, batch)
        except BaseException as raised:
            return self._failed(raised, batch)

    def _failed(self, raised: BaseException, batch: pa.Table) -> Answer:
        """Return the answer of a call that raised.

        Raises:
            UnhealthyModelError: If the model is dead.
        """
        error = contained(raised)
        check_alive(worst(error))
        return self._partial(error, batch) if isinstance(error, RowErrors) else error

    def _partial(self, error: RowErrors, batch: pa.Table) -> Answer:
        """Return the result of a batch with some failed rows, or an error if it is invalid."""
        places = error.errors
        wrong = [i for i in places if type(i) is not int or not 0 <= i < batch.num_rows]
        if wrong or not places:
            message = f"names the places {names(places)}" if wrong else "names no place"
            return UdfError(
                f"{self.work.location}: RowErrors {message} in a batch of {batch.num_rows} rows; "
                "give the error of each failed row by its place, from 0 on"
            )
        others = [i for i in range(batch.num_rows) if i not in places]
        given = batch.take(pa.array(others, pa.int64()))
        try:
            results = [] if error.rows is None else [self._taken(error.rows)]
            return Partial(self._fitted(results, given, others), dict(sorted(places.items())))
        except BaseException as refused:  # reading the result may run the user's code
            return contained(refused)

    def rows(self, outcome: BatchOutcome) -> list[pa.Table]:
        """Return the output rows, with rows of nulls for failed rows if the stage keeps them."""
        if self.op.policy.on_error != "null":
            return outcome.tables
        rows: list[pa.Table] = []
        faults = list(outcome.faults)
        for index in range(len(outcome.tables) + 1):
            while faults and faults[0][0] == index:
                rows.append(null_row(faults.pop(0)[1], self.work, self.op))
            rows += outcome.tables[index : index + 1]
        return rows

    def _given(self, batch: pa.Table) -> Any:
        """Return the batch in the user's format."""
        if self.op.columns is not None:
            batch = batch.select(list(dict.fromkeys([self.op.ids[0], *self.op.columns])))
        return given_batch(batch, self.op.batch_format)

    def _taken(self, result: Any) -> Result:
        """Convert one result, and copy it before the user's code can write into it again."""
        work, op = self.work, self.op
        carried = {work.id, *op.ids, *([op.parent] if op.parent else [])}
        if op.policy.on_error == "null":
            carried.add(ERROR_COLUMN)
        return from_result(result, work.schema, carried, op.parent or op.ids[0], work.location)

    def _fitted(
        self, results: list[Result], batch: pa.Table, places: Sequence[int] | None = None
    ) -> pa.Table:
        work, op = self.work, self.op
        places = range(batch.num_rows) if places is None else places
        output = put_together(results, places, work.schema, work.location)
        if op.policy.on_error == "null" and ERROR_COLUMN not in output.column_names:
            output = output.append_column(ERROR_COLUMN, pa.nulls(output.num_rows, pa.string()))
        return with_ids(output, batch, work, op)
