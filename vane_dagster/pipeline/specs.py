"""The kinds of stages: one class each, which knows all that depends on the kind.

A stage is a frozen description of one node, made and validated by a method of `Rows`. Others ask it
(`spec.may_filter`, `spec.definition(pipeline)`) and do not test its class; where only one kind has
what they need, they ask `runs_udf` or `publishes`, which type checkers follow. What a kind does in
workers is registered in `engine/tasks.py`, as workers' operations come after declarations.
"""

from __future__ import annotations

import abc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

import pyarrow as pa

from vane_dagster.errors import CodeIdentityError, DefinitionError, SchemaError, names
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.constructor import ConstructorIdentity, constructor_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.objects import unwrapped
from vane_dagster.pipeline.identity import (
    call_arguments,
    constructor_arguments,
    environment,
    local_files,
)
from vane_dagster.pipeline.keys import JoinShape, Key, Keys, Side
from vane_dagster.pipeline.options import (
    AssetOptions,
    BatchFormat,
    Cardinality,
    Children,
    Failures,
    JoinHow,
    Resources,
    RowOrder,
    Upkeep,
)
from vane_dagster.pipeline.udf import Udf
from vane_dagster.storage.publish.base import Publisher, Target
from vane_dagster.storage.publish.registry import open_publisher
from vane_dagster.types import sql
from vane_dagster.types.schema import ERROR_COLUMN

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline

SOURCE = "source"
"""Name of the node that stands for a pipeline's source."""

Schemas = Mapping[str, pa.Schema]
"""Schemas by node."""
Types = dict[str, Union[pa.DataType, None]]
"""Columns and their types; None where only the source knows it."""
Column = tuple[str, str]
"""A node and one of its columns."""


