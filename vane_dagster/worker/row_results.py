"""Arguments and results of functions that are called row by row."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import RowErrors, StageError, UdfError, names
from vane_dagster.pipeline.contracts import RowCall
from vane_dagster.types.kinds import is_list
from vane_dagster.worker.batch_formats import fitted, row_values
from vane_dagster.worker.protocol import CallUdf, Work


def row_arguments(
    contract: RowCall, batch: pa.Table
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the positional and keyword arguments of the call for each row.

    Args:
        contract: The contract.
        batch: The rows.
    """
    if contract.inputs is None:
        columns = [row_values(column) for column in batch.columns]
        rows = zip(*columns) if columns else iter([()] * batch.num_rows)
        for row in rows:
            yield (dict(zip(batch.column_names, row)),), {}
        return
    values = [_column(contract, batch, column) for _, column in contract.inputs]
    if contract.positional == len(values):
        for row in zip(*values):
            yield row, {}
        return
    parameters = [parameter for parameter, _ in contract.inputs[contract.positional :]]
    for row in zip(*values):
        yield row[: contract.positional], dict(zip(parameters, row[contract.positional :]))


def _column(contract: RowCall, batch: pa.Table, column: str) -> Sequence[Any]:
    values = row_values(batch.column(column))
    if column not in contract.arrays:
        return values
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
        self._values: dict[int, list[Any]] = {}
        self._errors: dict[int, BaseException] = {}

    def add(self, place: int, answers: Iterator[Any]) -> None:
        """Add the results of a row's call.

        Args:
            place: The row's position in the batch.
            answers: What the call returned or yielded.

        Raises:
            TypeError: If the function did not return what its contract says.
        """
        result = self._contract.result
        values = list(answers)
        if result == "values":
            self._values[place] = _several(values, self._op.style)
            return
        if len(values) != 1:
            raise TypeError(
                f"yielded {len(values)} values for one row; yield one, or use flat_map, which "
                "makes a row of each"
            )
        if result == "bool":
            if not isinstance(values[0], (bool, np.bool_)):
                raise TypeError(
                    f"returned {type(values[0]).__name__}; expected a bool: whether to keep the row"
                )
            values = [None] if values[0] else []
        self._values[place] = values

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
        op, schema = self._op, self._work.schema
        made = [schema.field(name) for name in op.made if name in schema.names]
        places = sorted(self._values)
        try:
            columns = self._columns(made, places)
        except (UdfError, TypeError):
            self._drop_unfit(made, places)
            places = sorted(self._values)
            columns = self._columns(made, places)
        counts = [len(self._values[place]) for place in places]
        owners = pa.array(np.repeat(np.array(places, np.int64), counts))
        origin = op.parent or op.ids[0]
        if origin not in columns:
            columns[origin] = self._batch.column(op.ids[0]).take(owners)
        return pa.table(columns)

    def _columns(self, made: Sequence[pa.Field], places: Sequence[int]) -> dict[str, Any]:
        values = [value for place in places for value in self._values[place]]
        location = self._work.location
        if self._contract.result == "bool":
            return {}
        if self._contract.output is not None:
            field = self._work.schema.field(self._contract.output)
            return {field.name: fitted([plain(v, field.type) for v in values], field, location)}
        rows = [self._fields(value) for value in values]
        own_ids = {self._work.id, *self._op.ids, self._op.parent}
        found = {}
        for field in made:
            if field.name in own_ids and not all(field.name in row for row in rows):
                continue  # the id is added for all rows
            column = [plain(_item(row, field.name), field.type) for row in rows]
            found[field.name] = fitted(column, field, location)
        return found

    def _fields(self, value: Any) -> Mapping[str, Any]:
        """Return a result by column. If one column is declared, the result may be its value."""
        if len(self._op.made) == 1 and not has_fields(value):
            return {self._op.made[0]: value}
        return fields_of(value)

    def _drop_unfit(self, made: Sequence[pa.Field], places: Sequence[int]) -> None:
        """Move the rows with results that do not fit the schema to the errors."""
        for place in places:
            try:
                self._columns(made, [place])
            except (UdfError, TypeError) as error:
                self._errors[place] = error
                del self._values[place]


def _several(values: list[Any], style: str) -> list[Any]:
    """Return the values that a call returned as one iterable, or yielded.

    Raises:
        TypeError: If the call returned a single value.
    """
    if style in ("generator", "async_generator"):
        return values
    (returned,) = values if len(values) == 1 else (values,)
    if returned is None:
        return []
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
        raise TypeError(
            f"returned {type(returned).__name__}; expected a list with a value for each new row"
        )
    return list(returned)


def has_fields(value: Any) -> bool:
    """Return whether a value is a mapping, dataclass, pydantic model or named tuple."""
    try:
        fields_of(value)
    except TypeError:
        return False
    return True


def fields_of(value: Any) -> Mapping[str, Any]:
    """Return a mapping, dataclass, pydantic model or named tuple as a mapping.

    Raises:
        TypeError: If the value has no named fields.
    """
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(names_ := getattr(type(value), "model_fields", None), Mapping):
        return {name: getattr(value, name) for name in names_}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    raise TypeError(
        f"returned {type(value).__name__}; expected a dict, dataclass, pydantic model or named "
        "tuple with a value for each column of the schema, or name the one column by output_column"
    )


def _item(row: Mapping[str, Any], name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise TypeError(
            f"column {name!r} is declared and was not returned; returned: {names(row, 20)}"
        ) from None


def plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value that Arrow reads as `kind`, with the fields of objects as dicts.

    Args:
        value: A value of a row.
        kind: The type of its column.
    """
    if value is None:
        return None
    if isinstance(value, enum.Enum):
        return value.value
    if pa.types.is_struct(kind):
        given = fields_of(value)
        return {field.name: plain(_item(given, field.name), field.type) for field in kind}
    if is_list(kind) and pa.types.is_struct(kind.value_type):
        return [plain(item, kind.value_type) for item in value]
    return value
