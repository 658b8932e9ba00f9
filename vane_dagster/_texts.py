"""Counts, rates, times and lists as text."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from html import escape

SHOWN = 3
"""The first of many texts that a line shows."""
_NUMBER = re.compile(r"[a-f]*\d[0-9a-f.,]*")
"""A number, a digest or an address."""


class Printed:
    """A result that notebooks and consoles show as its text."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return str(self)


def in_partition(key: str | None) -> str:
    """Return a partition's key for a message that names its stage; empty without one."""
    return "" if key is None else f", partition {key!r}"


def in_partitions(keys: Sequence[str | None]) -> str:
    """Return the number of partitions and the first ones: ``2 partitions (a, b)``."""
    return f"{count(len(keys), 'partition')} ({listed([str(key) for key in keys])})"


def listed(texts: Sequence[str], most: int = SHOWN, separator: str = ", ") -> str:
    """Join the first texts, and the number of the others: ``a, b and 3 more``."""
    last = f"{' ' if separator == ', ' else separator}and {len(texts) - most:,} more"
    return separator.join(texts[:most]) + (last if len(texts) > most else "")


class EqualErrors:
    """Errors of partitions; those that differ in the partition and in numbers alone are equal."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, ...], dict[str | None, str]] = {}

    def add(self, key: str | None, text: str, *of: str) -> int:
        """Count an error of a partition; return the number of different ones, 0 if it is known."""
        kind = text
        if key is not None:
            kind = _NUMBER.sub("#", re.sub(rf"(?<=['\"/=]){re.escape(key)}(?!\w)", "#", text))
        equal = self._texts.setdefault((*of, kind), {})
        equal.setdefault(key, text)
        return len(self._texts) if len(equal) == 1 else 0

    def texts(self) -> list[str]:
        """Return the first of equal errors, after the partitions unless it names its only one."""
        texts = []
        for each in self._texts.values():
            (key, text), *others = each.items()
            where = f"{in_partitions([*each])}, the first" if others else in_partition(key)[2:]
            texts.append(text if where in text else f"{where}: {text}")
        return texts


def minute(at: float) -> str:
    """Format a Unix time in seconds as local time; ``-`` for 0."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "-"


def count(number: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 row`` or ``2,000 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(value: float, digits: int = 2) -> str:
    """Format a number without an exponent, with at least so many significant digits."""
    return f"{value:,.0f}" if value >= 10**digits else f"{Decimal(f'{value:.{digits}g}'):,f}"


def resource(name: str, quantity: float) -> str:
    """Format a quantity of a resource of Ray, such as ``2 CPU`` or ``1.5 GiB of memory``."""
    _, is_accelerator, accelerator = name.partition("accelerator_type:")
    if is_accelerator:  # each node has one, and each worker reserves a little of it
        return f"{'' if quantity else 'no '}accelerator type {accelerator}"
    if name == "memory":
        return f"{amount(quantity / 2**30)} GiB of memory"
    return f"{quantity:g} {name}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; line breaks and control characters are escaped."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in cells)
    return "\n".join(lines)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as a table in Markdown; the names of the first row are the header."""
    lines: list[list[object]] = [[*rows[0]], ["---"] * len(rows[0]), *([*r.values()] for r in rows)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(value: object) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(str(value).split()))


def rate(rows_per_second: float) -> str:
    """Format a throughput, such as ``0.25 rows/s``, ``4.2 rows/s`` or ``1,200 rows/s``."""
    digits = 0 if rows_per_second >= 10 else 1 if rows_per_second >= 1 else 2
    return f"{rows_per_second:,.{digits}f} rows/s"


def duration(seconds: float) -> str:
    """Format a time span in its main units: ``25 ms``, ``6.3 s``, ``45 s`` or ``3 min 20 s``."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