@dataclass(frozen=True)
class StageKind(abc.ABC):
    """What all stages have in common; the answers are those of most kinds.

    Attributes:
        name: The stage's name.
        upstream: The nodes that it reads.
        asset: What its Dagster asset is given.
        kind: Name of the kind, in keys, manifests and Dagster.
        runs_udf: Whether it runs a user's code, or asks a model, in workers of a pool.
        publishes: Whether it ends a branch, and its rows are put where any tool reads them.
    """

    name: str
    upstream: tuple[str, ...]
    asset: AssetOptions

    kind: ClassVar[str]
    runs_udf: ClassVar[bool]
    publishes: ClassVar[bool]

    # Its rows.

    @property
    def makes_rows(self) -> bool:
        """Whether many rows may come of one, under new ids."""
        return False

    @property
    def may_filter(self) -> bool:
        """Whether it may leave rows out."""
        return False

    @property
    def fills_nulls(self) -> bool:
        """Whether columns may be null for want of a row."""
        return False

    @property
    def row_order(self) -> RowOrder | None:
        """In which order workers are best given its rows; None for the rows' own."""
        return None

    def base_node(self, pipeline: Pipeline) -> str:
        """The node whose rows its rows are."""
        return self.upstream[0]

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """The columns that identify its rows, the id first.

        Raises:
            DefinitionError: If a join's stages have no rows in common, or a new id's name is taken.
        """
        return pipeline.keys(self.upstream[0])

    def publisher(self, partition: str | None) -> Publisher | None:
        """What publishes a partition; None for a stage that publishes nothing."""
        return None

    # Rows that fail.

    @property
    def isolates_rows(self) -> bool:
        """Whether it sets single rows aside that fail or end their workers."""
        return False

    @property
    def quarantines(self) -> bool:
        """Whether rows that fail are kept beside its parts, and not in them."""
        return False

    @property
    def max_error_rate(self) -> float:
        """The share of a partition's rows that may fail."""
        return 0.0

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a call of a worker may take."""
        return None

    def quarantining(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """For each of its lists, the stages whose quarantined rows would lead to its elements."""
        return {}

    # Its columns.

    @abc.abstractmethod
    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The schema of its rows.

        Args:
            pipeline: The pipeline.
            inputs: The schemas of what it reads.

        Raises:
            SchemaError: If they do not fit.
        """

    @abc.abstractmethod
    def declared_types(self, pipeline: Pipeline, inputs: Mapping[str, Types]) -> Types:
        """Its columns, and the types that are known without the source.

        Args:
            pipeline: The pipeline.
            inputs: The same of what it reads; of the source there are none.
        """

    @abc.abstractmethod
    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """For each of its columns the columns that its values depend on.

        Args:
            pipeline: The pipeline.
            schemas: Schemas of the stage and of what it reads.

        Returns:
            From SQL and joins what is so; of a user's code what is declared, else all it reads.
        """

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """The columns of its schema whose values it makes, and does not pass on as they are."""
        return ()

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """The columns that it makes, where the declaration tells them all with their types."""
        return None

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The columns that it needs of an upstream; None for all.

        Args:
            upstream: The node.
            schema: The node's schema.
            ids: The node's key columns.
        """
        return None

    # What is keyed, counted and told of it.

    @abc.abstractmethod
    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """Everything about it that changes its results, beside kind and id, for fragment keys.

        Frozen: stores hold parts under these keys. See `planning.definition.stage_definition`.

        Raises:
            CodeIdentityError: If its code or an argument has no stable identity.
        """

    def code_digest(self) -> str:
        """Digest of the user's code of it alone, without the files that its values name.

        A run may change those itself, as where an argument names a folder that it writes to.
        """
        return ""

    @property
    def description(self) -> str | None:
        """What it does, for people."""
        return None

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """Fields of its struct columns that are added up for each part, among its measures."""
        return {}

    def used(self, measures: Mapping[str, Mapping[str, float]]) -> Counter[str]:
        """What rows used, by the names of `sums`.

        Args:
            measures: Measures of a part, or of many together, by column.
        """
        total: Counter[str] = Counter()
        for column, fields in self.sums.items():
            total.update({name: int(measures.get(column, {}).get(name, 0)) for name in fields})
        return total

    def over_budget(self, used: Mapping[str, int]) -> str | None:
        """Which budget of a run is used up, for people; None if none is.

        Args:
            used: What the run has used, by the names of `sums`.
        """
        return None

    def usage_metadata(self, used: Mapping[str, int], seconds: float | None) -> dict[str, Any]:
        """What a partition used, as metadata of its asset.

        Args:
            used: What it used, by the names of `sums`.
            seconds: How long it took; None where not all of it was computed in this run.
        """
        return {}


@dataclass(frozen=True)
class ProjectSpec(StageKind):
    """Columns and a filter in SQL, run by DuckDB."""

    columns: tuple[tuple[str, str], ...]
    where: str | None = None

    kind = "project"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[False]] = False

    @property
    def may_filter(self) -> bool:
        """Whether there is a condition."""
        return self.where is not None

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The types that DuckDB gives, and those of columns that pass through."""
        culprit = pipeline._culprit(self.name)
        schema = sql.bind(self.columns, self.where, inputs[self.upstream[0]], culprit)
        check_id(culprit, pipeline.keys(self.name)[0].column, schema)
        return schema

    def declared_types(self, pipeline: Pipeline, inputs: Mapping[str, Types]) -> Types:
        """The types of the expressions whose columns are all known."""
        given = {name: kind for name, kind in inputs[self.upstream[0]].items() if kind is not None}
        culprit, found = pipeline._culprit(self.name), Types()
        for name, expression in self.columns:
            none = sql.unused("none", sql.referenced_columns(expression, culprit))
            known = pa.schema(given or {none: pa.bool_()})  # SQL has no table without columns
            try:
                found[name] = sql.bind(((name, expression),), None, known, culprit).field(0).type
            except (SchemaError, DefinitionError):  # it needs a column whose type is not known
                found[name] = None
        return found

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """The columns that each expression names."""
        first, lineage = self.upstream[0], {}
        for name, expression in self.columns:
            named = {other.lower() for other in sql.referenced_columns(expression, self.name)}
            lineage[name] = [(first, n) for n in schemas[first].names if n.lower() in named]
        return lineage

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """Those that are more than a column of the input."""
        return tuple(
            name
            for name, expression in self.columns
            if sql.plain_column(expression, self.name) is None
        )

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """None are made, or their types are DuckDB's."""
        none = pa.schema([])
        return None if self.made_columns(pipeline, none) else none

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, and the columns that are named."""
        texts = [expression for _, expression in self.columns]
        texts += [self.where] if self.where else []
        named = {n.lower() for text in texts for n in sql.referenced_columns(text, self.name)}
        return tuple(name for name in schema.names if name in ids or name.lower() in named)

    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """The expressions, whose layout counts for nothing."""
        columns = [part for name, text in self.columns for part in (name, sql.tokens(text))]
        return [*columns, "where", None if self.where is None else sql.tokens(self.where)]


@dataclass(frozen=True)
class MapBatchesSpec(StageKind):
    """A user's function or class over batches.

    Attributes:
        auto_batch: Whether workers find the batch size, which is None then.
        env_vars: Names of environment variables that go to the workers, the keyed ones included.
        keyed_env_vars: Those whose values count in fragment keys.
        children: Where many rows come of one: the column of their new id, and the one with the id
            of the row that they come from.
        failures: What becomes of calls and rows that fail.
        upkeep: When its workers are given up, or made anew.
        reads: For output columns the input columns that they depend on, as the user declares.
        carried: Input columns that are passed on as they are.
        order: In which the workers are given a fragment's rows; None for their own. Only where
            `columns` says what they read.
    """

    udf: Udf
    schema: pa.Schema
    columns: tuple[str, ...] | None
    batch_format: BatchFormat
    batch_size: int | None
    auto_batch: bool
    cardinality: Cardinality
    concurrency: tuple[int, int] | None
    max_concurrency: int
    resources: Resources
    env_vars: tuple[str, ...]
    keyed_env_vars: tuple[str, ...] = ()
    children: tuple[str, str] | None = None
    failures: Failures = field(default_factory=lambda: Failures())
    upkeep: Upkeep = field(default_factory=Upkeep)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    order: RowOrder | None = None

    kind = "map_batches"
    runs_udf: ClassVar[Literal[True]] = True
    publishes: ClassVar[Literal[False]] = False

    @property
    def makes_rows(self) -> bool:
        """Whether rows come out under new ids."""
        return self.children is not None

    @property
    def may_filter(self) -> bool:
        """Whether it is declared so."""
        return self.cardinality in ("filter", "zero_to_many")

    @property
    def row_order(self) -> RowOrder | None:
        """The order in which its model is best asked."""
        return self.order

    @property
    def isolates_rows(self) -> bool:
        """Whether an error does not fail the partition."""
        return self.failures.on_error != "raise"

    @property
    def quarantines(self) -> bool:
        """Whether it is declared so."""
        return self.failures.on_error == "quarantine"

    @property
    def max_error_rate(self) -> float:
        """The share that is declared."""
        return self.failures.max_error_rate

    @property
    def timeout_s(self) -> float | None:
        """The limit that is declared."""
        return self.failures.timeout_s

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """A new id, and the ids of the rows that rows come from."""
        first = pipeline.keys(self.upstream[0])
        if self.children is None:
            return first
        id, parent = self.children
        culprit = pipeline._culprit(self.name)
        taken = {key.column for key in first} | {parent}
        if id in taken or parent in {key.column for key in first[1:]}:
            raise DefinitionError(
                f"{culprit}: id={id!r} and parent_id={parent!r}, but a row has {names(taken)} "
                "already; give the new id a name of its own"
            )
        return (Key(id, self.name), Key(parent, first[0].origin), *first[1:])

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """What is declared, and the ids and columns that are passed on."""
        first, culprit = inputs[self.upstream[0]], pipeline._culprit(self.name)
        if missing := [c for c in self.columns or () if c not in first.names]:
            raise SchemaError(
                f"{culprit}: needs {names(missing)}, which {self.upstream[0]!r} does not have; "
                f"it has {names(first.names, 20)}"
            )
        fields = []
        above = [key.column for key in pipeline.keys(self.upstream[0])]
        own = [key.column for key in pipeline.keys(self.name)]
        if self.children is not None:
            fields.append(pa.field(own[0], pa.string()))  # unless it is declared
        for id, column in zip(own[len(fields) :], above):
            fields.append(first.field(column).with_name(id))
            declared = self.schema.field(id).type if id in self.schema.names else fields[-1].type
            if declared != fields[-1].type:
                raise SchemaError(
                    f"{culprit}: schema declares the id {id!r} as {declared}, but it comes in as "
                    f"{fields[-1].type}; ids keep their type. Leave it out of the schema, or cast "
                    "it in the source"
                )
        fields += [first.field(column) for column in self.carried if column not in own]
        missing_fields = [field for field in fields if field.name not in self.schema.names]
        schema = pa.schema([*missing_fields, *self.schema])
        if self.failures.on_error == "null":
            schema = schema.append(pa.field(ERROR_COLUMN, pa.string()))
        check_id(culprit, own[0], schema)
        return schema

    def declared_types(self, pipeline: Pipeline, inputs: Mapping[str, Types]) -> Types:
        """What is declared, and what is known of the ids and columns that are passed on."""
        first = inputs[self.upstream[0]]
        above = [key.column for key in pipeline.keys(self.upstream[0])]
        own = [key.column for key in pipeline.keys(self.name)]
        found: Types = {own[0]: pa.string()} if self.children is not None else {}
        found |= {id: first.get(column) for id, column in zip(own[len(found) :], above)}
        found |= {column: first.get(column) for column in self.carried if column not in own}
        missing = {name: kind for name, kind in found.items() if name not in self.schema.names}
        found = missing | {field.name: field.type for field in self.schema}
        return found | ({ERROR_COLUMN: pa.string()} if self.failures.on_error == "null" else {})

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """What is declared; else each column depends on all that is read."""
        first = self.upstream[0]
        above = [key.column for key in pipeline.keys(first)]
        own = [key.column for key in pipeline.keys(self.name)]
        read = schemas[first].names if self.columns is None else list(self.columns)
        found = {
            name: [(first, c) for c in self.reads.get(name, read)] for name in self.schema.names
        }
        found |= {name: [(first, name)] for name in self.carried}
        found |= {id: [(first, column)] for id, column in zip(own[len(own) - len(above) :], above)}
        if self.children is not None:
            found[own[0]] = [(first, above[0])]
        if self.failures.on_error == "null":
            found[ERROR_COLUMN] = [(first, column) for column in read]
        return {name: found[name] for name in schemas[self.name].names}

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """All that are declared but ids."""
        ids = {key.column for key in pipeline.keys(self.name)}
        return tuple(name for name in self.schema.names if name not in ids)

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """All that are declared but ids."""
        ids = [key.column for key in pipeline.keys(self.name)]
        return pa.schema([field for field in self.schema if field.name not in ids])

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, and the columns that are declared."""
        return None if self.columns is None else tuple(dict.fromkeys((*ids, *self.columns)))

    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """The code, its arguments, and what it reads and makes."""
        return [
            digest(self.code(pipeline).digest, *constructor_arguments(pipeline, self)),
            *call_arguments(pipeline, self),
            self.schema.to_string(show_schema_metadata=False),
            self.columns,
            self.batch_format,
            self.cardinality,
            self.children,
            self.failures.on_error == "null",  # the other two differ in what they do with errors
            *environment(pipeline, self),
        ]

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Identity of its function or class.

        Raises:
            CodeIdentityError: If it cannot be found.
        """
        try:
            target, version = self.udf.target, self.udf.version
            return code_identity(target, version=version, files=local_files(pipeline, self))
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._culprit(self.name)}: {error}") from error

    def code_digest(self) -> str:
        """Digest of the function or class."""
        unread = LocalFiles(read=False)
        return code_identity(self.udf.target, version=self.udf.version, files=unread).digest

    def constructed(self, pipeline: Pipeline) -> ConstructorIdentity:
        """Identity of the code that its workers have run before they are called.

        Raises:
            CodeIdentityError: If it has no stable identity.
        """
        udf = self.udf
        given = (udf.constructor_args, dict(udf.constructor_kwargs)) if udf.stateful else ()
        try:
            files = local_files(pipeline, self)
            return constructor_identity(udf.target, given, version=udf.version, files=files)
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._culprit(self.name)}: {error}") from error

    @property
    def code_files(self) -> Sequence[str]:
        """Files with its code, which do not count as data where an argument names them."""
        module = sys.modules.get(getattr(unwrapped(self.udf.target), "__module__", None) or "")
        file = getattr(module, "__file__", None)
        return [file] if file else []

    @property
    def packages(self) -> Sequence[str]:
        """Installed packages that it needs, beside those that its code imports."""
        return ()

    @property
    def description(self) -> str | None:
        """The first paragraph of the user's own docstring."""
        doc = self.udf.target.__doc__
        return doc.strip().split("\n\n")[0] if doc else None


