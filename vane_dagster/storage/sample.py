"""A sample of rows as texts, for people: long text truncated, vectors shortened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.tensors import as_storage

_MAX_COLUMNS = 12
_MAX_CHARACTERS = 80
_SHOWN_NUMBERS = 3

Sample = tuple[Mapping[str, str], ...]


def sample_rows(table: pa.Table, rows: int = 5) -> Sample:
    """Return the first rows, each value as a short text."""
    first = table.slice(0, rows).select(table.column_names[:_MAX_COLUMNS])
    columns = {name: _texts(first.column(name)) for name in first.column_names}
    return tuple({n: texts[i] for n, texts in columns.items()} for i in range(first.num_rows))


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, as texts if Python cannot represent them, such as year 10000."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return list(column.cast(pa.string()).to_pylist())


def _texts(column: pa.ChunkedArray) -> list[str]:
    column = as_storage(column)
    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        lengths = pc.list_value_length(column).to_pylist()
        heads = pc.list_slice(column, 0, _SHOWN_NUMBERS, return_fixed_size_list=False)
        return [_list(head, length) for head, length in zip(heads.to_pylist(), lengths)]
    return [_text(value) for value in python_values(column)]


def _list(head: list[Any] | None, length: int | None) -> str:
    if head is None:
        return "null"
    shown = ", ".join(_text(value) for value in head)
    return f"[{shown}, … {length} in all]" if length and length > len(head) else f"[{shown}]"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
