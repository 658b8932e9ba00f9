"""Output helpers shared by the commands of ``vane-dagster``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; line breaks and control characters are escaped."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in cells)
    return "\n".join(lines)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def joined(values: Iterable[object]) -> str:
    """Join the distinct values, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"
