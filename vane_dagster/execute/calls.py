"""Calls of a user's function or model over the batches of a table, whichever way it answers."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.execute.batches import from_result, slices, to_format, with_ids
from vane_dagster.execute.work import CallUdf, ModelSpec, Tally, Work


class Caller:
    """A constructed model, or a function, and the loop that its async calls run in."""

    def __init__(self, model: ModelSpec, target: Callable[..., Any]) -> None:
        self._target = target
        self._style = model.style
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room: asyncio.Semaphore | None = None
        if model.style in ("async", "async_generator"):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(
        self, op: CallUdf, table: pa.Table, work: Work, revoked: Callable[[], bool]
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Runs over a table's batches.

        Args:
            op: How batches are cut and given.
            table: The rows.
            work: The call's schema, id and culprit.
            revoked: Asked between batches whether to stop.

        Returns:
            The output in the order of the batches, and counts for the report.

        Raises:
            UdfError: If what was returned does not fit.
        """
        import cloudpickle

        args, kwargs = cloudpickle.loads(op.arguments)
        batches = list(slices(table, op.batch_size))
        run = _Batches(self, op, work, args, kwargs, revoked)
        started = time.perf_counter()
        outputs = self._run_async(run, batches) if self._loop else run.one_by_one(batches)
        facts = {
            "batches": len(outputs),
            "call_seconds": run.seconds or time.perf_counter() - started,
            "cancelled": len(outputs) < len(batches),
        }
        rows = pa.concat_tables(outputs) if outputs else work.schema.empty_table()
        passed = pc.count_distinct(rows.column(op.parent)).as_py() if op.parent else rows.num_rows
        return rows, {"tally": Tally(table.num_rows, table.num_rows - passed), **facts}

    def _run_async(self, run: _Batches, batches: list[pa.Table]) -> list[pa.Table]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run.together(batches), self._loop).result()

    def room(self, size: int) -> asyncio.Semaphore:
        """What bounds the batches in flight in this worker, over all its slices."""
        if self._room is None:
            self._room = asyncio.Semaphore(size)
        return self._room

    def answers(self, given: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """What a synchronous call gives: one result, or several."""
        result = self._target(given, *args, **kwargs)
        if self._style == "generator" or inspect.isgenerator(result):
            yield from result
        else:
            yield result

    async def answers_later(self, given: Any, args: Any, kwargs: Any) -> AsyncIterator[Any]:
        """What an async call gives: one result, or several."""
        result = self._target(given, *args, **kwargs)
        if self._style == "async_generator":
            async for item in result:
                yield item
        else:
            yield await result


class _Batches:
    """One table's batches on their way through a caller."""

    def __init__(
        self,
        caller: Caller,
        op: CallUdf,
        work: Work,
        args: Any,
        kwargs: Any,
        revoked: Callable[[], bool],
    ) -> None:
        self.caller, self.op, self.work = caller, op, work
        self.args, self.kwargs, self.revoked = args, kwargs, revoked
        self.seconds = 0.0

    def one_by_one(self, batches: list[pa.Table]) -> list[pa.Table]:
        outputs = []
        for batch in batches:
            if self.revoked():
                break
            given = self._given(batch)
            started = time.perf_counter()
            results = list(self.caller.answers(given, self.args, self.kwargs))
            self.seconds += time.perf_counter() - started
            outputs.append(self._fitted(results, batch))
        return outputs

    async def together(self, batches: list[pa.Table]) -> list[pa.Table]:
        """Up to `max_concurrency` batches in flight; the first error cancels the others."""
        room = self.caller.room(self.op.max_concurrency)
        tasks = [asyncio.ensure_future(self._one(batch, room)) for batch in batches]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [output for output in outputs if output is not None]

    async def _one(self, batch: pa.Table, room: asyncio.Semaphore) -> pa.Table | None:
        async with room:
            if self.revoked():
                return None
            given = self._given(batch)
            answers = self.caller.answers_later(given, self.args, self.kwargs)
            try:
                results = [answer async for answer in answers]
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end its loop by it
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            return self._fitted(results, batch)

    def _given(self, batch: pa.Table) -> Any:
        """The batch as the user sees it."""
        if self.op.columns is not None:
            batch = batch.select(list(dict.fromkeys([self.op.ids[0], *self.op.columns])))
        return to_format(batch, self.op.batch_format)

    def _fitted(self, results: list[Any], batch: pa.Table) -> pa.Table:
        work, op = self.work, self.op
        carried = {work.id, *op.ids, *([op.parent] if op.parent else [])}
        tables = [from_result(r, work.schema, carried, work.culprit) for r in results]
        output = pa.concat_tables(tables) if tables else work.schema.empty_table()
        return with_ids(output, batch, work, op)
