"""Arguments and results of functions that are called row by row."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import RowErrors, StageError, UdfError, names
from vane_dagster.pipeline.contracts import RowCall
from vane_dagster.types.kinds import is_list
from vane_dagster.types.records import fields_of, has_fields
from vane_dagster.types.row_values import row_values
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.conversion import check_pinned, fitted
from vane_dagster.worker.output_ids import changed_input, is_equal
from vane_dagster.worker.protocol import CallUdf, Work


def row_arguments(contract: RowCall, batch: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield for each row the values that its call gets.

    Args:
        contract: The contract.
        batch: The rows.
    """
    if contract.inputs is None:
        rows = zip(*map(row_values, batch.columns))
        return zip(map(dict, map(zip, itertools.repeat(batch.column_names), rows)))
    return zip(*(_column(contract, batch, column) for _, column in contract.inputs))


def row_function(
    contract: RowCall, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that is called with the values of a row alone.

    Args:
        contract: The contract.
        call: The user's function or method.
        args: Positional arguments after the values.
        kwargs: Keyword arguments.
    """
    placed = 1 if contract.inputs is None else contract.positional
    named = [parameter for parameter, _ in (contract.inputs or ())[contract.positional :]]
    if not named and not args and not kwargs:
        return call
    return lambda *values: call(
        *values[:placed], *args, **dict(zip(named, values[placed:])), **kwargs
    )


def _column(contract: RowCall, batch: pa.Table, column: str) -> Sequence[Any]:
    if column not in contract.arrays:
        return row_values(batch.column(column))
    if is_list(batch.schema.field(column).type):  # their arrays have the type of the elements
        rows = given_batch(batch.select([column]), "numpy")[column]
        return [row if row is None else np.array(row) for row in rows]
    values = row_values(batch.column(column))
    return [value if value is None else np.asarray(value) for value in values]


class RowResults:
    """The results of the calls for the rows of a batch, and the errors of rows that failed.

    Args:
        contract: The contract.
        batch: The rows.
        op: The call.
        work: The task, with the output schema.
    """

    def __init__(self, contract: RowCall, batch: pa.Table, op: CallUdf, work: Work) -> None:
        self._contract, self._batch, self._op, self._work = contract, batch, op, work
        self._takes_value = contract.result == "value"
        self._plain = _IMMUTABLE if self._takes_value else frozenset()
        self._places: list[int] = []
        self._values: list[Any] = []
        self._errors: dict[int, BaseException] = {}

    def add(self, place: int, returned: Any) -> None:
        """Add what the call for a row has returned.

        Args:
            place: The row's position in the batch.
            returned: The result; a generator is run to its end.

        Raises:
            TypeError: If it is not what the contract says.
        """
        if type(returned) in self._plain:  # most results; the rest is slower
            self._places.append(place)
            self._values.append(returned)
            return
        if type(returned) is types.CoroutineType:
            returned.close()
            raise TypeError(
                "returned a coroutine: a decorator hides that the function is async. Make the "
                "decorator's wrapper an async def that awaits the function"
            )
        is_generator = type(returned) is types.GeneratorType
        if self._takes_value and not is_generator:
            self._places.append(place)
            self._values.append(kept(returned))
        elif is_generator:
            self.add_yielded(place, [kept(value) for value in returned])
        elif self._contract.result == "values":
            self.add_yielded(place, [kept(value) for value in _several(returned)])
        elif not isinstance(returned, (bool, np.bool_)):
            raise TypeError(
                f"returned {type(returned).__name__}; expected a bool: whether to keep the row"
            )
        elif returned:
            self._places.append(place)
            self._values.append(None)

    def add_yielded(self, place: int, yielded: Sequence[Any]) -> None:
        """Add what the call for a row has yielded.

        Args:
            place: The row's position in the batch.
            yielded: The values, as `kept` returned them.

        Raises:
            TypeError: If the contract expects one value.
        """
        if self._contract.result == "values":
            self._places.extend([place] * len(yielded))
            self._values.extend(yielded)
        elif len(yielded) == 1:
            self.add(place, yielded[0])
        else:
            raise TypeError(
                f"yielded {len(yielded)} values for one row; yield one, or use flat_map, which "
                "makes a row of each"
            )

    def fail(self, place: int, raised: BaseException) -> None:
        """Record the error of a row.

        Args:
            place: The row's position in the batch.
            raised: The exception.

        Raises:
            BaseException: If it ends the worker, or is no fault of a row.
        """
        if is_shutdown(raised):
            raise raised
        error = contained(raised)
        if isinstance(error, StageError):
            raise error
        self._errors[place] = error

    def table(self) -> pa.Table:
        """Return the results as a table, with the ids of their rows.

        Raises:
            RowErrors: If rows failed; with the results of the others.
        """
        table = self._table()
        if self._errors:
            raise RowErrors(self._errors, table)
        return table

    def _table(self) -> pa.Table:
        if self._places != sorted(self._places):  # async calls end in any order
            order = sorted(range(len(self._places)), key=self._places.__getitem__)
            self._places = [self._places[index] for index in order]
            self._values = [self._values[index] for index in order]
        try:
            columns = self._columns(self._values, self._places)
        except (UdfError, TypeError):
            self._drop_unfit()
            columns = self._columns(self._values, self._places)
        origin = self._op.parent or self._op.ids[0]
        if origin not in columns:
            owners = pa.array(self._places, pa.int64())
            columns[origin] = self._batch.column(self._op.ids[0]).take(owners)
        return pa.table(columns)

    def _columns(self, values: Sequence[Any], places: Sequence[int]) -> dict[str, Any]:
        schema, location, pinned = self._work.schema, self._work.location, self._op.pinned
        if self._contract.result == "bool":
            return {}
        if self._contract.output is not None:
            field = schema.field(self._contract.output)
            return {field.name: fitted(values, field, location, pinned)}
        first = self._op.made[0]
        rows = [v if type(v) is dict and first in v else self._fields(v) for v in values]
        if pinned:
            check_pinned({name for row in rows for name in row}, schema, location)
        own_ids = {self._work.id, *self._op.ids, self._op.parent}
        found = {}
        for name in self._op.made:
            if name in own_ids and not all(name in row for row in rows):
                continue  # the id is added for all rows
            column = [_item(row, name) for row in rows]
            found[name] = fitted(column, schema.field(name), location, pinned)
        self._check_passed_on(rows, places)
        return found

    def _check_passed_on(self, rows: Sequence[Mapping[str, Any]], places: Sequence[int]) -> None:
        """Raise UdfError if rows have other values than those that are passed on from the input."""
        location = self._work.location
        for name in self._op.carried(self._work):
            if not rows or not all(name in row for row in rows):
                continue
            field = self._work.schema.field(name)
            column = unsliced(self._batch.select([name])).take(pa.array(places, pa.int64()))
            try:
                given = fitted(row_values(column.column(name)), field, location)
            except UdfError:  # a form that does not hold all values of the type
                continue
            if not is_equal(fitted([row[name] for row in rows], field, location), given):
                raise changed_input(name, location)

    def _fields(self, value: Any) -> Mapping[str, Any]:
        """Return a result by column. If one column is declared, the result may be its value."""
        if len(self._op.made) == 1 and not has_fields(value):
            return {self._op.made[0]: value}
        return fields_of(value)

    def _drop_unfit(self) -> None:
        """Move the rows with results that do not fit the schema to the errors."""
        for place, value in zip(self._places, self._values):
            try:
                self._columns([value], [place])
            except (UdfError, TypeError) as error:
                self._errors[place] = error
        fit = [i for i, place in enumerate(self._places) if place not in self._errors]
        self._places = [self._places[index] for index in fit]
        self._values = [self._values[index] for index in fit]


_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def kept(value: Any) -> Any:
    """Return a copy of a result that the user's code cannot write into when it is called again.

    Args:
        value: The result: a value, or lists, dicts and dataclasses of values, arrays and tensors.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        flat = bool(value) and type(value[0]) in _IMMUTABLE
        return value.copy() if flat else [kept(item) for item in value]
    if kind is dict:
        return {name: kept(item) for name, item in value.items()}
    if isinstance(value, tuple):
        items = (kept(item) for item in value)
        return kind._make(items) if hasattr(kind, "_make") else tuple(items)
    if isinstance(value, np.ndarray):
        return value.copy()
    if hasattr(value, "detach"):
        return value.detach().clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(own, field.name, kept(getattr(value, field.name)))
        return own
    return value


def _several(returned: Any) -> Iterable[Any]:
    """Return the iterable of values that a call has returned.

    Raises:
        TypeError: If the call returned a single value.
    """
    if returned is None:
        return ()
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
        raise TypeError(
            f"returned {type(returned).__name__}; expected a list with a value for each new row"
        )
    return returned


def _item(row: Mapping[str, Any], name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise TypeError(
            f"column {name!r} is declared and was not returned; returned: {names(row, 20)}"
        ) from None
