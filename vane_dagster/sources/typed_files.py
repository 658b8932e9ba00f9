"""`TypedSource`: files whose values have types of their own, as in JSON and Avro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.sources.schemas import wider_type
from vane_dagster.sources.text_types import are_small, is_readable
from vane_dagster.types.schema import read_schema, schema_record


@dataclass(frozen=True)
class TypedSource(IngestedSource):
    """Files whose values have types. A subclass defines `convert`, by `shown_types`."""

    is_text: ClassVar[bool] = False

    def joined(self, one: Any, other: Any) -> Any:
        return one if one == other else _record(_common([one, other]))

    def common_type(self, found: Sequence[Any]) -> pa.DataType | None:
        column = _common(found)
        return None if column is None else column.type

    def cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        own = values.type
        is_number = pa.types.is_integer(own) or pa.types.is_floating(own)
        is_exact = not (pa.types.is_floating(own) and pa.types.is_decimal(kind))
        if pa.types.is_string(own) or not is_exact:  # by its text, a fraction is not rounded
            return super().cast(values, kind)
        is_boolean = pa.types.is_boolean(own) or pa.types.is_boolean(kind)
        if is_boolean and not pa.types.is_string(kind):
            raise pa.ArrowInvalid("a number is neither true nor false")
        if is_number and pa.types.is_temporal(kind):
            raise pa.ArrowInvalid("a number is no time")
        return values.cast(kind)


def is_declared(kind: pa.DataType) -> bool:
    """Return whether values can be cast to a declared type."""
    if pa.types.is_nested(kind) and not pa.types.is_map(kind):
        return all(is_declared(kind.field(index).type) for index in range(kind.num_fields))
    return is_readable(kind)


_LONG = "long"
"""The name of a column of whole numbers, in facts, if a double does not hold each of them."""


def shown_types(rows: pa.Table) -> Mapping[str, Any]:
    """Return what rows show of the types of their columns, as JSON values."""
    return {name: _shown(rows.column(name)) for name in rows.column_names}


def _shown(values: pa.ChunkedArray) -> str | None:
    """Return what values show of the type of their column, as JSON."""
    is_long = pa.types.is_integer(values.type) and not are_small(values)
    return _record(pa.field(_LONG if is_long else "", values.type))


def _record(column: pa.Field | None) -> str | None:
    return None if column is None else schema_record(pa.schema([column]))


def _column_of(record: str | None) -> pa.Field | None:
    return None if record is None else read_schema(record).field(0)


def _wider(one: pa.Field | None, other: pa.Field | None) -> pa.Field | None:
    """Return a column that holds the values of two; None if there is no such type."""
    if one is None or other is None:
        return None
    is_long = _LONG in (one.name, other.name)
    kinds = one.type, other.type
    if set(kinds) == {pa.int64(), pa.float64()}:
        return pa.field("", pa.string() if is_long else pa.float64())
    found = wider_type(*kinds) or wider_type(*map(_with_doubles, kinds))
    if found is None and not any(map(pa.types.is_nested, kinds)):
        found = pa.string()
    return None if found is None else pa.field(_LONG if is_long else "", found)


def _with_doubles(kind: pa.DataType) -> pa.DataType:
    """Return a nested type with doubles in place of whole numbers."""
    if pa.types.is_list(kind):
        return pa.list_(_with_doubles(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _with_doubles(f.type)) for f in kind])
    return pa.float64() if kind == pa.int64() else kind


def _common(found: Sequence[Any]) -> pa.Field | None:
    return reduce(_wider, [_column_of(each) for each in dict.fromkeys(found)])
