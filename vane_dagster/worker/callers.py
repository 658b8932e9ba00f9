"""Calls of user code with the rows of a batch, as the stage's contract says.

A caller turns a batch into the arguments of the user's function or method, and the results into a
form that `results.from_result` converts. There is one for each class of
`pipeline.contracts`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from vane_dagster._user_errors import contained
from vane_dagster.pipeline.contracts import BatchCall, ColumnsCall, RowCall, TypesCall
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.column_results import as_columns, column_arguments
from vane_dagster.worker.inferred_types import RowTypes, result_types, types_table
from vane_dagster.worker.isolation import begin_user_code
from vane_dagster.worker.kept_values import kept
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.row_results import RowResults, row_arguments, row_function
from vane_dagster.worker.watchdog import deadline

_GRACE_SECONDS = 1.0
"""Seconds past its deadline that a coroutine may take to end before its process is ended."""


class Revoked(Exception):
    """The lease ended between two rows of a batch."""


@dataclass(frozen=True)
class UserCode:
    """What is called, and how.

    Attributes:
        call: The function or method.
        op: The call: its contract, style and policy.
        work: The task: its schema, id and location.
        kwargs: Keyword arguments.
        revoked: Returns whether to stop.
    """

    call: Callable[..., Any]
    op: CallUdf
    work: Work
    kwargs: Mapping[str, Any]
    revoked: Callable[[], bool]

    def given(self, batch: pa.Table) -> pa.Table:
        """Return the columns of a batch that the code gets."""
        return batch if self.op.columns is None else batch.select(list(self.op.columns))

    def names(self, batch: pa.Table) -> list[str]:
        """Return the names by which the code reads columns; none if it gets one value for each."""
        contract = getattr(self.op.contract, "of", self.op.contract)
        by_name = isinstance(contract, BatchCall) or getattr(contract, "inputs", ()) is None
        return self.given(batch).column_names if by_name else []

    def results(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call synchronous code, and yield its one result or several."""
        result = self.call(*args, **kwargs, **self.kwargs)
        if self.op.style == "generator" or inspect.isgenerator(result):
            yield from result
        else:
            yield result

    async def results_later(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Call async code, and yield its one result or several."""
        result = self.call(*args, **kwargs, **self.kwargs)
        if self.op.style == "async_generator":
            async for item in result:
                yield item
        else:
            yield await result


class Caller(Protocol):
    """Calls user code with the rows of a batch."""

    def results(self, batch: pa.Table) -> Iterator[Any]:
        """Call synchronous code with a batch, and yield its results.

        Args:
            batch: The rows, with ids and columns that the code does not get.
        """

    def results_later(self, batch: pa.Table, room: asyncio.Semaphore) -> AsyncIterator[Any]:
        """Call async code with a batch, and yield its results.

        Args:
            batch: The rows; see `results`.
            room: Bounds the calls in flight.
        """

    def as_batch(self, result: Any) -> Any:
        """Return a result as a table or a dict of column to array."""


class BatchCaller:
    """Calls ``fn(batch)``."""

    def __init__(self, contract: BatchCall, code: UserCode) -> None:
        self._format, self._code = contract.format, code

    def results(self, batch: pa.Table) -> Iterator[Any]:
        """See `Caller`."""
        return self._code.results(given_batch(self._code.given(batch), self._format))

    def results_later(self, batch: pa.Table, room: asyncio.Semaphore) -> AsyncIterator[Any]:
        """See `Caller`. The caller's task holds the room."""
        begin_user_code()
        return self._code.results_later(given_batch(self._code.given(batch), self._format))

    def as_batch(self, result: Any) -> Any:
        """See `Caller`."""
        return result


class ColumnsCaller:
    """Calls ``fn(column, ...)``."""

    def __init__(self, contract: ColumnsCall, code: UserCode) -> None:
        self._contract, self._code = contract, code

    def results(self, batch: pa.Table) -> Iterator[Any]:
        """See `Caller`."""
        given = column_arguments(self._contract, batch, self._code.call, self._code.work.location)
        return self._code.results(*given)

    def results_later(self, batch: pa.Table, room: asyncio.Semaphore) -> AsyncIterator[Any]:
        """See `Caller`. The caller's task holds the room."""
        begin_user_code()
        given = column_arguments(self._contract, batch, self._code.call, self._code.work.location)
        return self._code.results_later(*given)

    def as_batch(self, result: Any) -> Any:
        """See `Caller`."""
        return as_columns(self._contract, result, self._code.op, self._code.work)


class RowCaller:
    """Calls ``fn(value, ...)`` for each row. The error of a row is that row's alone."""

    def __init__(self, contract: RowCall, code: UserCode) -> None:
        self._contract, self._code = contract, code
        self._call = row_function(contract, code.call, code.kwargs)
        self._limit = code.op.policy.timeout_s

    def _results_of(self, batch: pa.Table) -> RowResults:
        return RowResults(self._contract, batch, self._code.op, self._code.work)

    def results(self, batch: pa.Table) -> Iterator[Any]:
        """See `Caller`.

        Raises:
            RowErrors: With the results of the other rows.
            Revoked: If the lease ended.
        """
        limit, call, revoked = self._limit, self._call, self._code.revoked
        results = self._results_of(batch)

        def call_row(place: int, values: tuple[Any, ...]) -> None:
            try:
                results.add(place, call(*values))
            except BaseException as raised:  # an exception may run user code too
                results.fail(place, raised)

        given = self._code.given(batch)
        for place, values in enumerate(row_arguments(self._contract, given)):
            if revoked():
                raise Revoked
            if limit is None:
                call_row(place, values)
            else:
                with deadline(limit):
                    call_row(place, values)
        with deadline(None if limit is None else limit * batch.num_rows):
            table = results.table()
        yield table

    async def results_later(self, batch: pa.Table, room: asyncio.Semaphore) -> AsyncIterator[Any]:
        """See `Caller`. Each row takes room of its own.

        Raises:
            RowErrors: With the results of the other rows.
            Revoked: If the lease ended.
        """
        limit = self._limit
        results = self._results_of(batch)
        rows = enumerate(row_arguments(self._contract, self._code.given(batch)))

        async def next_rows() -> None:
            for place, values in rows:
                async with room:
                    if self._code.revoked():
                        raise Revoked
                    answer = await within(limit, self._row(results, place, values))
                if isinstance(answer, BaseException):
                    results.fail(place, answer)

        in_flight = min(self._code.op.max_concurrency, batch.num_rows)
        tasks = [asyncio.ensure_future(next_rows()) for _ in range(in_flight)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        with deadline(None if limit is None else limit * batch.num_rows):
            table = results.table()
        yield table

    async def _row(self, results: RowResults, place: int, values: Any) -> None:
        begin_user_code()
        try:
            result = self._call(*values)
            if self._code.op.style == "async_generator":
                results.add_yielded(place, [kept(item) async for item in result])
            else:
                results.add(place, await result)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            results.fail(place, raised)

    def as_batch(self, result: Any) -> Any:
        """See `Caller`."""
        return result


class BatchTypesCaller:
    """Calls ``fn(batch)``, and keeps the types of its results."""

    def __init__(self, contract: BatchCall, code: UserCode) -> None:
        self._caller, self._code = BatchCaller(contract, code), code

    def results(self, batch: pa.Table) -> Iterator[Any]:
        """See `Caller`."""
        op, work = self._code.op, self._code.work
        found = [result_types(result, op, work) for result in self._caller.results(batch)]
        yield types_table(found, batch.column(op.ids[0]), op, work)

    async def results_later(self, batch: pa.Table, room: asyncio.Semaphore) -> AsyncIterator[Any]:
        """See `Caller`. The caller's task holds the room."""
        op, work = self._code.op, self._code.work
        results = self._caller.results_later(batch, room)
        found = [result_types(result, op, work) async for result in results]
        yield types_table(found, batch.column(op.ids[0]), op, work)

    def as_batch(self, result: Any) -> Any:
        """See `Caller`."""
        return result


class RowTypesCaller(RowCaller):
    """Calls ``fn(value, ...)`` for each row, and keeps the types of its results."""

    def __init__(self, contract: RowCall, types: TypesCall, code: UserCode) -> None:
        super().__init__(contract, code)
        self._types = types

    def _results_of(self, batch: pa.Table) -> RowResults:
        return RowTypes(self._types, batch, self._code.op, self._code.work)


def caller(code: UserCode) -> Caller:
    """Return the caller for a contract.

    Args:
        code: What is called, and how.
    """
    contract = code.op.contract
    if isinstance(contract, TypesCall):
        if isinstance(contract.of, BatchCall):
            return BatchTypesCaller(contract.of, code)
        return RowTypesCaller(contract.of, contract, code)
    if isinstance(contract, RowCall):
        return RowCaller(contract, code)
    if isinstance(contract, ColumnsCall):
        return ColumnsCaller(contract, code)
    return BatchCaller(contract, code)


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of user code's coroutine, or the exception that it raised.

    Args:
        seconds: The time limit of the call; None for no limit. A coroutine that exceeds it is
            cancelled, and its process ended if that takes longer than a second.
        coroutine: The coroutine.
    """
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
