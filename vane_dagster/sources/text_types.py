"""The types of text: which one all values of a column have, and strict casts of text to a type.

A column has a type only if no value is changed by it: `007`, `+5` and whole numbers of more than 64
bits are text, and so are fractions beside whole numbers of more than 15 digits. A fraction is the
nearest double. Dates and timestamps are in the ISO format; others are text.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

_KINDS = {
    pa.bool_(): "^(true|True|TRUE|false|False|FALSE)$",
    pa.int64(): "",
    pa.float64(): r"^-?((0|[1-9][0-9]{0,14})|(0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
    "|^(?i:-?(nan|inf|infinity))$",
    pa.date32(): "",
    pa.timestamp("us"): "",
    pa.timestamp("us", "UTC"): "",
}
"""The types that are found in texts, the first one first, and the pattern of the texts."""


def typed(values: pa.Array) -> pa.Array:
    """Convert texts that are not empty to the first type that all have; to null if all are."""
    values = values.drop_null()
    first = _trimmed(values.slice(0, 1)).drop_null()
    kinds = [kind for kind in _KINDS if _tried(first, kind) is not None]
    if not kinds:
        return values
    texts = _trimmed(values).drop_null()
    if not len(texts):
        return pa.nulls(0)
    tried = (_tried(texts, kind) for kind in kinds)
    return next((result for result in tried if result is not None), values)


def cast_text(values: pa.Array, kind: pa.DataType, is_found: bool = False) -> pa.Array:
    """Convert texts to a type; empty ones are null, unless they are to be texts."""
    if pa.types.is_string(kind):
        return values
    cast = _shown if is_found and kind in _KINDS else _cast
    return cast(_trimmed(values), kind)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    cast = values.cast(kind)
    if pa.types.is_floating(kind) and _match_any(values.filter(pc.is_inf(cast)), "[0-9]"):
        raise pa.ArrowInvalid("a number is too large")
    if pa.types.is_integer(kind) and _match_any(values, "[xX]"):
        raise pa.ArrowInvalid("a value is hexadecimal")
    return cast


def _shown(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert texts to a type that each of them has."""
    cast_values = _cast(values, kind)
    if pa.types.is_integer(kind):  # `007` and `+7` are not numbers
        is_shown = cast_values.cast(pa.string()).equals(values)
    else:
        matches = pc.match_substring_regex(values, _KINDS[kind])
        is_shown = pc.all(matches, min_count=0).as_py()
    if not is_shown:
        raise pa.ArrowInvalid("a value has another type")
    return cast_values


def _tried(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return _shown(values, kind)
    except pa.ArrowInvalid:
        return None


def cast_each(
    values: pa.ChunkedArray, kind: pa.DataType, cast: Callable[[pa.Array], pa.Array]
) -> tuple[list[pa.Array], list[int]]:
    """Cast the values of a column; those that do not fit become null."""
    arrays: list[pa.Array] = []
    misfits: list[int] = []

    def add(part: pa.Array, first: int) -> None:
        is_null = part.null_count == len(part)
        try:
            arrays.append(pa.nulls(len(part), kind) if is_null else cast(part))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            if middle := len(part) // 2:
                add(part.slice(0, middle), first)
                add(part.slice(middle), first + middle)
            else:
                arrays.append(pa.nulls(1, kind))
                misfits.append(first)

    first = 0
    for chunk in values.chunks:
        add(chunk, first)
        first += len(chunk)
    return arrays, misfits


def is_readable(kind: pa.DataType) -> bool:
    """Return whether texts can be cast to a type."""
    try:
        pa.array([], pa.string()).cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return not isinstance(kind, pa.BaseExtensionType)


def _trimmed(values: pa.Array) -> pa.Array:
    """Return texts without white space around them; null for those that then are empty."""
    values = pc.utf8_trim_whitespace(values)
    is_empty = pc.equal(values, "")
    return pc.if_else(is_empty, None, values) if pc.any(is_empty).as_py() else values


def _match_any(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())
