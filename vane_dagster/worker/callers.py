"""Calls of user code with the rows of a batch, as the stage's contract says.

A caller turns a batch into the arguments of the user's function or method, and the results into a
form that `results.from_result` converts. Synchronous and async code have one way: a coroutine,
which never waits if the code is synchronous, so that `at_once` can run it in any thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from vane_dagster._user_errors import contained
from vane_dagster.errors import StageError
from vane_dagster.pipeline.contracts import BatchCall, ColumnsCall, RequestsCall, RowCall, TypesCall
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.column_results import as_columns, column_arguments
from vane_dagster.worker.inferred_types import RowTypes, result_types, types_table
from vane_dagster.worker.kept_values import kept
from vane_dagster.worker.open_calls import OpenCalls
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.results import from_result
from vane_dagster.worker.row_results import RowResults, row_arguments, row_function
from vane_dagster.worker.watchdog import deadline

T = TypeVar("T")
Room = AbstractAsyncContextManager[Any]
"""Held during a call of async code, to bound the calls in flight; anything for other code."""
_WHOLE_ROW = RowCall(None)
_GRACE_SECONDS = 1.0
"""Seconds past its deadline that a coroutine may take to end before its process is ended."""


class Revoked(Exception):
    """The lease ended between two rows of a batch."""


@dataclass(frozen=True)
class UserCode:
    """What is called, and how.

    Attributes:
        call: The function or method.
        op: The call: its contract and policy.
        work: The task: its schema, id and location.
        kwargs: Keyword arguments.
        revoked: Returns whether to stop.
        open_calls: The worker's calls in flight.
    """

    call: Callable[..., Any]
    op: CallUdf
    work: Work
    kwargs: Mapping[str, Any]
    revoked: Callable[[], bool]
    open_calls: OpenCalls

    def given(self, batch: pa.Table) -> pa.Table:
        """Return the columns of a batch that the code gets."""
        return batch if self.op.columns is None else batch.select(list(self.op.columns))

    def names(self, batch: pa.Table) -> list[str]:
        """Return the names by which the code reads columns; none if it gets one value for each."""
        contract = getattr(self.op.contract, "of", self.op.contract)
        by_name = isinstance(contract, BatchCall) or getattr(contract, "inputs", ()) is None
        return self.given(batch).column_names if by_name else []

    async def results(self, *args: Any) -> AsyncIterator[Any]:
        """Call the code, and yield its one result or several. Only async code is waited for."""
        result = self.call(*args, **self.kwargs)
        if self.op.is_async and inspect.isasyncgen(result):
            async for item in result:
                yield item
            return
        if self.op.is_async:
            result = await result
        for item in result if inspect.isgenerator(result) else (result,):
            yield item

    async def in_turns(
        self,
        room: Room,
        ids: pa.ChunkedArray,
        rows: Iterable[tuple[Any, ...]],
        call: Callable[..., Coroutine[Any, Any, Any]],
        turn: Callable[[], Room] = nullcontext,
    ) -> list[Any]:
        """Call async code for the row of each id in room of its own; return results, or errors.

        The time limit of a row begins once it has its `turn`. A `StageError` is raised at once: the
        other rows would have it too.
        """
        answers: list[Any] = [None] * len(ids)
        turns, numbered = iter(range(len(ids))), enumerate(rows)

        async def next_rows() -> None:
            for _ in turns:
                async with room:
                    if self.revoked():
                        raise Revoked
                    place, values = next(numbered)
                    try:
                        async with turn():
                            with self.open_calls.one(ids.slice(place, 1)):
                                answer = await within(self.op.policy.timeout_s, call(*values))
                    except Exception as error:  # of the turn, e.g. no replica is ready
                        answer = error
                    if isinstance(answer, StageError):
                        raise answer
                    answers[place] = answer

        in_flight = min(self.op.max_concurrency, len(ids))
        tasks = [asyncio.ensure_future(next_rows()) for _ in range(in_flight)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return answers


class BatchCaller:
    """Calls ``fn(batch)``, or ``fn(column, ...)``."""

    def __init__(self, contract: BatchCall | ColumnsCall, code: UserCode) -> None:
        self._contract, self._code = contract, code

    def results(self, batch: pa.Table, room: Room) -> AsyncIterator[Any]:
        """Call the code with a batch, and yield its results."""
        code, contract = self._code, self._contract
        if isinstance(contract, ColumnsCall):
            given = column_arguments(contract, batch, code.call, code.work.location)
            return code.results(*given)
        return code.results(given_batch(code.given(batch), contract.format))

    def taken(self, result: Any) -> pa.Table:
        """Convert one result, and copy it before the user's code can write into it again."""
        op, work = self._code.op, self._code.work
        if isinstance(self._contract, ColumnsCall):
            result = as_columns(self._contract, result, work)
        ids, passed_on = {work.id, op.origin, *op.ids}, (*op.ids[1:], *op.carried(work))
        return from_result(result, work.schema, ids, op.origin, work.location, passed_on, op.pinned)


