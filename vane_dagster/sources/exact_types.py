"""Types of text that are read without loss.

DuckDB's readers round 1.5 to a BIGINT, drop the time of a DATE and the offset of a TIMESTAMP.
So such values are read as text, and Arrow converts them, which accepts exact ones alone. What Arrow
refuses, DuckDB converts, if the result is equal to the text. Of floats, decimal fractions are
rounded to the nearest value; whole numbers that have none, and numbers out of range, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.types.schema import sql_name
from vane_dagster.types.sql import literal

Connect = Callable[[], duckdb.DuckDBPyConnection]

_CLOCK = r"\s*\d{1,2}:\d{1,2}(:\d{1,2}(\.\d+)?)?(Z|\+00(:00)?)?\s*"
_WHOLE_NUMBER = r"^[+-]?\d+$"
_INFINITY = r"(?i)^[+-]?inf(inity)?$"
_FRACTION_DIGITS = {"us": 6, "ns": 9}


class InexactError(ValueError):
    """A value does not fit the type of its column.

    Attributes:
        column: The column.
        kind: Its type.
    """

    def __init__(self, column: str, kind: pa.DataType) -> None:
        super().__init__(column)
        self.column, self.kind = column, kind


class _Misfit(ValueError):
    """A value does not fit its type."""


@dataclass(frozen=True)
class Formats:
    """Formats of dates and timestamps for `strptime`; None for the ISO format.

    Timestamps with a time zone are in the ISO format unless the format has one too.
    """

    date: str | None = None
    timestamp: str | None = None

    def of(self, kind: pa.DataType) -> str | None:
        """Return the format of a type."""
        if pa.types.is_date(kind):
            return self.date
        if not pa.types.is_timestamp(kind) or self.timestamp is None:
            return None
        return None if kind.tz and not _type_of(self.timestamp).tz else self.timestamp

    def inferred(self, kind: pa.DataType) -> pa.DataType:
        """Return the type of a column in which DuckDB found a type by these formats."""
        is_naive = pa.types.is_timestamp(kind) and kind.tz is None
        return _type_of(self.timestamp) if is_naive and self.timestamp is not None else kind


def raw_type(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings in place of the types that are converted exactly."""
    if pa.types.is_list(kind):
        return pa.list_(raw_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(raw_type(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, raw_type(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(raw_type(kind.key_type), raw_type(kind.item_type))
    tests = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_temporal,
    )
    return pa.string() if any(test(kind) for test in tests) else kind


def convert(
    table: pa.Table, schema: pa.Schema, connect: Connect, formats: Formats = Formats()
) -> pa.Table:
    """Convert columns that were read in their raw types.

    Args:
        table: The rows.
        schema: The columns, with their types.
        connect: Returns a DuckDB connection in UTC.
        formats: The formats of dates and timestamps.

    Raises:
        InexactError: If a value does not fit.
    """
    converter = _Converter(connect, formats)
    columns = []
    for field in schema:
        try:
            chunks = [converter.exact(c, field.type) for c in table.column(field.name).chunks]
        except _Misfit:
            raise InexactError(field.name, field.type) from None
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.table(columns, schema=schema)


@dataclass(frozen=True)
class _Converter:
    """Converts arrays of texts, at any depth.

    Attributes:
        connect: Returns a DuckDB connection in UTC.
        formats: The formats of dates and timestamps.
    """

    connect: Connect
    formats: Formats

    def exact(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        """Return an array in a type.

        Args:
            values: The values; nested ones begin at offset 0.
            kind: The type.

        Raises:
            _Misfit: If a value does not fit.
        """
        if values.type == kind:
            return values
        if children := _children(values, kind):
            converted = [self.exact(child, child_kind) for child, child_kind in children]
            if pa.types.is_map(kind):
                pair = [kind.key_field, kind.item_field]
                converted = [pa.StructArray.from_arrays(converted, fields=pair)]
            shape = values.buffers()[: 1 if pa.types.is_struct(kind) or _is_fixed(kind) else 2]
            return pa.Array.from_buffers(kind, len(values), shape, children=converted)
        if pa.types.is_floating(kind):
            return _floats(values, kind)
        return self._converted(values, kind)

    def _converted(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        form = self.formats.of(kind)
        if form is None:
            try:
                return values.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                casted = f"TRY_CAST(x AS {sql_name(kind)})"
                equal = _equal(kind)
        else:
            casted = f"TRY_CAST({_parsed(form)} AS {sql_name(kind)})"
            equal = _equal_by_format(kind, form)
        if equal is None or values.type != pa.string():
            raise _Misfit from None
        fits = f"x IS NULL OR coalesce({casted} IS NOT NULL AND {equal}, false)"
        rows = self.connect().from_arrow(pa.table({"x": values}))
        made = rows.project(f"{casted} AS y, {fits} AS fits").to_arrow_table()
        if not pc.all(made.column("fits"), min_count=0).as_py():
            raise _Misfit
        return made.column("y").cast(kind).combine_chunks()


def _children(values: pa.Array, kind: pa.DataType) -> Sequence[tuple[pa.Array, pa.DataType]]:
    """Return the values inside nested ones, with the types wanted. Arrays begin at offset 0."""
    if pa.types.is_list(kind) or _is_fixed(kind):
        return [(values.values, kind.value_type)]
    if pa.types.is_struct(kind):
        return [(values.field(place), field.type) for place, field in enumerate(kind)]
    if pa.types.is_map(kind):
        return [(values.keys, kind.key_type), (values.items, kind.item_type)]
    return []


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _equal(kind: pa.DataType) -> str | None:
    """Return the SQL condition that a text `x` is exactly a value of a type; None if unknown.

    It holds for texts that DuckDB converts.
    """
    name = sql_name(kind)
    if pa.types.is_boolean(kind):
        return "true"
    if pa.types.is_integer(kind):
        is_equal = f"TRY_CAST(x AS DECIMAL(38, 18)) = TRY_CAST(x AS {name})"
        return f"{is_equal} AND {_has_digits(18)} AND NOT regexp_matches(x, '[eE]-')"
    if pa.types.is_time(kind):
        is_clock = f"regexp_full_match(x, '{_CLOCK}')"
        is_day = f"TRY_CAST(x AS {name}) < TIME '24:00:00'"
        return f"{is_clock} AND {is_day} AND {_has_digits(_FRACTION_DIGITS[kind.unit])}"
    if pa.types.is_date(kind):
        is_day = "TRY_CAST(x AS TIMESTAMPTZ) = TRY_CAST(x AS DATE)::TIMESTAMP::TIMESTAMPTZ"
        return f"{is_day} AND {_has_digits(6)} AND isfinite(TRY_CAST(x AS DATE))"
    if pa.types.is_timestamp(kind):
        is_time = f"{_has_digits(_FRACTION_DIGITS[kind.unit])} AND isfinite(TRY_CAST(x AS {name}))"
        in_utc = "TRY_CAST(x AS TIMESTAMPTZ) = TRY_CAST(x AS TIMESTAMP)::TIMESTAMPTZ"
        return is_time if kind.tz else f"{is_time} AND {in_utc}"
    return None


def _parsed(form: str) -> str:
    """Return the SQL expression of a text `x` that is parsed by a format."""
    return f"try_strptime(x, {literal(form)})"


def _type_of(form: str) -> pa.DataType:
    """Return the type of what `strptime` finds by a format."""
    directives = set(re.findall("%-?(.)", form))
    if directives & {"z", "Z"}:
        return pa.timestamp("us", "UTC")
    return pa.timestamp("ns" if "n" in directives else "us")


def _equal_by_format(kind: pa.DataType, form: str) -> str:
    """Return the SQL condition that a type holds what a format finds in a text `x`.

    Args:
        kind: A type of dates or timestamps.
        form: The format.
    """
    found = _type_of(form)
    if found.tz and not (pa.types.is_timestamp(kind) and kind.tz):
        return "false"
    casted = f"TRY_CAST({_parsed(form)} AS {sql_name(kind)})"
    return f"TRY_CAST({casted} AS {sql_name(found)}) = {_parsed(form)}"


def _has_digits(most: int) -> str:
    """Return the SQL condition that the fraction of a text `x` has at most so many digits."""
    return f"NOT regexp_matches(x, '\\.\\d{{{most}}}\\d*[1-9]')"


def _floats(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert texts to floats, without DuckDB, which reads 1_000_000_000_000_000 as 1.0."""
    texts = pc.utf8_trim_whitespace(values)
    try:
        made = texts.cast(kind)
    except pa.ArrowInvalid:
        raise _Misfit from None
    if not _holds_whole_numbers(texts, made):
        raise _Misfit
    return made


def _holds_whole_numbers(texts: pa.Array, values: pa.Array) -> bool:
    """Return whether floats equal their texts, as far as these are whole numbers or infinite.

    Args:
        texts: The texts.
        values: The nearest floats.
    """
    limit = 2.0**53 if pa.types.is_float64(values.type) else 2.0**24  # lower ones are all exact
    large = pc.greater_equal(pc.abs(values), pa.scalar(limit, values.type))
    if not large.true_count:
        return True
    texts, values = texts.filter(large), values.filter(large)
    is_finite = pc.is_finite(values)
    if not pc.all(pc.or_(is_finite, pc.match_substring_regex(texts, _INFINITY))).as_py():
        return False
    whole = pc.and_(is_finite, pc.match_substring_regex(texts, _WHOLE_NUMBER))
    pairs = zip(texts.filter(whole).to_pylist(), values.filter(whole).to_pylist())
    return all(int(text) == value for text, value in pairs)
