"""The types of text: which one all values of a column have, and strict casts of text to a type.

A column has a type only if no value is changed by it: `007`, `+5` and whole numbers of more than 64
bits are text, and so are fractions beside whole numbers of more than 15 digits. A fraction is the
nearest double. Dates and timestamps are in
the ISO format, or in the one that is declared; they are never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time

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
_TIME = re.compile("%[HIcXTRs]")


@dataclass(frozen=True)
class TextTypes:
    """The forms of values in text.

    Attributes:
        date_formats: The formats of dates and timestamps as of `strptime`; ISO without one.
        decimal_separator: "." or ",".
    """

    date_formats: Sequence[str] = ()
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
        texts = _trimmed(values).drop_null()
        if not len(texts):
            return pa.nulls(0)
        tried = (self._tried(texts, kind) for kind in kinds)
        return next((found for found in tried if found is not None), values)

    def cast(self, values: pa.Array, kind: pa.DataType, is_found: bool = False) -> pa.Array:
        """Convert texts to a type; empty ones are null, unless they are to be texts."""
        if pa.types.is_string(kind):
            return values
        cast = self._shown if is_found and kind in _KINDS else self._cast
        return cast(_trimmed(values), kind)

    def _cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        if form := self._format(kind):
            return _parsed(values, form, kind)
        found = self._numbers(values, kind).cast(kind)
        if pa.types.is_floating(kind) and _match_any(values.filter(pc.is_inf(found)), "[0-9]"):
            raise pa.ArrowInvalid("a number is too large")
        if pa.types.is_integer(kind) and _match_any(values, "[xX]"):
            raise pa.ArrowInvalid("a value is hexadecimal")
        return found

    def _shown(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        """Convert texts to a type that each of them has."""
        texts, found = self._numbers(values, kind), self._cast(values, kind)
        if pa.types.is_integer(kind):  # `007` and `+7` are no numbers
            is_shown = found.cast(pa.string()).equals(values)
        else:
            matches = pc.match_substring_regex(texts, _KINDS[kind])
            is_shown = pc.all(matches, min_count=0).as_py()
        if not is_shown:
            raise pa.ArrowInvalid("a value has another type")
        return found

    def _tried(self, values: pa.Array, kind: pa.DataType) -> pa.Array | None:
        try:
            return self._shown(values, kind)
        except (pa.ArrowInvalid, ValueError):
            return None

    def _format(self, kind: pa.DataType) -> str | None:
        """Return the declared format of a type; None for ISO."""
        for form in self.date_formats:
            has_time, has_zone = _TIME.search(form), "%z" in form
            if pa.types.is_timestamp(kind) and has_time and has_zone == bool(kind.tz):
                return form
            if pa.types.is_date(kind) and not has_time:
                return form
        return None

    def _numbers(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        """Return texts of numbers with a point as the decimal separator."""
        has_point = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        if self.decimal_separator == "." or not has_point:
            return values
        if _match_any(values, r"\."):
            raise pa.ArrowInvalid("a value has a decimal point")
        return pc.replace_substring(values, ",", ".")


def cast_each(
    values: pa.ChunkedArray, kind: pa.DataType, cast: Callable[[pa.Array], pa.Array]
) -> tuple[list[pa.Array], list[int]]:
    """Cast the values of a column; those that do not fit become null."""
    found: list[pa.Array] = []
    misfits: list[int] = []

    def add(part: pa.Array, first: int) -> None:
        is_null = part.null_count == len(part)
        try:
            found.append(pa.nulls(len(part), kind) if is_null else cast(part))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            if middle := len(part) // 2:
                add(part.slice(0, middle), first)
                add(part.slice(middle), first + middle)
            else:
                found.append(pa.nulls(1, kind))
                misfits.append(first)

    first = 0
    for chunk in values.chunks:
        add(chunk, first)
        first += len(chunk)
    return found, misfits


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


def _parsed(values: pa.Array, form: str, kind: pa.DataType) -> pa.Array:
    """Convert texts by a format of Python's `strptime`: Arrow's takes 31 February for 2 March."""
    encoded = values.dictionary_encode()
    times = [datetime.strptime(text, form) for text in encoded.dictionary.to_pylist()]
    if pa.types.is_date(kind) and any(each.time() != time.min for each in times):
        raise pa.ArrowInvalid("a date has a time")
    exact = pa.array(times, pa.timestamp("us", getattr(kind, "tz", None)))
    return exact.cast(kind).take(encoded.indices)
