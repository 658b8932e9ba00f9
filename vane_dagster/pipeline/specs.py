"""The kinds of stages: one class each, with all logic that depends on the kind.

A spec is a frozen description of one stage, created and validated by a method of `Rows`. Callers
query it (`spec.may_filter`, `spec.components(pipeline)`) instead of testing its class. Where only
one kind has the attribute that they need, they test `runs_udf` or `publishes`, which type checkers
narrow. A kind's operations in workers are registered in `engine/tasks.py`, because `worker/` is a
later layer than declarations.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

import pyarrow as pa

from vane_dagster._keywords import require_columns
from vane_dagster.errors import CodeIdentityError, DefinitionError, SchemaError, names
from vane_dagster.fingerprint.code import CodeIdentity, code_identity, worker_code_digest
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.local_file import FileContent, LocalFile
from vane_dagster.pipeline.contracts import CALL, TYPES, BatchCall, Contract, RowCall, TypesCall
from vane_dagster.pipeline.identity import (
    call_arguments,
    component,
    constructor_arguments,
    environment,
    local_files,
)
from vane_dagster.pipeline.keys import IdColumn, JoinShape, JoinSide, Keys
from vane_dagster.pipeline.options import (
    Cardinality,
    IncludeColumns,
    JoinChildren,
    JoinHow,
    OnError,
    Resources,
    RowOrder,
)
from vane_dagster.pipeline.records import Asset, Children, Failures, Reuse, Workers
from vane_dagster.pipeline.udf import Udf
from vane_dagster.sources.raw_files import PATH
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.publish.registry import open_publisher
from vane_dagster.storage.publish.target import Target
from vane_dagster.types import sql
from vane_dagster.types.callables import unwrapped
from vane_dagster.types.schema import (
    ERROR_COLUMN,
    INFER,
    is_untyped,
    parse_schema,
    schema_code,
    type_code,
)

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline
    from vane_dagster.storage.publish.base import Publisher

SOURCE = "source"
"""The name of a pipeline's source among its nodes. A node is a stage or the source."""

_OPEN_FILE = (
    "To read the row's file, write a parameter `file: vd.File`; else name the column of a "
    'parameter, as columns={"parameter": "column"}'
)
_NAME_INPUTS = (
    'Name the column of a parameter, as columns={"parameter": "column"}, or annotate the one '
    "parameter as a dict to get the whole row"
)

Schemas = Mapping[str, pa.Schema]
"""Schemas by node."""
Column = tuple[str, str]
"""A node and one of its columns."""
_NO_FAILURES = Failures("raise")
_REUSED = Reuse("fragments")


@dataclass(frozen=True)
class Table:
    """The columns of a node, as far as they are known.

    Attributes:
        fields: The columns; None where only the source knows the type.
        reads: The columns of the upstream nodes that the values of each column depend on.
        is_complete: Whether these are all columns, rather than those known without the source.
    """

    fields: Mapping[str, pa.Field | None]
    reads: Mapping[str, list[Column]] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def schema(self) -> pa.Schema | None:
        """The schema; None if a column or its type is not known."""
        known = [each for each in self.fields.values() if each is not None]
        return pa.schema(known) if self.is_complete and len(known) == len(self.fields) else None

    @property
    def types(self) -> dict[str, pa.DataType | None]:
        """The columns and their types."""
        return {name: None if each is None else each.type for name, each in self.fields.items()}


