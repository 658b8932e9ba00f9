"""The columns that identify a stage's rows, and how a join matches stages with different rows.

A row's first key is its id. The other keys are the ids of the rows that it was made from, up to
the source. A row can therefore be traced back by its own columns alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IdColumn:
    """A column that identifies rows of `origin`: the source, or a stage with a fan-out."""

    column: str
    origin: str


Keys = tuple[IdColumn, ...]


@dataclass(frozen=True)
class JoinSide:
    """How a join matches a node's rows with the rows of its base.

    Attributes:
        node: The stage, or the source.
        id: Its id column, which the base has too. For a list, its rows have the base's id.
        known: Its key columns that the base has too.
        label: Name of the list column; None if at most one row matches a base row.
    """

    node: str
    id: str
    known: tuple[str, ...]
    label: str | None = None


@dataclass(frozen=True)
class JoinShape:
    """A join's base, which determines the output rows, and the nodes that are matched with it.

    Attributes:
        base: The stage that determines the output rows.
        id: Its id column.
        sides: The other nodes.
    """

    base: str
    id: str
    sides: tuple[JoinSide, ...]
