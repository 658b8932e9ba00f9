"""The kinds of stages: one class each, with all logic that depends on the kind.

A spec is a frozen description of one stage, created and validated by a method of `Rows`. Callers
query it (`spec.may_filter`, `spec.components(pipeline)`) instead of testing its class. Where only
one kind has the attribute that they need, they test `runs_udf` or `publishes`, which type checkers
narrow. What a kind does in workers is in `operation`, `engine/tasks.py`, because `worker/` is a
later layer than declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Union

import pyarrow as pa

from vane_dagster._arguments import unexpected
from vane_dagster._keywords import require_columns
from vane_dagster.errors import DefinitionError, SchemaError, names
from vane_dagster.pipeline.identity import component
from vane_dagster.pipeline.keys import JoinShape, JoinSide, Keys
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.options import COST, TOKENS, IncludeColumns, JoinChildren, JoinHow
from vane_dagster.pipeline.stage_kind import (
    SOURCE,
    Column,
    StageKind,
    Table,
    check_id,
    named_in,
    with_upstream,
)
from vane_dagster.pipeline.texts import texts_of
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.publish.registry import open_publisher
from vane_dagster.storage.publish.target import Target
from vane_dagster.types import sql

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline
    from vane_dagster.storage.publish.base import Publisher


@dataclass(frozen=True)
class ProjectSpec(StageKind):
    """Columns and a filter in SQL, executed by DuckDB.

    Attributes:
        columns: Output column and SQL expression, in order.
        where: The filter as an SQL condition; None for all rows.
        include: Further input columns that pass through unchanged; True for all.
    """

    columns: tuple[tuple[str, str], ...]
    where: str | None = None
    include: IncludeColumns = ()

    kind = "project"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[False]] = False

    @property
    def may_filter(self) -> bool:
        """True if there is a condition."""
        return self.where is not None

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """DuckDB's types for expressions, and the input's types for columns that pass through."""
        location, upstream = pipeline._location(self.name), self.upstream[0]
        first = inputs[upstream]
        pairs = self._pairs(first.fields)
        fields: dict[str, pa.Field | None]
        if (given := first.schema) is not None:
            owner = f"{location}: include_columns: {upstream!r}"
            require_columns(owner, named_in(self.include), given.names)
            try:
                schema = sql.bind(pairs, self.where, given, location)
            except SchemaError as error:
                note = pipeline.source._types_note if upstream == SOURCE else ""
                raise SchemaError(f"{error}{note}") from None
            check_id(location, pipeline._key_columns(self.name)[0], schema)
            fields = dict(zip(schema.names, schema))
        else:
            fields = {name: None for name, _ in pairs}
        reads = {}
        for name, expression in pairs:
            named = {other.lower() for other in sql.referenced_columns(expression, self.name)}
            reads[name] = [(upstream, each) for each in first.fields if each.lower() in named]
        return Table(fields, reads, self.include is not True or first.is_complete)

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """Empty if no column is computed; None otherwise, since DuckDB determines the types."""
        only_names = all(sql.plain_column(each, self.name) for _, each in self.columns)
        return pa.schema([]) if only_names else None

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, and the columns that the expressions and the condition name."""
        if self.include is True:
            return None
        texts = [expression for _, expression in self._pairs(schema.names)]
        texts += [self.where] if self.where else []
        named = {n.lower() for text in texts for n in sql.referenced_columns(text, self.name)}
        return tuple(name for name in schema.names if name in ids or name.lower() in named)

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The expressions as they are written."""
        return [
            *(component("column", name, text) for name, text in self.columns),
            component("option", "where", self.where),
            component("option", "include_columns", self.include),
        ]

    def texts(self, pipeline: Pipeline) -> Mapping[str, str]:
        """The expressions."""
        return texts_of({"where": self.where or ""}, column=dict(self.columns))

    def _pairs(self, columns: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return all columns with their expressions."""
        made = {name.lower() for name, _ in self.columns}
        included = columns if self.include is True else self.include
        passed = [(name, sql.quote(name)) for name in included if name.lower() not in made]
        return (*self.columns, *passed)


