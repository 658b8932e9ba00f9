"""Arguments and results of functions that are called row by row."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import RowErrors, StageError, UdfError
from vane_dagster.pipeline.contracts import RowCall
from vane_dagster.sources.file import File
from vane_dagster.types.kinds import is_list
from vane_dagster.types.records import fields_of, fields_or_none
from vane_dagster.types.row_values import row_values
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.conversion import check_pinned
from vane_dagster.worker.kept_values import PLAIN, kept
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.results import from_result


def row_arguments(contract: RowCall, batch: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield for each row the values that its call gets."""
    if contract.inputs is None:
        rows = zip(*map(row_values, batch.columns))
        return zip(map(dict, map(zip, itertools.repeat(batch.column_names), rows)))
    return zip(
        *(
            _files(batch, column)
            if parameter in contract.files
            else _column(contract, batch, column)
            for parameter, column in contract.inputs
        )
    )


def row_function(
    contract: RowCall, call: Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that is called with the values of a row alone."""
    placed = 1 if contract.inputs is None else contract.positional
    named = [parameter for parameter, _ in (contract.inputs or ())[contract.positional :]]
    if not named and not kwargs:
        return call
    return lambda *values: call(*values[:placed], **dict(zip(named, values[placed:])), **kwargs)


def _files(batch: pa.Table, column: str) -> Sequence[File | None]:
    paths = batch.column(column).to_pylist()
    return [None if path is None else File(path) for path in paths]


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

    Attributes:
        plain: The types of results that are added to the lists that follow as they are.
        places: The positions in the batch of the rows that results belong to.
        values: The results.
    """

    def __init__(self, contract: RowCall, batch: pa.Table, op: CallUdf, work: Work) -> None:
        self._contract, self._batch, self._op, self._work = contract, batch, op, work
        self._takes_value = contract.result == "value"
        self.plain = PLAIN if self._takes_value else frozenset()
        self.places: list[int] = []
        self.values: list[Any] = []
        self._errors: dict[int, BaseException] = {}

    def add(self, place: int, returned: Any) -> None:
        """Add what the call for a row has returned."""
        is_generator = type(returned) is types.GeneratorType
        if self._takes_value and not is_generator:
            self.values.append(kept(returned))  # which may fail
            self.places.append(place)
        elif is_generator:
            self.add_yielded(place, [kept(value) for value in returned])
        elif self._contract.result == "values":
            self.add_yielded(place, [kept(value) for value in self._several(returned)])
        elif not isinstance(returned, (bool, np.bool_)):
            raise self._refused(
                f"returned {type(returned).__name__}; expected a bool: True keeps the row"
            )
        elif returned:
            self.places.append(place)
            self.values.append(None)

    def _several(self, returned: Any) -> Iterable[Any]:
        """Return the iterable of values that a call has returned."""
        if returned is None:
            return ()
        if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
            raise self._refused(
                f"returned {type(returned).__name__}; expected a list with a value for each new row"
            )
        return returned

    def add_yielded(self, place: int, yielded: Sequence[Any]) -> None:
        """Add what the call for a row has yielded."""
        if self._contract.result == "values":
            self.places.extend([place] * len(yielded))
            self.values.extend(yielded)
        elif len(yielded) == 1:
            self.add(place, yielded[0])
        else:
            raise self._refused(
                f"yielded {len(yielded)} values for one row; yield one, or use flat_map, which "
                "makes a row from each"
            )

    def fail(self, place: int, raised: BaseException) -> None:
        """Record the error of a row."""
        if is_shutdown(raised):
            raise raised
        error = contained(raised)
        if isinstance(error, StageError):
            raise error
        self._errors[place] = error

    def table(self) -> pa.Table:
        """Return the results as a table, with the ids of their rows."""
        table = self._table()
        if self._errors:
            raise RowErrors(self._errors, table)
        return table

    def _table(self) -> pa.Table:
        if self.places != sorted(self.places):  # async calls end in any order
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
            self.places = [self.places[index] for index in order]
            self.values = [self.values[index] for index in order]
        pieces = self._converted(self.values, self.places)
        places = [place for placed, _ in pieces for place in placed]
        parts = [part for _, part in pieces] or [self._columns([])]
        converted = parts[0] if len(parts) == 1 else pa.concat_tables(parts).combine_chunks()
        columns: dict[str, Any] = dict(zip(converted.column_names, converted.columns))
        ids = self._batch.column(self._op.ids[0])
        columns[self._op.origin] = ids.take(pa.array(places, pa.int64()))
        table = pa.table(columns)
        if self._errors.keys().isdisjoint(places):
            return table
        return unsliced(table).filter(pa.array([place not in self._errors for place in places]))

    def _converted(
        self, values: Sequence[Any], places: Sequence[int]
    ) -> list[tuple[Sequence[int], pa.Table]]:
        """Convert results at once, or in halves if they do not fit, down to a single result.

        So results of several types are converted if each fits by itself, and a result that does not
        is the error of its row alone.
        """
        try:
            return [(places, self._columns(values))] if values else []
        except (UdfError, TypeError) as error:
            if len(values) == 1:
                self._errors[places[0]] = (
                    error if isinstance(error, UdfError) else self._refused(str(error))
                )
                return []
        middle = len(values) // 2
        halves = slice(middle), slice(middle, None)
        return [each for half in halves for each in self._converted(values[half], places[half])]

    def _are_fields(self, values: Sequence[Any]) -> bool:
        """Return whether the fields of results are columns."""
        if self._contract.output is not None or self._contract.result == "bool":
            return False
        return len(self._op.made) > 1 or not PLAIN.issuperset(map(type, values))

    def _columns(self, values: Sequence[Any]) -> pa.Table:
        """Convert results to columns, without the ids that their places determine."""
        op, schema, location = self._op, self._work.schema, self._work.location
        if self._contract.result == "bool":
            return pa.table({})
        columns: dict[str, Any] = {self._contract.output or op.made[0]: values}
        if self._are_fields(values):
            first = op.made[0]
            rows = [v if type(v) is dict and first in v else self._fields(v) for v in values]
            if op.pinned:
                check_pinned({name for row in rows for name in row}, schema, location)
            columns = {}
            for name in dict.fromkeys((*op.made, *(rows[0] if rows else ()))):
                with contextlib.suppress(KeyError):
                    columns[name] = [row[name] for row in rows]
        known = {*op.ids, op.parent, *(name for name in schema.names if name not in op.made)}
        return from_result(columns, schema, (), "", location, known, op.pinned)

    def _fields(self, value: Any) -> Mapping[str, Any]:
        """Return a result by column. If one column is declared, the result may be its value.

        None is null in all of them.
        """
        if value is None:
            return dict.fromkeys(self._op.made)
        if len(self._op.made) == 1 and fields_or_none(value) is None:
            return {self._op.made[0]: value}
        return fields_of(value)

    def _refused(self, text: str) -> UdfError:
        return UdfError(f"{self._work.location}: {text}")