class RequestsCaller(BatchCaller):
    """Calls ``fn(in_turns)``. Rows are converted when the first one has its turn."""

    def results(self, batch: pa.Table, room: Room) -> AsyncIterator[Any]:
        """See `BatchCaller`."""
        code, ids = self._code, batch.column(self._code.op.ids[0])
        return code.results(functools.partial(code.in_turns, room, ids, self._rows(batch)))

    def _rows(self, batch: pa.Table) -> Iterator[tuple[dict[str, Any]]]:
        yield from row_arguments(_WHOLE_ROW, given_batch(self._code.given(batch), "pyarrow"))


class BatchTypesCaller(BatchCaller):
    """Calls ``fn(batch)``, and keeps the types of its results."""

    async def results(self, batch: pa.Table, room: Room) -> AsyncIterator[Any]:
        """See `BatchCaller`."""
        op, work = self._code.op, self._code.work
        results = super().results(batch, room)
        schemas = [result_types(result, op, work) async for result in results]
        yield types_table(schemas, batch.column(op.ids[0]), op, work)

    def taken(self, result: pa.Table) -> pa.Table:
        """See `BatchCaller`."""
        return result


class RowCaller:
    """Calls ``fn(value, ...)`` for each row. The error of a row is that row's alone."""

    def __init__(
        self, contract: RowCall, code: UserCode, results_of: type[RowResults] = RowResults
    ) -> None:
        self._contract, self._code, self._results_of = contract, code, results_of
        self._call = row_function(contract, code.call, code.kwargs)
        self._limit = code.op.policy.timeout_s

    async def results(self, batch: pa.Table, room: Room) -> AsyncIterator[pa.Table]:
        """Call the code for each row of a batch, and yield one table."""
        limit, code = self._limit, self._code
        rows = row_arguments(self._contract, code.given(batch))
        results = self._results_of(self._contract, batch, code.op, code.work)
        if code.op.is_async:
            row = functools.partial(self._row, results)
            ids = batch.column(code.op.ids[0])
            answers = await code.in_turns(room, ids, enumerate(rows), row)
            for place, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    results.fail(place, answer)
        else:
            self._call_each(results, rows)
        with deadline(None if limit is None else limit * batch.num_rows):
            table = results.table()
        yield table

    def _call_each(self, results: RowResults, rows: Iterable[tuple[Any, ...]]) -> None:
        limit, call, revoked = self._limit, self._call, self._code.revoked
        plain, add_place, add_value = results.plain, results.places.append, results.values.append
        for place, values in enumerate(rows):
            if revoked():
                raise Revoked
            try:
                if limit is not None:
                    with deadline(limit):
                        results.add(place, call(*values))
                elif type(returned := call(*values)) in plain:  # fast, for most results
                    add_place(place)
                    add_value(returned)
                else:
                    results.add(place, returned)
            except BaseException as raised:
                with deadline(limit):  # an exception may run user code too
                    results.fail(place, raised)

    async def _row(self, results: RowResults, place: int, values: Any) -> None:
        try:
            result = self._call(*values)
            if inspect.isasyncgen(result):
                results.add_yielded(place, [kept(item) async for item in result])
            else:
                results.add(place, await result)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            results.fail(place, raised)

    def taken(self, result: pa.Table) -> pa.Table:
        """See `BatchCaller`. Rows are converted already."""
        return result


def caller(code: UserCode) -> BatchCaller | RowCaller:
    """Return the caller for a contract."""
    contract = code.op.contract
    if isinstance(contract, TypesCall):
        if isinstance(contract.of, RowCall):
            return RowCaller(contract.of, code, RowTypes)
        return BatchTypesCaller(contract.of, code)
    if isinstance(contract, RowCall):
        return RowCaller(contract, code)
    kind = RequestsCaller if isinstance(contract, RequestsCall) else BatchCaller
    return kind(contract, code)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, without an event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("synchronous code was suspended")


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of async user code's coroutine, or the exception that it raised."""
    # The deadline ends the process if a call blocks the loop, or ignores its cancellation.
    with deadline(None if seconds is None else seconds + _GRACE_SECONDS):
        call = asyncio.ensure_future(coroutine)
        try:
            if not (await asyncio.wait([call], timeout=seconds))[0]:
                call.cancel()
                await asyncio.wait([call])
                return TimeoutError(f"took longer than timeout_s={seconds:g}")
        finally:
            call.cancel()
    # Only the user's code can have cancelled this task: our cancellation never gets here.
    if call.cancelled():
        return contained(asyncio.CancelledError())
    return call.exception() or call.result()