@dataclass(frozen=True)
class JoinSpec(StageKind):
    """Stages of one pipeline, joined by id.

    Attributes:
        how: Whether the base's rows without a match are dropped ("inner") or kept ("left").
        children: How rows that were made from the same row are joined.
        columns: Output and input columns of the nodes from which only some columns are taken.
    """

    how: JoinHow
    children: JoinChildren | None = None
    columns: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    kind = "join"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[False]] = False

    @property
    def may_filter(self) -> bool:
        """True for an inner join, which drops rows that another stage does not have."""
        return self.how == "inner"

    def base_node(self, pipeline: Pipeline) -> str:
        """The stage that determines the output rows."""
        return self.shape(pipeline).base

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """The keys of its base."""
        return pipeline._keys_of(self.base_node(pipeline))

    def shape(self, pipeline: Pipeline) -> JoinShape:
        """Return how its stages are matched."""
        location = pipeline._location(self.name)
        keys = {node: pipeline._keys_of(node) for node in self.upstream}
        stages = [node for node in self.upstream if node != SOURCE]
        depths = {len(keys[node]) for node in stages}
        if len(depths) > 1 and self.children is None:
            ids = {node: keys[node][0].column for node in stages}
            raise DefinitionError(
                f"{location}: joins stages with different ids, {ids}; pass children='rows' for one "
                "row per child, or children='list' for one row per parent with a list of children"
            )
        as_lists = self.children == "list" and len(depths) > 1
        depth = min(depths) if as_lists else max(depths)
        base = next(node for node in stages if len(keys[node]) == depth)
        if self.how == "left" and base != stages[0]:
            raise DefinitionError(
                f"{location}: a left join keeps the rows of its first stage, {stages[0]!r}, but "
                f"the result has one row for each row of {base!r}; pass {base!r} first"
            )
        sides = [
            _side(node, keys, base, as_lists, location) for node in self.upstream if node != base
        ]
        return JoinShape(base, keys[base][0].column, tuple(sides))

    def quarantining(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """Map each list of a left join to the stages with quarantined rows that would add children.

        The quarantined rows of these stages distinguish a row without children from a row with
        unknown children.
        """
        if self.how != "left" or self.children != "list":
            return {}
        shape = self.shape(pipeline)
        known = with_upstream(pipeline, shape.base)
        stages = {}
        for side in shape.sides:
            if side.label is not None:
                way = with_upstream(pipeline, side.node) - known
                stages[side.node] = [
                    s.name for s in pipeline if s.name in way and s.spec.quarantines
                ]
        return stages

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """The columns taken from each stage; children as lists of structs, if declared so."""
        location, shape = pipeline._location(self.name), self.shape(pipeline)
        base = inputs[shape.base].fields
        sides = {side.node: side for side in shape.sides}
        ids = pipeline._key_columns(shape.base)
        fields = {id: base.get(id) for id in ids}
        reads = {id: [(shape.base, id)] for id in ids}
        for node, table in inputs.items():
            side = sides.get(node)
            if side is not None:
                id = shape.id if side.label else side.id
                ours, theirs = base.get(id), table.fields.get(id)
                if ours is not None and theirs is not None and ours.type != theirs.type:
                    raise SchemaError(
                        f"{location}: the id {id!r} is {ours.type} in {shape.base!r} and "
                        f"{theirs.type} in {node!r}; materialize both again from the same source"
                    )
            known = side.known if side else ids
            pairs = self.columns.get(node, [(name, name) for name in table.fields])
            chosen = [(n, c) for n, c in pairs if not (n == c and c in known)]
            if table.is_complete:
                require_columns(f"{location}: {node!r}", [c for _, c in chosen], table.fields)
            taken: dict[str, pa.Field | None] = {}
            for name, column in chosen:
                given = table.fields.get(column)
                taken[name] = None if given is None else given.with_name(name)
            read = {name: [(node, column)] for name, column in chosen}
            if side is not None and side.label is not None:
                keys = pipeline._key_columns(node)
                own = {key: table.fields.get(key) for key in keys if key not in side.known}
                element = Table(own | taken | own).schema
                kind = None
                if element is not None:
                    kind = pa.field(side.label, pa.list_(pa.struct(list(element))))
                columns = dict.fromkeys([side.id, *(column for _, column in chosen)])
                taken, read = {side.label: kind}, {side.label: [(node, c) for c in columns]}
            if twice := [name for name in taken if name in fields]:
                renamed = {f"{node}_{name}" if name in twice else name: c for name, c in chosen}
                mapping = {node: renamed}
                raise SchemaError(
                    f"{location}: column {twice[0]!r} comes from both {reads[twice[0]][0][0]!r} "
                    f"and {node!r}; name the columns to take: columns={mapping}"
                )
            fields |= taken
            reads |= read
        is_complete = all(node in self.columns or inputs[node].is_complete for node in inputs)
        return Table(fields, reads, is_complete)

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """None for a left join: any row may lack a counterpart, and so have nulls."""
        return None if self.how == "left" else pa.schema([])

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, and the columns that are taken."""
        if upstream not in self.columns:
            return None
        return tuple(dict.fromkeys((*ids, *(column for _, column in self.columns[upstream]))))

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The columns taken from each stage. Lists count by the name of their stage."""
        has_null_lists = any(self.quarantining(pipeline).values())
        chosen = [self.columns.get(node) for node in self.upstream]
        lists = self.upstream if self.children == "list" else ()
        return [
            component("option", "how", self.how),
            component("option", "children", self.children, lists, has_null_lists),
            component("option", "columns", chosen),
        ]


@dataclass(frozen=True)
class WriteSpec(StageKind):
    """A stage that publishes its rows where any tool can read them.

    Attributes:
        target: The declared target.
        provenance: The stage whose making of each row is added to it; empty for none.
        branch_target: The target in a branch store. No part of the definition, so that a branch
            publishes only what it changes.
    """

    target: Target
    provenance: str = ""
    branch_target: Target | None = None

    kind = "write"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[True]] = True

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """The input columns, unchanged, and the provenance of the rows."""
        first = inputs[self.upstream[0]]
        reads = {name: [(self.upstream[0], name)] for name in first.fields}
        added = _provenance_fields(pipeline, self.provenance)
        if taken := [name for name in added if name in first.fields]:
            raise SchemaError(
                f"{pipeline._location(self.name)}: provenance adds {names(taken)}, which the rows "
                "have already; rename these columns in a project"
            )
        fields, none = {**first.fields, **added}, {name: list[Column]() for name in added}
        return Table(fields, reads | none, first.is_complete)

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The target and its write options."""
        target = self.target
        return [
            component("option", "target", target.url),
            component("option", "compression", target.compression),
            component("option", "format", target.format),
            component("option", "target_file_bytes", target.target_bytes),
            component("option", "partition_column", target.partition_column),
            *(component("option", *option) for option in sorted(target.options.items())),
            *([component("option", "provenance", self.provenance)] if self.provenance else []),
        ]

    @property
    def published_in(self) -> Target:
        """The target of runs with the present store."""
        return self.branch_target or self.target

    def publisher(self, partition: str | None) -> Publisher:
        """Return the publisher of a partition."""
        return open_publisher(self.published_in, partition)


_PROVENANCE = {
    "_vane_outcome": pa.string(),
    "_vane_run": pa.string(),
    "_vane_model": pa.string(),
    "_vane_code": pa.string(),
    "_vane_at": pa.timestamp("us", "UTC"),
}


def _provenance_fields(pipeline: Pipeline, stage: str) -> dict[str, pa.Field | None]:
    """Return the columns that the provenance of a stage's rows has."""
    if not stage:
        return {}
    usage = pipeline[stage].spec.usage
    known = dict(_PROVENANCE)
    known |= {} if usage is None else {TOKENS: pa.int64()}
    known |= {COST: pa.float64()} if usage is not None and usage.prices else {}
    return {name: pa.field(name, kind) for name, kind in known.items()}


