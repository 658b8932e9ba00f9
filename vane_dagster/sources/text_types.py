"""The types of text: which one all values of a column have, and strict casts of text to a type.

A column has a type only if no value is changed by it: `007`, `+5` and whole numbers of more than 64
bits are text, and so are numbers with more digits than a double holds. Dates and timestamps are in
the ISO format, or in the one that is declared; they are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

KINDS = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "integer": pa.int64(),
    "long": pa.int64(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "text": pa.string(),
}
"""The kinds of columns, with their types. An `integer` is one that a double holds, a `long` not."""
MOST_MISFITS = 1_000
"""Values of a fragment that may not fit before the whole fragment fails."""

_TRIED = ("bool", "integer", "double", "date", "timestamp", "timestamptz")
_INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"
_DOUBLE = r"^-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$|^(?i:-?(nan|inf|infinity))$"
_WORDS = ("true", "True", "TRUE", "false", "False", "FALSE")
LARGEST = 2**53
"""The whole numbers up to it are those that a double holds."""
_SURE_DIGITS = 15


def joined(one: str, other: str) -> str:
    """Return the kind of a column with values of two kinds."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    pair = {one, other}
    if pair == {"integer", "long"}:
        return "long"
    if pair == {"date", "timestamp"}:
        return "timestamp"
    return "double" if pair == {"integer", "double"} else "text"


@dataclass(frozen=True)
class TextTypes:
    """The forms of values in text.

    Attributes:
        date_format: The format of dates as of `strptime`; None for ISO.
        timestamp_format: The format of timestamps; None for ISO.
        decimal_separator: "." or ",".
    """

    date_format: str | None = None
    timestamp_format: str | None = None
    decimal_separator: str = "."

    def typed(self, values: pa.Array, known: str = "null") -> tuple[str, pa.Array]:
        """Return the kind of some values, and the values.

        Those that are written as Arrow itself writes them have the type of their kind, from which
        the same texts can be made; others stay texts.

        Args:
            values: The texts.
            known: The kind of the values before them in their column; after texts, nothing else
                is looked for.
        """
        if known == "text":
            return known, values
        tried = sorted(_TRIED, key=lambda kind: kind != known)  # the likeliest first
        if not (self.date_format or self.timestamp_format):  # by which `20240131` may be a date
            for kind in tried:
                if (found := self._canonical(values, kind)) is not None:
                    return _sized(kind, found), found
        plain = _trimmed(values).drop_null()
        if not len(plain):
            return "null", values
        tried.sort(key=lambda kind: self._format(KINDS[kind]) is None)
        kind = next((kind for kind in tried if self._fits(plain, kind)), "text")
        return _sized(kind, plain), values

    def _format(self, kind: pa.DataType) -> str | None:
        """Return the declared format of a type; None for ISO."""
        if pa.types.is_date(kind):
            return self.date_format
        form = self.timestamp_format if pa.types.is_timestamp(kind) else None
        return form if form is not None and ("%z" in form) == bool(kind.tz) else None

    def _canonical(self, values: pa.Array, kind: str) -> pa.Array | None:
        """Return values of a kind if their texts are those that Arrow makes of them."""
        if values.null_count == len(values):
            return None
        try:
            if kind == "integer":
                is_whole = pc.all(pc.match_substring_regex(values, _INTEGER)).as_py()
                return values.cast(pa.int64()) if is_whole else None
            if kind == "double" and self.decimal_separator == ".":
                found = values.cast(pa.float64())
                return found if found.cast(pa.string()).equals(values) else None
            if kind == "date":
                return values.cast(pa.date32())
        except pa.ArrowInvalid:
            pass
        return None

    def cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        """Convert texts to a type; empty ones are null, unless they are to be texts.

        Raises:
            pa.ArrowInvalid: If one does not have the type.
        """
        return values if pa.types.is_string(kind) else self._cast(_trimmed(values), kind)

    def _cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        if form := self._format(kind):
            return _parsed(values, form, kind)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = self._with_points(values)
        found = values.cast(kind)
        if pa.types.is_floating(kind):
            infinite = pc.is_inf(found)
            if pc.any(infinite).as_py() and _match_any(values.filter(infinite), "[0-9]"):
                raise pa.ArrowInvalid("a number is too large")
        if pa.types.is_integer(kind) and _match_any(values, "[xX]"):
            raise pa.ArrowInvalid("a value is hexadecimal")
        return found

    def _with_points(self, values: pa.Array) -> pa.Array:
        """Return texts of numbers with a point as the decimal separator."""
        if self.decimal_separator == ".":
            return values
        if pc.any(pc.match_substring(values, ".")).as_py():
            raise pa.ArrowInvalid("a value has a decimal point")
        return pc.replace_substring(values, ",", ".")

    def _fits(self, values: pa.Array, kind: str) -> bool:
        """Return whether all of some values, trimmed and without nulls, have a kind."""
        try:
            if kind == "bool":
                return bool(pc.all(pc.is_in(values, pa.array(_WORDS))).as_py())
            if kind == "double":
                values = self._with_points(values)
            pattern = {"integer": _INTEGER, "double": _DOUBLE}.get(kind, "")
            if not pc.all(pc.match_substring_regex(values, pattern)).as_py():
                return False
            if kind == "double":
                return _is_exact(values)
            self._cast(values, KINDS[kind])
        except (pa.ArrowInvalid, ValueError):
            return False
        return True


