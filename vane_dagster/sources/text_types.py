"""The types of text: which one all values of a column have, and strict casts of text to a type.

A column has a type only if no value is changed by it: `007`, `+5` and whole numbers of more than 64
bits are text, and so are numbers with more digits than a double holds. Dates and timestamps are in
the ISO format, or in the one that is declared; they are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time

import pyarrow as pa
import pyarrow.compute as pc

MOST_MISFITS = 1_000
"""Values of a fragment that may not fit before the whole fragment fails."""

_KINDS = {
    pa.bool_(): "^(true|True|TRUE|false|False|FALSE)$",
    pa.int64(): "",
    pa.float64(): r"^-?((0|[1-9][0-9]{0,17})|(0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
    "|^(?i:-?(nan|inf|infinity))$",
    pa.date32(): "",
    pa.timestamp("us"): "",
    pa.timestamp("us", "UTC"): "",
}
"""The types that are found in texts, the first one first, and the pattern of the texts."""
_SURE_DIGITS = 15
_SMALLEST = 1e-300
"""Doubles below it may hold fewer digits."""


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

    def typed(self, values: pa.Array) -> pa.Array:
        """Convert texts that are not empty to the first type that all have; to null if all are."""
        values = values.drop_null()
        # By a declared format, `20240131` may be a date.
        kinds = sorted(_KINDS, key=lambda kind: self._format(kind) is None)
        first = _trimmed(values.slice(0, 1)).drop_null()
        kinds = [kind for kind in kinds if self._tried(first, kind) is not None]
        if not kinds:
            return values
        values = _trimmed(values).drop_null()
        if not len(values):
            return pa.nulls(0)
        tried = (self._tried(values, kind) for kind in kinds)
        return next((found for found in tried if found is not None), values)

    def cast(self, values: pa.Array, kind: pa.DataType, is_found: bool = False) -> pa.Array:
        """Convert texts to a type; empty ones are null, unless they are to be texts."""
        if pa.types.is_string(kind):
            return values
        values = _trimmed(values)
        if not is_found or kind not in _KINDS:
            return self._cast(values, kind)
        if (found := self._tried(values, kind)) is None:
            raise pa.ArrowInvalid("a value has another type")
        return found

    def _cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        if form := self._format(kind):
            return _parsed(values, form, kind)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = self._with_points(values)
        found = values.cast(kind)
        if pa.types.is_floating(kind) and _match_any(values.filter(pc.is_inf(found)), "[0-9]"):
            raise pa.ArrowInvalid("a number is too large")
        if pa.types.is_integer(kind) and _match_any(values, "[xX]"):
            raise pa.ArrowInvalid("a value is hexadecimal")
        return found

    def _format(self, kind: pa.DataType) -> str | None:
        """Return the declared format of a type; None for ISO."""
        if pa.types.is_date(kind):
            return self.date_format
        form = self.timestamp_format if pa.types.is_timestamp(kind) else None
        return form if form is not None and ("%z" in form) == bool(kind.tz) else None

    def _with_points(self, values: pa.Array) -> pa.Array:
        """Return texts of numbers with a point as the decimal separator."""
        if self.decimal_separator == ".":
            return values
        if _match_any(values, r"\."):
            raise pa.ArrowInvalid("a value has a decimal point")
        return pc.replace_substring(values, ",", ".")

    def _tried(self, values: pa.Array, kind: pa.DataType) -> pa.Array | None:
        """Convert trimmed texts to a type; None if one does not have it."""
        is_floating = pa.types.is_floating(kind)
        try:
            values = self._with_points(values) if is_floating else values
            pattern = _KINDS[kind]
            if (
                pattern
                and not pc.all(pc.match_substring_regex(values, pattern), min_count=0).as_py()
            ):
                return None
            found = values.cast(kind) if is_floating else self._cast(values, kind)
        except (pa.ArrowInvalid, ValueError):
            return None
        if pa.types.is_integer(kind):  # `007` and `+7` are no numbers
            return found if found.cast(pa.string()).equals(values) else None
        return None if is_floating and not _are_exact(values, found) else found


def cast_each(
    values: pa.ChunkedArray, kind: pa.DataType, cast: Callable[[pa.Array], pa.Array]
) -> tuple[list[pa.Array], Sequence[int]]:
    """Cast the values of a column; those that do not fit become null."""
    misfits: list[int] = []
    found: list[pa.Array] = []
    first = 0
    parts = values.chunks[::-1]
    while parts:
        part = parts.pop()
        try:
            found.append(pa.nulls(len(part), kind) if part.null_count == len(part) else cast(part))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            if len(part) > 1:
                middle = len(part) // 2
                parts += [part.slice(middle), part.slice(0, middle)]
                continue
            if len(misfits) == MOST_MISFITS:
                raise pa.ArrowInvalid(f"more than {MOST_MISFITS:,} values") from None
            misfits.append(first)
            found.append(pa.nulls(1, kind))
        first += len(part)
    return found, misfits


def is_readable(kind: pa.DataType, is_text: bool) -> bool:
    """Return whether values of files can be cast to a type."""
    if not is_text and pa.types.is_nested(kind) and not pa.types.is_map(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return all(is_readable(each.type, is_text) for each in fields)
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
    is_empty = pc.equal(values, "")
    return pc.if_else(is_empty, None, values) if pc.any(is_empty).as_py() else values


def _match_any(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


def _are_exact(texts: pa.Array, numbers: pa.Array) -> bool:
    """Return whether doubles hold all digits of the texts that they were made of."""
    is_usual = pc.and_(pc.greater(pc.abs(numbers), _SMALLEST), pc.is_finite(numbers))
    is_short = pc.less_equal(pc.binary_length(texts), _SURE_DIGITS)
    is_sure = pc.or_(pc.and_(is_usual, is_short), pc.equal(numbers.cast(pa.string()), texts))
    return all(map(_is_exact, texts.filter(pc.invert(is_sure)).unique().to_pylist()))


def _is_exact(text: str) -> bool:
    """Return whether a double, printed with as many digits as a text has, is that text."""
    digits = text.lower().partition("e")[0].replace(".", "").lstrip("-0")
    if not digits.isdigit():  # zero, or a word
        return True
    printed = f"{abs(float(text)):.{len(digits) - 1}e}"
    return printed.partition("e")[0].replace(".", "") == digits


def _parsed(values: pa.Array, form: str, kind: pa.DataType) -> pa.Array:
    """Convert texts by a format of Python's `strptime`: Arrow's takes 31 February for 2 March."""
    encoded = values.dictionary_encode()
    times = [datetime.strptime(text, form) for text in encoded.dictionary.to_pylist()]
    if pa.types.is_date(kind) and any(each.time() != time.min for each in times):
        raise pa.ArrowInvalid("a date has a time")
    exact = pa.array(times, pa.timestamp("us", getattr(kind, "tz", None)))
    return exact.cast(kind).take(encoded.indices)
