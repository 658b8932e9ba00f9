"""Which columns identify a stage's rows, and how stages whose rows differ are put side by side.

A row's first key is its id. The others are the ids of the rows that it was made from, up to the
source's, so that each row leads back by what it carries itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.specs import SOURCE, JoinSpec, MapBatchesSpec, StageSpec


@dataclass(frozen=True)
class Key:
    """A column that identifies rows of `origin`: the source, or a stage that makes many of one."""

    column: str
    origin: str


Keys = tuple[Key, ...]


@dataclass(frozen=True)
class Side:
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
    sides: tuple[Side, ...]


def stage_keys(spec: StageSpec, above: Mapping[str, Keys], culprit: str) -> Keys:
    """The keys of a stage's rows.

    Args:
        spec: The stage.
        above: The keys of what it reads.
        culprit: The stage, for messages.

    Raises:
        DefinitionError: If a join's stages have no rows in common, or a new id's name is taken.
    """
    if isinstance(spec, JoinSpec):
        return above[join_shape(spec, above, culprit).base]
    first = above[spec.upstream[0]]
    if not isinstance(spec, MapBatchesSpec) or spec.children is None:
        return first
    id, parent = spec.children
    taken = {key.column for key in first} | {parent}
    if id in taken or parent in {key.column for key in first[1:]}:
        raise DefinitionError(
            f"{culprit}: id={id!r} and parent_id={parent!r}, but a row has {names(taken)} already; "
            "give the new id a name of its own"
        )
    return (Key(id, spec.name), Key(parent, first[0].origin), *first[1:])


def join_shape(spec: JoinSpec, keys: Mapping[str, Keys], culprit: str) -> JoinShape:
    """How a join's stages fit together.

    Raises:
        DefinitionError: If they do not.
    """
    stages = [node for node in spec.upstream if node != SOURCE]
    depths = {len(keys[node]) for node in stages}
    if len(depths) > 1 and spec.children is None:
        ids = {node: keys[node][0].column for node in stages}
        raise DefinitionError(
            f"{culprit}: joins stages with different ids, {ids}; say children='rows' for one row a "
            "child, or children='list' for one row a parent with a list of its children"
        )
    as_lists = spec.children == "list" and len(depths) > 1
    depth = min(depths) if as_lists else max(depths)
    base = next(node for node in stages if len(keys[node]) == depth)
    if spec.how == "left" and base != stages[0]:
        raise DefinitionError(
            f"{culprit}: a left join keeps the rows of its first stage, {stages[0]!r}, but there "
            f"is one row for each of {base!r}; name {base!r} first"
        )
    sides = [_side(node, keys, base, as_lists, culprit) for node in spec.upstream if node != base]
    return JoinShape(base, keys[base][0].column, tuple(sides))


def _side(node: str, keys: Mapping[str, Keys], base: str, as_lists: bool, culprit: str) -> Side:
    own, ours = keys[node], keys[base]
    deep, flat = (own, ours) if len(own) > len(ours) else (ours, own)
    shared = deep[len(deep) - len(flat) :]
    if [key.origin for key in shared] != [key.origin for key in flat]:
        raise DefinitionError(
            f"{culprit}: {node!r} is keyed by {own[0].column!r} of {own[0].origin!r} and {base!r} "
            f"by {ours[0].column!r} of {ours[0].origin!r}: neither was made from the other. Join "
            "each with the stage above both"
            + ("" if as_lists else ", or return to it with children='list'")
        )
    if deep is own and len(own) > len(ours):
        known = own[len(own) - len(ours) :]
        return Side(node, own[0].column, known[0].column, tuple(k.column for k in known), node)
    return Side(node, own[0].column, shared[0].column, tuple(key.column for key in own))