Cast = Callable[[pa.Array], pa.Array]


def cast_each(
    values: pa.ChunkedArray, kind: pa.DataType, cast: Cast
) -> tuple[pa.ChunkedArray, Sequence[int]]:
    """Cast the values of a column; those that do not fit become null.

    Args:
        values: The values.
        kind: The type.
        cast: Casts an array, or raises `pa.ArrowInvalid`.

    Returns:
        The column, and the positions of the values that do not fit.

    Raises:
        pa.ArrowInvalid: If more than `MOST_MISFITS` do not fit.
    """
    misfits: list[int] = []
    found: list[pa.Array] = []
    first = 0

    def add(part: pa.Array, start: int) -> None:
        if part.null_count == len(part):
            found.append(pa.nulls(len(part), kind))
            return
        try:
            found.append(cast(part))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            if len(part) > 1:
                middle = len(part) // 2
                add(part.slice(0, middle), start)
                add(part.slice(middle), start + middle)
                return
            if len(misfits) == MOST_MISFITS:
                raise pa.ArrowInvalid(f"more than {MOST_MISFITS:,} values") from None
            misfits.append(start)
            found.append(pa.nulls(1, kind))

    for chunk in values.chunks:
        add(chunk, first)
        first += len(chunk)
    return pa.chunked_array(found, kind), misfits


def are_small(values: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether a double holds each of some whole numbers."""
    limits = pc.min_max(values).as_py()
    return limits["min"] is None or (limits["min"] >= -LARGEST and limits["max"] <= LARGEST)


def is_readable(kind: pa.DataType) -> bool:
    """Return whether text can be cast to a type."""
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    try:
        pa.array([], pa.string()).cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def _trimmed(values: pa.Array) -> pa.Array:
    """Return texts without white space around them; null for those that then are empty."""
    values = pc.utf8_trim_whitespace(values)
    is_empty = pc.equal(pc.binary_length(values), 0)
    return pc.if_else(is_empty, None, values) if pc.any(is_empty).as_py() else values


def _match_any(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


def _is_exact(values: pa.Array) -> bool:
    """Return whether texts are what a double prints, with as many digits as they have."""
    numbers = values.cast(pa.float64())
    infinite = pc.is_inf(numbers)
    if pc.any(infinite).as_py() and _match_any(values.filter(infinite), "[0-9]"):
        return False
    if _match_any(values.filter(pc.equal(numbers, 0)), "^[^eE]*[1-9]"):  # too small
        return False
    if _match_any(values, "^-?[0-9]{19,}$"):  # a whole number of more than 64 bits
        return False
    long = pc.greater(pc.binary_length(values), _SURE_DIGITS)
    if not pc.any(long).as_py():
        return True
    texts, numbers = values.filter(long), numbers.filter(long)
    other = pc.not_equal(numbers.cast(pa.string()), texts)
    texts, numbers = texts.filter(other), numbers.filter(other)
    return all(map(_prints, texts.to_pylist(), numbers.to_pylist()))


def _sized(kind: str, values: pa.Array) -> str:
    """Return the kind of values, by their size if they are whole numbers."""
    is_long = kind == "integer" and not are_small(values.cast(pa.int64()))
    return "long" if is_long else kind


def _prints(text: str, number: float) -> bool:
    """Return whether a number, printed with the digits of a text, is that text."""
    mantissa = text.lower().partition("e")[0]
    digits = mantissa.replace(".", "").lstrip("-0")
    if len(digits) <= _SURE_DIGITS or not np.isfinite(number):
        return True
    printed = f"{abs(number):.{len(digits) - 1}e}".partition("e")[0].replace(".", "")
    return printed == digits


def _parsed(values: pa.Array, form: str, kind: pa.DataType) -> pa.Array:
    """Convert texts by a format of Python's `strptime`: Arrow's takes 31 February for 2 March."""
    encoded = values.dictionary_encode()
    times = [datetime.strptime(text, form) for text in encoded.dictionary.to_pylist()]
    if pa.types.is_date(kind) and any(each.time() != time.min for each in times):
        raise pa.ArrowInvalid("a date has a time")
    return pa.array(times, kind).take(encoded.indices)