@dataclass(frozen=True)
class JoinSpec(StageKind):
    """Stages of one pipeline, put side by side by id.

    Attributes:
        children: What becomes of rows that were made from the same row.
        columns: Output and input columns of the nodes from which not all are taken.
    """

    how: JoinHow
    children: Children | None = None
    columns: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    kind = "join"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[False]] = False

    @property
    def may_filter(self) -> bool:
        """Whether rows go that another stage does not have."""
        return self.how == "inner"

    @property
    def fills_nulls(self) -> bool:
        """Whether rows stay that another stage does not have."""
        return self.how == "left"

    def base_node(self, pipeline: Pipeline) -> str:
        """The node whose rows are kept and counted."""
        return self.shape(pipeline).base

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """Those of its base."""
        return pipeline.keys(self.base_node(pipeline))

    def shape(self, pipeline: Pipeline) -> JoinShape:
        """How its stages fit together.

        Raises:
            DefinitionError: If they do not.
        """
        culprit = pipeline._culprit(self.name)
        keys = {node: pipeline.keys(node) for node in self.upstream}
        stages = [node for node in self.upstream if node != SOURCE]
        depths = {len(keys[node]) for node in stages}
        if len(depths) > 1 and self.children is None:
            ids = {node: keys[node][0].column for node in stages}
            raise DefinitionError(
                f"{culprit}: joins stages with different ids, {ids}; say children='rows' for one "
                "row a child, or children='list' for one row a parent with a list of its children"
            )
        as_lists = self.children == "list" and len(depths) > 1
        depth = min(depths) if as_lists else max(depths)
        base = next(node for node in stages if len(keys[node]) == depth)
        if self.how == "left" and base != stages[0]:
            raise DefinitionError(
                f"{culprit}: a left join keeps the rows of its first stage, {stages[0]!r}, but "
                f"there is one row for each of {base!r}; name {base!r} first"
            )
        sides = [
            _side(node, keys, base, as_lists, culprit) for node in self.upstream if node != base
        ]
        return JoinShape(base, keys[base][0].column, tuple(sides))

    def quarantining(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """For each list of a left join, the stages whose quarantined rows would lead to children.

        A row without children is told from one whose children are not known by what these stages
        have quarantined.
        """
        if self.how != "left" or self.children != "list":
            return {}
        shape = self.shape(pipeline)
        known = with_upstream(pipeline, shape.base)
        found = {}
        for side in shape.sides:
            if side.label is not None:
                way = with_upstream(pipeline, side.node) - known
                found[side.node] = [
                    s.name for s in pipeline if s.name in way and s.spec.quarantines
                ]
        return found

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """What is taken of each stage; children as lists of structs, if they are so declared."""
        culprit, shape = pipeline._culprit(self.name), self.shape(pipeline)
        base = inputs[shape.base]
        sides = {side.node: side for side in shape.sides}
        ids = [key.column for key in pipeline.keys(shape.base)]
        fields = {id: base.field(id) for id in ids}
        owner = dict.fromkeys(ids, shape.base)
        for node, schema in inputs.items():
            side = sides.get(node)
            if side is not None:
                _check_same_id(culprit, shape, base, schema, side)
            chosen = self._chosen(node, schema.names, side.known if side else ids)
            if missing := [column for _, column in chosen if column not in schema.names]:
                raise SchemaError(
                    f"{culprit}: takes {names(missing)} of {node!r}, which does not have it; it "
                    f"has {names(schema.names, 20)}"
                )
            taken = [schema.field(column).with_name(name) for name, column in chosen]
            if side is not None and side.label is not None:
                own = [key.column for key in pipeline.keys(node) if key.column not in side.known]
                taken = [schema.field(id) for id in own] + [f for f in taken if f.name not in own]
                taken = [pa.field(side.label, pa.list_(pa.struct(taken)))]
            for one in taken:
                if one.name in fields:
                    raise SchemaError(
                        f"{culprit}: column {one.name!r} comes from both {owner[one.name]!r} "
                        f"and {node!r}; name the columns to take, as columns={{{node!r}: "
                        f"{{'other_name': {one.name!r}}}}}"
                    )
                fields[one.name], owner[one.name] = one, node
        return pa.schema(list(fields.values()))

    def declared_types(self, pipeline: Pipeline, inputs: Mapping[str, Types]) -> Types:
        """What is known of the columns that are taken."""
        shape = self.shape(pipeline)
        sides = {side.node: side for side in shape.sides}
        ids = [key.column for key in pipeline.keys(shape.base)]
        found: Types = {id: inputs[shape.base].get(id) for id in ids}
        for node, given in inputs.items():
            side = sides.get(node)
            chosen = self._chosen(node, given, side.known if side else ids)
            taken: Types = {name: given.get(column) for name, column in chosen}
            if side is not None and side.label is not None:
                own = [key.column for key in pipeline.keys(node) if key.column not in side.known]
                child = {id: given.get(id) for id in own} | taken
                is_known = None not in child.values()
                taken = {side.label: pa.list_(pa.struct(list(child.items()))) if is_known else None}
            found |= taken
        return found

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """The columns that are taken; of a list those that its elements hold."""
        shape = self.shape(pipeline)
        ids = [key.column for key in pipeline.keys(shape.base)]
        found = {id: [(shape.base, id)] for id in ids}
        taken = self._chosen(shape.base, schemas[shape.base].names, ids)
        found |= {name: [(shape.base, column)] for name, column in taken}
        for side in shape.sides:
            pairs = self._chosen(side.node, schemas[side.node].names, side.known)
            if side.label is None:
                found |= {name: [(side.node, column)] for name, column in pairs}
            else:
                listed = [(side.node, column) for _, column in pairs]
                found[side.label] = list(dict.fromkeys([(side.node, side.id), *listed]))
        return {name: found[name] for name in schemas[self.name].names}

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """Of a left join, those that may be null for want of a row."""
        if self.how != "left":
            return ()
        ids = {key.column for key in pipeline.keys(self.name)}
        shape = self.shape(pipeline)
        lists = {side.label for side in shape.sides}
        beside = {name for s in shape.sides for name, _ in self.columns.get(s.node, ())}
        everything = all(side.node in self.columns for side in shape.sides)
        candidates = beside if everything else set(schema.names)
        return tuple(n for n in schema.names if n in candidates and n not in ids | lists)

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, and the columns that are taken."""
        if upstream not in self.columns:
            return None
        return tuple(dict.fromkeys((*ids, *(column for _, column in self.columns[upstream]))))

    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """What is taken of each stage.

        Stages count by their place, so that one can be renamed; a list has the name of its stage.
        """
        nulls = ["null lists"] if any(self.quarantining(pipeline).values()) else []
        chosen = [self.columns.get(node) for node in self.upstream]
        lists = self.upstream if self.children == "list" else ()
        return [self.how, self.children, chosen, lists, *nulls]

    def _chosen(
        self, node: str, columns: Iterable[str], known: Collection[str]
    ) -> list[tuple[str, str]]:
        """New and old names of what is taken of a node's columns, without ids that are `known`."""
        pairs = self.columns.get(node, [(name, name) for name in columns])
        return [(n, c) for n, c in pairs if not (n == c and c in known)]


@dataclass(frozen=True)
class WriteSpec(StageKind):
    """A stage's rows, published where any tool reads them."""

    target: Target

    kind = "write"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[True]] = True

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The rows as they are."""
        return inputs[self.upstream[0]]

    def declared_types(self, pipeline: Pipeline, inputs: Mapping[str, Types]) -> Types:
        """The rows as they are."""
        return inputs[self.upstream[0]]

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """The rows as they are."""
        return {name: [(self.upstream[0], name)] for name in schemas[self.name].names}

    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """The target, and how it is written."""
        target = self.target
        options = sorted(target.options.items())
        return [
            target.url,
            target.compression,
            target.format,
            target.target_bytes,
            target.partition_column,
            *(part for option in options for part in option),
        ]

    def publisher(self, partition: str | None) -> Publisher:
        """What publishes a partition."""
        return open_publisher(self.target, partition)


StageSpec = Union[ProjectSpec, MapBatchesSpec, JoinSpec, WriteSpec]


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


def _check_same_id(
    culprit: str, shape: JoinShape, base: pa.Schema, own: pa.Schema, side: Side
) -> None:
    ours, theirs = (shape.id, side.match) if side.label else (side.match, side.id)
    expected, found = base.field(ours).type, own.field(theirs).type
    if expected != found:
        raise SchemaError(
            f"{culprit}: the id {ours!r} is {expected} in {shape.base!r} and {found} in "
            f"{side.node!r}; materialize both again from the same source"
        )


def with_upstream(pipeline: Pipeline, node: str) -> set[str]:
    """A stage and all that it is made from."""
    above = () if node == SOURCE else pipeline[node].spec.upstream
    return {node}.union(*(with_upstream(pipeline, upstream) for upstream in above))


def check_id(culprit: str, id: str, schema: pa.Schema) -> None:
    """Raises SchemaError where the id is no column, or has a type that no id can have."""
    if id not in schema.names:
        raise SchemaError(
            f"{culprit}: has no id column {id!r}; it has {names(schema.names, 20)}. Name the id "
            "column in vd.Pipeline(id=...)"
        )
    kind = schema.field(id).type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (pa.types.is_integer(kind) or text):
        raise SchemaError(
            f"{culprit}: the id {id!r} is {kind}; expected whole numbers or text. Cast it in the "
            "source, for example to VARCHAR"
        )
