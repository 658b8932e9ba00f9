"""Which columns identify a stage's rows, and how stages whose rows differ are put side by side.

A row's first key is its id. The others are the ids of the rows that it was made from, up to the
source's, so that each row leads back by what it carries itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IdColumn:
    """A column that identifies rows of `origin`: the source, or a stage that makes many of one."""

    column: str
    origin: str


Keys = tuple[IdColumn, ...]


@dataclass(frozen=True)
class JoinSide:
    """How a node's rows are put beside those of a join's base.

    Attributes:
        node: The stage, or the source.
        id: Its id column.
        match: The base's column that holds this id. For a list: this node's column that holds the
            base's id.
        known: Its key columns that the base has too.
        label: Name of the list column; None for one row beside one.
    """

    node: str
    id: str
    match: str
    known: tuple[str, ...]
    label: str | None = None


@dataclass(frozen=True)
class JoinShape:
    """A join's base, whose rows are kept and counted, and what comes beside them.

    Attributes:
        base: The node.
        id: Its id column.
        sides: The others.
    """

    base: str
    id: str
    sides: tuple[JoinSide, ...]