def provenance_stage(pipeline: Pipeline, node: str, given: bool | str, location: str) -> str:
    """Return the stage that an argument `provenance` of a stage below `node` means."""
    if given is False:
        return ""
    nearest, stages = [node], []
    while nearest:
        stage = nearest.pop(0)
        spec = None if stage == SOURCE else pipeline[stage].spec
        if spec is not None and spec.runs_udf:
            stages += [stage] if stage not in stages else []
        elif spec is not None:
            nearest += spec.upstream
    keys = {*pipeline._key_columns(node)}
    ids = {each: pipeline._key_columns(pipeline[each].spec.upstream[0])[0] for each in stages}
    usable = [each for each in stages if ids[each] in keys]
    if isinstance(given, str) and given in usable:
        return given
    if given is True and len(usable) == 1:
        return usable[0]
    known = names(usable, 20) if usable else "none: no stage with a function makes its rows"
    expected = f"the name of the stage that made the rows, of {known}"
    raise unexpected(location, "provenance", given, expected)


StageSpec = Union[ProjectSpec, MapBatchesSpec, JoinSpec, WriteSpec]


def _side(
    node: str, keys: Mapping[str, Keys], base: str, as_lists: bool, location: str
) -> JoinSide:
    own, ours = keys[node], keys[base]
    flat, deep = sorted((own, ours), key=len)
    if deep[len(deep) - len(flat) :] != flat:
        raise DefinitionError(
            f"{location}: {node!r} is keyed by {own[0].column!r} of {own[0].origin!r} and {base!r} "
            f"by {ours[0].column!r} of {ours[0].origin!r}: neither was made from the other. Join "
            "each with the upstream stage of both"
            + ("" if as_lists else ", or return to it with children='list'")
        )
    known = tuple(key.column for key in flat)
    return JoinSide(node, own[0].column, known, node if len(own) > len(ours) else None)