@dataclass(frozen=True)
class StageKind(abc.ABC):
    """The properties that all stages share, with the defaults of most kinds.

    Attributes:
        name: The stage's name.
        upstream: The nodes that it reads.
        asset: Options of its Dagster asset.
        failures: How failed calls and rows are handled.
        reuse: Which stored results are used again.
        row_order: The order in which workers receive a fragment's rows; None for the rows' own.
            Only set if it lists the columns that it reads.
        is_inferred: Whether the first run infers the schema. `MapBatchesSpec.with_schema` returns
            the stage with the inferred one.
        runs_udf: Whether it runs user code or calls a model, in workers of a pool.
        publishes: Whether it ends a branch and writes its rows where any tool can read them.
    """

    name: str
    upstream: tuple[str, ...]
    asset: Asset
    failures: Failures = field(default=_NO_FAILURES, kw_only=True)
    reuse: Reuse = field(default=_REUSED, kw_only=True)
    row_order: RowOrder | None = field(default=None, kw_only=True)
    is_inferred: bool = field(default=False, kw_only=True)

    runs_udf: ClassVar[bool]
    publishes: ClassVar[bool]

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Name of the kind, in keys, manifests and Dagster."""

    # Rows.

    @property
    def makes_rows(self) -> bool:
        """Whether one row may become many, under new ids."""
        return False

    @property
    def may_filter(self) -> bool:
        """Whether it may drop rows."""
        return False

    @property
    def fills_nulls(self) -> bool:
        """Whether it writes nulls where an upstream stage has no row."""
        return False

    def base_node(self, pipeline: Pipeline) -> str:
        """Return the node that determines its output rows."""
        return self.upstream[0]

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """Return the columns that identify its rows, the id first."""
        return pipeline._keys_of(self.upstream[0])

    def publisher(self, partition: str | None) -> Publisher | None:
        """Return the publisher of a partition; None for a stage that publishes nothing."""
        return None

    # Failed rows.

    @property
    def isolates_rows(self) -> bool:
        """Whether it isolates single rows that fail or end their workers."""
        return self.failures.on_error != "raise"

    @property
    def quarantines(self) -> bool:
        """Whether failed rows are quarantined beside its parts."""
        return self.failures.on_error == "quarantine"

    def quarantining(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """Map each of its list columns to the stages with quarantined rows that would add to it."""
        return {}

    # Columns.

    @abc.abstractmethod
    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """Return its columns."""

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """Return the schema of its rows."""
        schema = self.outputs(pipeline, _tables(inputs)).schema
        assert schema is not None
        return schema

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """Map each of its columns to the columns that its values depend on."""
        inputs = {node: schemas[node] for node in self.upstream}
        reads = self.outputs(pipeline, _tables(inputs)).reads
        return {name: reads[name] for name in schemas[self.name].names}

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """Return the columns with values that the stage computes rather than passes through."""
        return ()

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """Return the columns that it computes; None if the declaration does not determine them."""
        return None

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """Return the columns that it needs from an upstream node; None for all."""
        return None

    # Fragment keys, usage and description.

    @abc.abstractmethod
    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """Return everything that changes its results besides kind and id.

        See `planning.definition.stage_definition`.
        """

    def code_digest(self) -> str:
        """Return the digest of its user code alone, without the files that its values name.

        A run may change such files itself, for example in a folder that an argument names as
        output.
        """
        return ""

    def local_files(self) -> Mapping[LocalFile, FileContent]:
        """Return the local files among its arguments, with their present contents."""
        return {}

    @property
    def description(self) -> str | None:
        """A description of the stage for users."""
        return None

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """Fields of its struct columns that are summed for each part, among the part's measures."""
        return {}

    def used(self, measures: Mapping[str, Mapping[str, float]]) -> Counter[str]:
        """Return the usage of rows, by the names of `sums`."""
        total: Counter[str] = Counter()
        for column, fields in self.sums.items():
            total.update({name: int(measures.get(column, {}).get(name, 0)) for name in fields})
        return total

    def over_budget(self, used: Mapping[str, int]) -> str | None:
        """Describe the budget of a run that is exhausted; None if there is none."""
        return None

    def usage_metadata(self, used: Mapping[str, int], seconds: float | None) -> dict[str, Any]:
        """Return a partition's usage as metadata of its asset."""
        return {}


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
            require_columns(owner, _listed(self.include), given.names)
            schema = sql.bind(pairs, self.where, given, location)
            check_id(location, pipeline._keys_of(self.name)[0].column, schema)
            fields = dict(zip(schema.names, schema))
        else:
            known = [each for each in first.fields.values() if each is not None]
            fields = {name: self._bound(name, text, known, location) for name, text in pairs}
        reads = {}
        for name, expression in pairs:
            named = {other.lower() for other in sql.referenced_columns(expression, self.name)}
            reads[name] = [(upstream, each) for each in first.fields if each.lower() in named]
        return Table(fields, reads, self.include is not True or first.is_complete)

    def _bound(
        self, name: str, expression: str, known: list[pa.Field], location: str
    ) -> pa.Field | None:
        """Return a column of an expression; None if it reads a column of unknown type."""
        none = sql.unused("none", sql.referenced_columns(expression, location))
        given = pa.schema(known or {none: pa.bool_()})  # SQL has no table without columns
        try:
            return sql.bind(((name, expression),), None, given, location).field(0)
        except (SchemaError, DefinitionError):
            return None

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """The columns with expressions other than a plain input column."""
        return tuple(
            name
            for name, expression in self.columns
            if sql.plain_column(expression, self.name) is None
        )

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """Empty if no column is computed; None otherwise, since DuckDB determines the types."""
        none = pa.schema([])
        return None if self.made_columns(pipeline, none) else none

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
        """The expressions as tokens, independent of their layout."""
        where = None if self.where is None else sql.tokens(self.where)
        return [
            *(component("column", name, sql.tokens(text)) for name, text in self.columns),
            component("option", "where", where),
            component("option", "include_columns", self.include),
        ]

    def _pairs(self, columns: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return all columns with their expressions."""
        made = {name.lower() for name, _ in self.columns}
        included = columns if self.include is True else self.include
        passed = [(name, sql.quote(name)) for name in included if name.lower() not in made]
        return (*self.columns, *passed)


@dataclass(frozen=True)
class MapBatchesSpec(StageKind):
    """A stage that runs a user's function or class over batches.

    Attributes:
        udf: The function or class with its arguments.
        schema: The declared output columns. As long as they are to be inferred, those with a known
            name.
        columns: The input columns that the UDF reads; None for all.
        contract: How the UDF is called with rows.
        batch_size: Rows per call; None if `auto_batch` is set or none is declared.
        auto_batch: Whether workers determine the batch size.
        cardinality: How many output rows an input row may have.
        workers: Its workers.
        gpus: GPUs that a worker reserves.
        include: Input columns that pass through unchanged; True for all.
        children: For a fan-out, the columns of the new id and of the parent's id.
        pinned: Whether the schema was inferred. Results with columns that it lacks are refused. In
            keys it counts as if it had been declared.
        kind: See `StageKind`.
    """

    udf: Udf
    schema: pa.Schema
    columns: tuple[str, ...] | None
    contract: Contract
    batch_size: int | None
    auto_batch: bool
    cardinality: Cardinality
    workers: Workers
    gpus: float
    include: IncludeColumns
    children: Children | None = None
    pinned: bool = False
    kind: str = "map_batches"

    runs_udf: ClassVar[Literal[True]] = True
    publishes: ClassVar[Literal[False]] = False

    @property
    def schema_argument(self) -> str:
        """What to declare in place of an inferred schema, for messages."""
        return "dimensions=" if self.kind == "embed" else "the schema"

    @property
    def resources(self) -> Resources:
        """Resources that a worker reserves."""
        return self.workers._reserved(f"stage {self.name!r}", self.gpus)

    @property
    def concurrency(self) -> tuple[int, int] | None:
        """Minimum and maximum number of workers; None if it depends on the cluster."""
        return self.workers.count if isinstance(self.workers.count, tuple) else None

    @property
    def max_concurrency(self) -> int:
        """Calls in flight in one worker, for an async UDF."""
        return self.workers.max_concurrency or 1

    @property
    def on_driver(self) -> bool:
        """Whether its workers have to be subprocesses on the driver's machine."""
        return (self.workers.execution_backend or "").startswith("subprocess")

    @property
    def makes_rows(self) -> bool:
        """True for a fan-out."""
        return self.children is not None

    @property
    def may_filter(self) -> bool:
        """True for the cardinalities that allow it."""
        return self.cardinality in ("filter", "zero_to_many")

    @property
    def slots(self) -> int:
        """Tasks that a worker has at the same time; with two, async code always has calls."""
        return 2 if self.udf.is_async and self.max_concurrency > 1 else 1

    @property
    def runs_own_code(self) -> bool:
        """Whether it runs code of the user, not only a built-in provider."""
        return True

    @property
    def _reads_by_name(self) -> bool:
        """Whether the order of the columns that the code gets cannot be observed."""
        return isinstance(self.contract, RowCall) and self.contract.inputs is not None

    def with_reuse(self, pipeline: Pipeline) -> MapBatchesSpec:
        """Return the stage with the mode of reuse that the user left open."""
        obstacle = self._obstacle_to_row_reuse(pipeline)
        return replace(self, reuse=self.reuse._resolved(pipeline._location(self.name), obstacle))

    def _obstacle_to_row_reuse(self, pipeline: Pipeline) -> str | None:
        """Return why rows cannot be reused one by one, and the fix; None if they can."""
        id = pipeline._keys_of(self.upstream[0])[0].column
        if not self.columns:
            return "a row is found by the columns that the code reads; name them in columns="
        has_files = pipeline.source.names_files
        if self._takes_files and not has_files:
            return (
                "the code opens files that its source does not list, so that nothing tells whether "
                'they changed; use reuse="fragments"'
            )
        if has_files and self.runs_own_code and not self._takes_files and PATH not in self.columns:
            return (
                "the code may open the files of its source, and its rows do not tell which; name "
                f'{PATH!r} in columns=, take a vd.File, or use reuse="fragments"'
            )
        is_many = self.cardinality != "one_to_one"
        if is_many and not self.contract.by_row and id not in self.columns:
            return (
                f"where rows are dropped or added, only the id {id!r} tells from which row a "
                "result was made; name it in columns="
            )
        has_ids = self.is_inferred or (self.children and self.children.id in self.schema.names)
        if self.children is not None and has_ids:
            return (
                f"ids {self.children.id!r} that the code makes cannot be given to the children of "
                "another row; declare a schema without them, so that ids are generated"
            )
        return None

    @property
    def _takes_files(self) -> bool:
        return isinstance(self.contract, RowCall) and bool(self.contract.files)

    def file_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the key columns with paths of files of the source that the code opens.

        The row key has the versions of these files.
        """
        found = {PATH} if pipeline.source.names_files and self.runs_own_code else set()
        if isinstance(self.contract, RowCall):
            inputs = dict(self.contract.inputs or ())
            found |= {inputs[name] for name in self.contract.files}
        return tuple(name for name in self.key_columns(pipeline) if name in found)

    def _columns_seen(self, pipeline: Pipeline) -> tuple[str, ...] | None:
        """The columns that the code can observe, which may be less than it is given."""
        return self.columns if self._reads_by_name else self.columns_given(pipeline)

    def columns_given(self, pipeline: Pipeline) -> tuple[str, ...] | None:
        """Return the input columns that the code gets; None for all.

        If rows are reused, they are those that the stage names. Else the id is always among them.
        """
        if self.columns is None:
            return None
        id = pipeline._keys_of(self.upstream[0])[0].column
        always = () if self.reuse.mode == "rows" else (id,)
        return tuple(dict.fromkeys((*always, *self.columns)))

    def key_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the input columns whose values are the row key, in the order in which they count.

        The id comes first if each row has a result of its own.

        Empty unless rows are reused.
        """
        if self.reuse.mode != "rows" or self.columns is None:
            return ()
        listed = dict.fromkeys(self.columns)
        own = [pipeline._keys_of(self.upstream[0])[0].column] if self.reuse.per_row else []
        return (*own, *(sorted(listed) if self._reads_by_name else listed))

    def own_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the output columns that the code makes; they are what a copy of a row copies."""
        return self.made_columns(pipeline, self.schema)

    def computation(self, pipeline: Pipeline) -> Sequence[object]:
        """Return everything that changes what the code makes of a row, besides rows and schema."""
        return [
            *(each.digest for each in self._called(pipeline)),
            self.pinned,
            self.makes_rows,
            self.may_filter,  # else a row that was dropped would be missing where none may be
        ]

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """For a fan-out, a new id and the parents' ids; else the keys of the input."""
        first = pipeline._keys_of(self.upstream[0])
        if self.children is None:
            return first
        id, parent = self.children.id, self.children.parent_id or first[0].column
        location = pipeline._location(self.name)
        taken = {key.column for key in first} | {parent}
        if id in taken or parent in {key.column for key in first[1:]}:
            raise DefinitionError(
                f"{location}: id={id!r} and parent_id={parent!r}, but a row has {names(taken)} "
                "already; give the new id a name of its own"
            )
        return (IdColumn(id, self.name), IdColumn(parent, first[0].origin), *first[1:])

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The declared columns, and the ids and columns that pass through."""
        if self.is_inferred:
            raise SchemaError(
                f"{pipeline._location(self.name)}: its columns are not known before its first run, "
                f"which infers them (schema={INFER!r}). Declare {self.schema_argument}; preview() "
                "shows it as code"
            )
        return super().output_schema(pipeline, inputs)

    @property
    def _needed(self) -> Iterable[str]:
        """The input columns that the code gets."""
        return self.columns or ()

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """The declared columns, and the ids and columns that pass through."""
        location, upstream = pipeline._location(self.name), self.upstream[0]
        first = inputs[upstream]
        if first.is_complete:
            needed = dict.fromkeys([*self._needed, *_listed(self.include)])
            by_row = isinstance(self.contract, RowCall) and self.contract.inputs is not None
            fix = (_OPEN_FILE if pipeline.source.names_files else _NAME_INPUTS) if by_row else ""
            require_columns(f"{location}: {upstream!r}", needed, first.fields, fix=fix)
        above = [key.column for key in pipeline._keys_of(upstream)]
        own = [key.column for key in pipeline._keys_of(self.name)]
        ids = dict(zip(own[len(own) - len(above) :], above))
        carried = self.carried(first.fields, own)
        fields: dict[str, pa.Field | None] = {}
        reads: dict[str, list[Column]] = {}
        if self.children is not None:
            fields[own[0]] = pa.field(own[0], pa.string())  # unless the user declares it
            reads[own[0]] = [(upstream, above[0])]
        for name, column in (ids | dict(zip(carried, carried))).items():
            given = first.fields.get(column)
            fields[name] = None if given is None else given.with_name(name)
            reads[name] = [(upstream, column)]
        for name in ids:
            given = fields[name]
            declared = self.schema.field(name).type if name in self.schema.names else None
            if given is not None and declared is not None and declared != given.type:
                raise SchemaError(
                    f"{location}: schema declares the id {name!r} as {declared}, but it comes in "
                    f"as {given.type}; ids keep their type. Leave it out of the schema, or cast it "
                    "in the source"
                )
        read = [(upstream, c) for c in (first.fields if self.columns is None else self.columns)]
        made: dict[str, pa.Field | None] = {
            each.name: None if self.is_inferred else each for each in self.schema
        }
        for name in made.keys() - reads.keys():
            lineage = self.asset.column_lineage.get(name)
            reads[name] = read if lineage is None else [(upstream, column) for column in lineage]
        fields = {name: each for name, each in fields.items() if name not in made} | made
        if self.failures.on_error == "null":
            if ERROR_COLUMN in fields:
                raise SchemaError(
                    f"{location}: on_error='null' adds a column {ERROR_COLUMN!r}, and the input "
                    "has one that include_columns passes on; name the columns to include"
                )
            fields[ERROR_COLUMN], reads[ERROR_COLUMN] = pa.field(ERROR_COLUMN, pa.string()), read
        if (key := fields[own[0]]) is not None:
            check_id(location, own[0], pa.schema([key]))
        passes_all = self.include is not True or first.is_complete
        return Table(fields, reads, passes_all and bool(self.schema.names or not self.is_inferred))

    def carried(self, columns: Iterable[str], ids: Collection[str]) -> list[str]:
        """Return the input columns that are passed on, without the ids."""
        chosen = columns if self.include is True else self.include
        return [name for name in chosen if name not in ids and name not in self.schema.names]

    def probe(self) -> MapBatchesSpec:
        """Return a stage that makes the same calls, and returns the types of their results.

        It uses the same workers.
        """
        assert isinstance(self.contract, (BatchCall, RowCall))
        on_error: OnError = "quarantine" if self.isolates_rows else "raise"
        return replace(
            self,
            schema=pa.schema([(TYPES, pa.string())]),
            contract=TypesCall(self.contract, self.name),
            cardinality="one_to_one",
            children=None,
            failures=replace(self.failures, on_error=on_error),
            include=(),
            is_inferred=False,
        )

    def with_schema(self, pipeline: Pipeline, schema: pa.Schema) -> MapBatchesSpec:
        """Return the stage with its inferred schema."""
        location = pipeline._location(self.name)
        spec = replace(self, schema=parse_schema(schema, location), is_inferred=False, pinned=True)
        spec.check_schema(location)
        return spec

    def inferred_schema(
        self, pipeline: Pipeline, found: pa.Schema, given: pa.Schema, rows: int
    ) -> pa.Schema:
        """Return the schema to pin: the columns returned, without those that pass through."""
        location = pipeline._location(self.name)
        ids = [key.column for key in pipeline._keys_of(self.name)]
        passed = {*(ids[1:] if self.makes_rows else ids)}
        passed |= {*(given.names if self.include is True else self.include)}
        if self.failures.on_error == "null":
            passed.add(ERROR_COLUMN)
        made = [field for field in found if field.name not in passed]
        if not made:
            raise SchemaError(
                f"{location}: its schema cannot be inferred, because {self.udf.name} returned no "
                f"column of its own for the first {rows:,} rows. Declare the schema"
            )
        if untyped := [field.name for field in made if is_untyped(field.type)]:
            raise SchemaError(
                f"{location}: the type of {names(untyped)} cannot be inferred, because the first "
                f"{rows:,} rows have only nulls, empty lists or empty dicts there. Declare the "
                f"schema, as schema={schema_code(made)}"
            )
        return parse_schema(pa.schema(made), location)

    @property
    def schema_code(self) -> str:
        """The argument that declares the schema, for example ``schema={"label": "VARCHAR"}``."""
        fields = list(self.schema)
        if isinstance(self.contract, RowCall) and self.contract.output is not None:
            kind = self.schema.field(self.contract.output).type
            if not pa.types.is_struct(kind):
                return f"schema={type_code(kind)}"
            fields = list(kind)
        return f"schema={schema_code(fields)}"

    def check_schema(self, location: str) -> None:
        """Verify that the other options fit the schema."""
        takes = self.children is None and ERROR_COLUMN not in self.schema.names
        if self.failures.on_error == "null" and not takes:
            raise DefinitionError(
                f"{location}: on_error='null' adds a column {ERROR_COLUMN!r} to a row's own; "
                "rename yours in the schema, and use 'quarantine' for a one-to-many stage"
            )
        owner = f"{location}: column_lineage: the schema"
        require_columns(owner, self.asset.column_lineage, self.schema.names, DefinitionError)

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """All declared columns except ids."""
        ids = {key.column for key in pipeline._keys_of(self.name)}
        return tuple(name for name in self.schema.names if name not in ids)

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """All declared columns except ids."""
        if self.is_inferred:
            return None
        ids = [key.column for key in pipeline._keys_of(self.name)]
        return pa.schema([field for field in self.schema if field.name not in ids])

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """The ids, the declared input columns, and those that pass through."""
        if self.columns is None or self.include is True:
            return None
        return tuple(dict.fromkeys((*ids, *self.columns, *self.include)))

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The code, its arguments, and its input and output columns."""
        schema = INFER if self.is_inferred else self.schema.to_string(show_schema_metadata=False)
        return [
            *self._called(pipeline),
            component("option", "schema", schema),
            component("option", "columns", self._columns_seen(pipeline)),
            component("option", "cardinality", self.cardinality),
            component("option", "per_row", self.reuse.per_row),
            component("option", "id", self.children and dataclasses.astuple(self.children)),
            # The other two differ only in error handling.
            component("option", "on_error", self.failures.on_error == "null"),
            component("option", "include_columns", self.include),
        ]

    def _called(self, pipeline: Pipeline) -> list[Component]:
        """Return what determines the result of a call, besides rows and columns."""
        return [
            *(Component(*part) for part in self.code(pipeline).parts),
            *constructor_arguments(pipeline, self),
            *call_arguments(pipeline, self),
            component("option", "method", self.udf.method),
            component("option", "batch_format", self.contract.keyed),
            *environment(pipeline, self),
        ]

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Return the identity of its function or class."""
        try:
            udf, files = self.udf, local_files(pipeline, self)
            return code_identity(udf.target, version=udf.version, files=files)
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._location(self.name)}: {error}") from error

    @property
    def _own_code(self) -> Sequence[Callable[..., Any]]:
        """The user's code that it runs."""
        return (self.udf.target,)

    def code_digest(self) -> str:
        """Digest of the function or class."""
        unread, version = LocalFiles(read=False), self.udf.version
        found = (code_identity(each, version=version, files=unread) for each in self._own_code)
        return digest(*(each.digest for each in found))

    def local_files(self) -> Mapping[LocalFile, FileContent]:
        """Those among the arguments of the function or class."""
        return {file: file.content() for file in self.udf.local_files}

    def worker_code(self, pipeline: Pipeline) -> str:
        """Return the digest of the code that its workers import."""
        udf, files = self.udf, local_files(pipeline, self)
        try:
            return worker_code_digest(udf.target, version=udf.version, files=files)
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._location(self.name)}: {error}") from error

    @property
    def code_files(self) -> Sequence[str]:
        """Files with its code, which do not count as data if an argument names them."""
        module = sys.modules.get(getattr(unwrapped(self.udf.target), "__module__", None) or "")
        file = getattr(module, "__file__", None)
        return [file] if file else []

    @property
    def packages(self) -> Sequence[str]:
        """Installed packages that it needs, besides those that its code imports."""
        return ()

    @property
    def key_variable(self) -> str | None:
        """The environment variable with the key of an endpoint that its workers need."""
        return None

    @property
    def description(self) -> str | None:
        """The first paragraph of the user's docstring."""
        named = None if self.udf.method == CALL else self.udf.call.__doc__
        doc = named or self.udf.target.__doc__
        return doc.strip().split("\n\n")[0] if doc else None


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

    @property
    def fills_nulls(self) -> bool:
        """True for a left join, which keeps rows that another stage does not have."""
        return self.how == "left"

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
                f"{location}: joins stages with different ids, {ids}; say children='rows' for one "
                "row a child, or children='list' for one row a parent with a list of its children"
            )
        as_lists = self.children == "list" and len(depths) > 1
        depth = min(depths) if as_lists else max(depths)
        base = next(node for node in stages if len(keys[node]) == depth)
        if self.how == "left" and base != stages[0]:
            raise DefinitionError(
                f"{location}: a left join keeps the rows of its first stage, {stages[0]!r}, but "
                f"there is one row for each of {base!r}; name {base!r} first"
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
        found = {}
        for side in shape.sides:
            if side.label is not None:
                way = with_upstream(pipeline, side.node) - known
                found[side.node] = [
                    s.name for s in pipeline if s.name in way and s.spec.quarantines
                ]
        return found

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """The columns taken from each stage; children as lists of structs, if declared so."""
        location, shape = pipeline._location(self.name), self.shape(pipeline)
        base = inputs[shape.base].fields
        sides = {side.node: side for side in shape.sides}
        ids = [key.column for key in pipeline._keys_of(shape.base)]
        fields = {id: base.get(id) for id in ids}
        reads = {id: [(shape.base, id)] for id in ids}
        for node, table in inputs.items():
            side = sides.get(node)
            if side is not None:
                _check_same_id(location, shape, base, table.fields, side)
            chosen = self._chosen(node, table.fields, side.known if side else ids)
            if table.is_complete:
                require_columns(f"{location}: {node!r}", [c for _, c in chosen], table.fields)
            taken: dict[str, pa.Field | None] = {}
            for name, column in chosen:
                given = table.fields.get(column)
                taken[name] = None if given is None else given.with_name(name)
            read = {name: [(node, column)] for name, column in chosen}
            if side is not None and side.label is not None:
                keys = [key.column for key in pipeline._keys_of(node)]
                own = {key: table.fields.get(key) for key in keys if key not in side.known}
                element = Table(own | taken | own).schema
                kind = None
                if element is not None:
                    kind = pa.field(side.label, pa.list_(pa.struct(list(element))))
                columns = dict.fromkeys([side.id, *(column for _, column in chosen)])
                taken, read = {side.label: kind}, {side.label: [(node, c) for c in columns]}
            if twice := [name for name in taken if name in fields]:
                raise SchemaError(
                    f"{location}: column {twice[0]!r} comes from both {reads[twice[0]][0][0]!r} "
                    f"and {node!r}; name the columns to take, as columns={{{node!r}: "
                    f"{{'other_name': {twice[0]!r}}}}}"
                )
            fields |= taken
            reads |= read
        is_complete = all(node in self.columns or inputs[node].is_complete for node in inputs)
        return Table(fields, reads, is_complete)

    def made_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """For a left join, the columns that are null where a row is missing."""
        if self.how != "left":
            return ()
        ids = {key.column for key in pipeline._keys_of(self.name)}
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

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The columns taken from each stage.

        Stages count by position, so a stage can be renamed. Lists count by the name of their stage.
        """
        has_null_lists = any(self.quarantining(pipeline).values())
        chosen = [self.columns.get(node) for node in self.upstream]
        lists = self.upstream if self.children == "list" else ()
        return [
            component("option", "how", self.how),
            component("option", "children", self.children, lists, has_null_lists),
            component("option", "columns", chosen),
        ]

    def _chosen(
        self, node: str, columns: Iterable[str], known: Collection[str]
    ) -> list[tuple[str, str]]:
        """Return new and old names of the columns taken from a node, without the ids in `known`."""
        pairs = self.columns.get(node, [(name, name) for name in columns])
        return [(n, c) for n, c in pairs if not (n == c and c in known)]


@dataclass(frozen=True)
class WriteSpec(StageKind):
    """A stage that publishes its rows where any tool can read them."""

    target: Target

    kind = "write"
    runs_udf: ClassVar[Literal[False]] = False
    publishes: ClassVar[Literal[True]] = True

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """The input columns, unchanged."""
        first = inputs[self.upstream[0]]
        reads = {name: [(self.upstream[0], name)] for name in first.fields}
        return Table(first.fields, reads, first.is_complete)

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
        ]

    def publisher(self, partition: str | None) -> Publisher:
        """Return the publisher of a partition."""
        return open_publisher(self.target, partition)


def _listed(include: IncludeColumns) -> tuple[str, ...]:
    """Return the columns that `include` names."""
    return () if include is True else include


def _tables(schemas: Schemas) -> dict[str, Table]:
    """Return nodes whose columns are all known."""
    return {node: Table(dict(zip(schema.names, schema))) for node, schema in schemas.items()}


StageSpec = Union[ProjectSpec, MapBatchesSpec, JoinSpec, WriteSpec]


def _side(
    node: str, keys: Mapping[str, Keys], base: str, as_lists: bool, location: str
) -> JoinSide:
    own, ours = keys[node], keys[base]
    deep, flat = (own, ours) if len(own) > len(ours) else (ours, own)
    shared = deep[len(deep) - len(flat) :]
    if [key.origin for key in shared] != [key.origin for key in flat]:
        raise DefinitionError(
            f"{location}: {node!r} is keyed by {own[0].column!r} of {own[0].origin!r} and {base!r} "
            f"by {ours[0].column!r} of {ours[0].origin!r}: neither was made from the other. Join "
            "each with the stage above both"
            + ("" if as_lists else ", or return to it with children='list'")
        )
    if deep is own and len(own) > len(ours):
        known = own[len(own) - len(ours) :]
        return JoinSide(node, own[0].column, known[0].column, tuple(k.column for k in known), node)
    return JoinSide(node, own[0].column, shared[0].column, tuple(key.column for key in own))


def _check_same_id(
    location: str,
    shape: JoinShape,
    base: Mapping[str, pa.Field | None],
    own: Mapping[str, pa.Field | None],
    side: JoinSide,
) -> None:
    ours, theirs = (shape.id, side.match) if side.label else (side.match, side.id)
    expected, found = base.get(ours), own.get(theirs)
    if expected is not None and found is not None and expected.type != found.type:
        raise SchemaError(
            f"{location}: the id {ours!r} is {expected.type} in {shape.base!r} and {found.type} in "
            f"{side.node!r}; materialize both again from the same source"
        )


def with_upstream(pipeline: Pipeline, node: str) -> set[str]:
    """Return a node and all nodes upstream of it."""
    above = () if node == SOURCE else pipeline[node].spec.upstream
    return {node}.union(*(with_upstream(pipeline, upstream) for upstream in above))


def check_id(location: str, id: str, schema: pa.Schema) -> None:
    """Validate the id column of a schema."""
    fix = "Name the id column in vd.Pipeline(id=...)"
    require_columns(location, [id], schema.names, fix=fix)
    kind = schema.field(id).type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (pa.types.is_integer(kind) or text):
        raise SchemaError(
            f"{location}: the id {id!r} is {kind}; expected whole numbers or text. Cast it in the "
            "source, for example to VARCHAR, or write "
            f"id={{'{id}_id': [{id!r}]}}"
        )
