"""Output helpers shared by the commands of ``vane-dagster``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def joined(values: Iterable[object]) -> str:
    """Join the distinct values, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"
