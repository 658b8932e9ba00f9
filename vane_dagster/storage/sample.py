"""A sample of rows as texts, for people: long text truncated, vectors shortened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.tensors import as_storage

_MAX_COLUMNS = 12
_WIDTH = 80
_SHOWN_NUMBERS = 3
_WHOLE = 8

Sample = tuple[Mapping[str, str], ...]


def sample_rows(table: pa.Table, rows: int = 5) -> Sample:
    """Return the first rows, each value as a short text."""
    first = table.slice(0, rows).select(table.column_names[:_MAX_COLUMNS])
    columns = {name: short_texts(first.column(name)) for name in first.column_names}
    return tuple({n: texts[i] for n, texts in columns.items()} for i in range(first.num_rows))


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, as texts if Python cannot represent them, such as year 10000."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return list(column.cast(pa.string()).to_pylist())


def short_texts(column: pa.ChunkedArray, width: int = _WIDTH, end: int = 0) -> list[str]:
    """Return the values of a column as short texts; see `short_text`."""
    column = as_storage(column)
    if not (pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type)):
        return [short_text(value, width, end) for value in python_values(column)]
    lengths = pc.list_value_length(column).to_pylist()
    heads = pc.list_slice(column, 0, _WHOLE, return_fixed_size_list=False)
    texts = []
    for head, length in zip(heads.to_pylist(), lengths):
        shown = [short_text(value, width, end) for value in head or ()]
        if length and (length > _WHOLE or len(", ".join(shown)) > width):
            shown = [*shown[:_SHOWN_NUMBERS], *[f"… {length} in all"] * (length > _SHOWN_NUMBERS)]
        texts.append("null" if head is None else f"[{', '.join(shown)}]")
    return texts


def short_text(value: Any, width: int = _WIDTH, end: int = 0) -> str:
    """Return a value on one line, of a long one the beginning and so many of the last characters.

    Paths often differ at their ends alone.
    """
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    if len(text) <= width:
        return text
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"
