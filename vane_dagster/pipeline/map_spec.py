"""Stages that call a function, a class or a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import pyarrow as pa

from vane_dagster._keywords import require_columns
from vane_dagster.errors import CodeIdentityError, DefinitionError, SchemaError, names
from vane_dagster.fingerprint.code import CodeIdentity, code_identity, worker_code_digest
from vane_dagster.fingerprint.local_file import FileContent, LocalFile
from vane_dagster.pipeline.contracts import (
    CALL,
    TYPES,
    BatchCall,
    Contract,
    RequestsCall,
    RowCall,
    TypesCall,
)
from vane_dagster.pipeline.identity import (
    arguments,
    component,
    environment,
    local_files,
)
from vane_dagster.pipeline.keys import IdColumn, Keys
from vane_dagster.pipeline.options import Cardinality, IncludeColumns, OnError
from vane_dagster.pipeline.records import Children, Workers
from vane_dagster.pipeline.stage_kind import (
    KIND,
    SOURCE,
    Column,
    Schemas,
    StageKind,
    Table,
    check_id,
    named_in,
)
from vane_dagster.pipeline.texts import texts_of
from vane_dagster.pipeline.udf import Udf
from vane_dagster.sources.raw_files import PATH
from vane_dagster.storage.manifest import Component
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

_T = TypeVar("_T")
Versions = Mapping[str, Mapping[str, str]]
"""The versions of what values of columns name, by the column and the value."""
_OF_ROWS = frozenset(
    {"adapters", "cardinality", "columns", "id", "include_columns", "on_error", "per_row", "schema"}
)
"""The options that concern rows and columns, which row keys have apart."""
_ASYNC_SLOTS = 16
_USUAL_BATCH_SIZE = 4096
_NAME_INPUTS = (
    'Name the column of a parameter, like columns={"parameter": "column"}; annotate it as vd.File '
    "for the row's file, or as a dict for the whole row"
)


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
    def bundle(self) -> dict[str, float]:
        """The resources that a worker reserves, by Ray's names."""
        return self.workers._bundle(f"stage {self.name!r}", self.gpus)

    @property
    def concurrency(self) -> tuple[int, int] | None:
        """Minimum and maximum number of workers; None if it depends on the cluster."""
        return self.workers.count if isinstance(self.workers.count, tuple) else None

    @property
    def max_concurrency(self) -> int:
        """Calls in flight in one worker, for an async UDF."""
        return self.workers.max_concurrency or 1

    @property
    def usual_batch_size(self) -> int:
        """Rows of a batch, or for estimates a default if `batch_size` is None."""
        return self.batch_size or _USUAL_BATCH_SIZE

    @property
    def rows_in_flight(self) -> int | None:
        """Requests in flight in one worker, if each row is one."""
        if not isinstance(self.contract, RequestsCall):
            return None
        return self.max_concurrency * (self.batch_size or 1)

    @property
    def max_fragment_rows(self) -> int | None:
        """Rows of a fragment unless the user says how many; None for as many as of other stages."""
        return None

    @property
    def on_driver(self) -> bool:
        """Whether its workers have to be subprocesses on the driver's machine."""
        return (self.workers.execution_backend or "").startswith("subprocess")

    @property
    def ranks(self) -> int:
        """Number of equal shares of the bundle that may be on several nodes."""
        return 1

    @property
    def in_batches(self) -> bool:
        """Whether its requests go into batches of a provider."""
        return False

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
        """Tasks that a worker has at the same time.

        Async code has several, so that it has calls while some tasks wait for their slowest one.
        """
        return _ASYNC_SLOTS if self.udf.is_async else 1

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

    def why_by_fragment(self, pipeline: Pipeline) -> str:
        """See `StageKind`."""
        if self.reuse.mode != "fragments":
            return ""
        return self._obstacle_to_row_reuse(pipeline) or ""

    def _obstacle_to_row_reuse(self, pipeline: Pipeline) -> str | None:
        """Return why rows cannot be reused one by one, and the fix; None if they can."""
        id = pipeline._key_columns(self.upstream[0])[0]
        if not self.columns:
            return "a row is found by the columns that the code reads; name them in columns="
        has_files = pipeline.source.names_files
        if self._takes_files and not has_files:
            return (
                "the code opens files that its source does not list, so their changes are not "
                'noticed; use reuse="fragments"'
            )
        if has_files and self.runs_own_code and (column := self._names_file(pipeline)):
            return (
                f"the code may open the file of the source that {column!r} was made from, and its "
                f'rows do not tell which; name {PATH!r} in columns= too, or use reuse="fragments"'
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

    def _names_file(self, pipeline: Pipeline) -> str | None:
        """Return a column made from the path that the code reads; None if it reads the path too."""
        if self._takes_files or not self.columns or PATH in self.columns:
            return None
        tables = pipeline._tables()

        def is_made_from_path(node: str, column: str) -> bool:
            if node == SOURCE:
                return column == PATH
            spec, reads = pipeline[node].spec, tables[node].reads.get(column)
            is_open = any(u != SOURCE and not tables[u].is_complete for u in spec.upstream)
            if is_open and not reads:  # it may pass through
                return True
            is_passed = reads == [(spec.upstream[0], column)]
            if spec.runs_udf and not is_passed and (not reads or spec.columns is None):
                reads = [(spec.upstream[0], each) for each in spec.columns or (PATH,)]
            return any(is_made_from_path(*each) for each in reads or ())

        return next((c for c in self.columns if is_made_from_path(self.upstream[0], c)), None)

    @property
    def _takes_files(self) -> bool:
        return isinstance(self.contract, RowCall) and bool(self.contract.files)

    def file_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the key columns with paths of files of the source that the code opens.

        The row key has the versions of these files.
        """
        opened = {PATH} if pipeline.source.names_files and self.runs_own_code else set()
        opened.update(self._opened_columns(pipeline))
        return tuple(name for name in self.key_columns(pipeline) if name in opened)

    def _opened_columns(self, pipeline: Pipeline) -> Iterable[str]:
        """The input columns whose values the code gets as files."""
        if not isinstance(self.contract, RowCall):
            return ()
        inputs = dict(self.contract.inputs or ())
        return [inputs[name] for name in self.contract.files]

    def row_versions(self, files: Mapping[LocalFile, FileContent]) -> Versions:
        """Return the versions of what the values of columns name, which are part of row keys."""
        return {}

    def columns_given(self, pipeline: Pipeline) -> tuple[str, ...] | None:
        """Return the input columns that the code gets; None for all.

        If rows are reused, they are those that the stage names. Else the id is always among them.
        """
        if self.columns is None:
            return None
        id = pipeline._key_columns(self.upstream[0])[0]
        always = () if self.reuse.mode == "rows" else (id,)
        return tuple(dict.fromkeys((*always, *self.columns)))

    def key_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the input columns whose values are the row key, in the order in which they count.

        With `per_row`, the id is the first of them. Without reuse of rows there are none.
        """
        if self.reuse.mode != "rows" or self.columns is None:
            return ()
        listed = dict.fromkeys(self.columns)
        own = [pipeline._key_columns(self.upstream[0])[0]] if self.reuse.per_row else []
        return (*own, *(sorted(listed) if self._reads_by_name else listed))

    def computation(self, pipeline: Pipeline, components: Iterable[Component]) -> Sequence[object]:
        """Return everything that changes what the code makes of a row, besides rows and schema."""
        called = [each for each in components if each.kind != "option" or each.name not in _OF_ROWS]
        return [
            *(each.digest for each in called if each.kind != KIND),
            self.pinned,
            self.makes_rows,
            self.may_filter,  # else a row that was dropped would be missing where none may be
        ]

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """For a fan-out, a new id and the parents' ids; else the keys of the input."""
        first = pipeline._keys_of(self.upstream[0])
        if self.children is None:
            return first
        if self.children.id in {key.column for key in first}:
            raise DefinitionError(
                f"{pipeline._location(self.name)}: id={self.children.id!r}, but a row has "
                f"{names(key.column for key in first)} already; give the new id another name"
            )
        return (IdColumn(self.children.id, self.name), *first)

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The declared columns, and the ids and columns that pass through."""
        if self.is_inferred:
            raise SchemaError(
                f"{pipeline._location(self.name)}: its columns are unknown until its first run "
                f"infers them (schema={INFER!r}). Declare {self.schema_argument}; preview() prints "
                "it as code"
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
            needed = dict.fromkeys([*self._needed, *named_in(self.include)])
            by_row = isinstance(self.contract, RowCall) and self.contract.inputs is not None
            owner, fix = f"{location}: {upstream!r}", _NAME_INPUTS if by_row else ""
            require_columns(owner, needed, first.fields, fix=fix)
        ids = pipeline._key_columns(upstream)
        own = pipeline._key_columns(self.name)
        fields: dict[str, pa.Field | None] = {}
        reads: dict[str, list[Column]] = {}
        if self.children is not None:
            fields[own[0]] = pa.field(own[0], pa.string())  # unless the user declares it
            reads[own[0]] = [(upstream, ids[0])]
        included = first.fields if self.include is True else self.include
        carried = [name for name in included if name not in {*own, *self.schema.names}]
        for name in (*ids, *carried):
            fields[name], reads[name] = first.fields.get(name), [(upstream, name)]
        for name in ids:
            given = fields[name]
            declared = self.schema.field(name).type if name in self.schema.names else None
            if given is not None and declared is not None and declared != given.type:
                raise SchemaError(
                    f"{location}: schema declares the id {name!r} as {declared}, but its type in "
                    f"the input is {given.type}; ids keep their type. Leave it out of the schema, "
                    "or cast it in the source"
                )
        read = [(upstream, c) for c in (first.fields if self.columns is None else self.columns)]
        made: dict[str, pa.Field | None] = {
            each.name: None if self.is_inferred else each for each in self.schema
        }
        reads = dict.fromkeys(made, read) | reads
        fields = {name: each for name, each in fields.items() if name not in made} | made
        if self.failures.on_error == "null":
            if ERROR_COLUMN in fields:
                raise SchemaError(
                    f"{location}: on_error='null' adds a column {ERROR_COLUMN!r}, which "
                    "include_columns already passes through; name the columns to include"
                )
            fields[ERROR_COLUMN], reads[ERROR_COLUMN] = pa.field(ERROR_COLUMN, pa.string()), read
        if (key := fields[own[0]]) is not None:
            check_id(location, own[0], pa.schema([key]))
        passes_all = self.include is not True or first.is_complete
        return Table(fields, reads, passes_all and bool(self.schema.names or not self.is_inferred))

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

    def with_workers(self, location: str, gpus: float, workers: Workers) -> MapBatchesSpec:
        """Return the spec with other workers; DefinitionError if the stage cannot have them."""
        workers._bundle(location, gpus)
        made = replace(self, gpus=gpus, workers=workers)
        _ = made.ranks
        return made

    def with_schema(self, pipeline: Pipeline, schema: pa.Schema) -> MapBatchesSpec:
        """Return the stage with its inferred schema."""
        location = pipeline._location(self.name)
        spec = replace(self, schema=parse_schema(schema, location), is_inferred=False, pinned=True)
        spec.check_schema(location)
        return spec

    def inferred_schema(
        self, pipeline: Pipeline, inferred: pa.Schema, given: pa.Schema, rows: int
    ) -> pa.Schema:
        """Return the schema to pin: the columns returned, without those that pass through."""
        location = pipeline._location(self.name)
        ids = pipeline._key_columns(self.name)
        passed = {*(ids[1:] if self.makes_rows else ids)}
        passed |= {*(given.names if self.include is True else self.include)}
        made = [field for field in inferred if field.name not in passed]
        if not made:
            raise SchemaError(
                f"{location}: its schema cannot be inferred, because {self.udf.name} returned no "
                f"new column for the first {rows:,} rows. Declare the schema"
            )
        if untyped := [field.name for field in made if is_untyped(field.type)]:
            raise SchemaError(
                f"{location}: the type of {names(untyped)} cannot be inferred, because the first "
                f"{rows:,} rows have only nulls, empty lists or empty dicts there. Declare the "
                f"schema: schema={schema_code(made)}"
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
                f"{location}: on_error='null' adds a column {ERROR_COLUMN!r}; rename the column "
                "with this name in the schema, and use 'quarantine' for a one-to-many stage"
            )

    def made_columns(self, pipeline: Pipeline) -> tuple[str, ...]:
        """All declared columns except ids; they are what a copy of a row copies."""
        ids = {*pipeline._key_columns(self.name)}
        return tuple(name for name in self.schema.names if name not in ids)

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """All declared columns except ids."""
        if self.is_inferred:
            return None
        made = self.made_columns(pipeline)
        return pa.schema([self.schema.field(name) for name in made])

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
        seen = self.columns if self._reads_by_name else self.columns_given(pipeline)
        return [
            *(Component(*part) for part in self.code(pipeline).parts),
            *arguments(pipeline, self, "fn_constructor"),
            *arguments(pipeline, self, "fn"),
            component("option", "method", self.udf.method),
            component("option", "batch_format", self.contract.keyed),
            *environment(self),
            component("option", "schema", schema),
            component("option", "columns", seen),
            component("option", "cardinality", self.cardinality),
            component("option", "per_row", self.reuse.per_row),
            component("option", "id", self.children and self.children.id),
            # The other two differ only in error handling.
            component("option", "on_error", self.failures.on_error == "null"),
            component("option", "include_columns", self.include),
        ]

    def texts(self, pipeline: Pipeline) -> Mapping[str, str]:
        """The code and the arguments."""
        udf = self.udf
        placed = {"fn_constructor_args": udf.constructor_args} if udf.constructor_args else {}
        return texts_of(
            {**self.code(pipeline).texts(), **placed},
            fn_constructor_kwargs=udf.constructor_kwargs,
            fn_kwargs=udf.kwargs,
        )

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Return the identity of its function or class."""
        return self._identified(pipeline, code_identity)

    def superseded(self, pipeline: Pipeline) -> str:
        """Return a warning if a notebook has redefined its code; empty if it has not."""
        udf, files = self.udf, local_files(pipeline, self)
        if (latest := udf.redefined()) is None:
            return ""
        with suppress(CodeIdentityError):
            now = code_identity(latest, version=udf.version, files=files)
            if now == (declared := self.code(pipeline)) or now.texts() == declared.texts():
                return ""
        return (
            f"{pipeline._location(self.name)}: {udf.name} was defined again after the stage was "
            "declared, which has the former definition. Execute the cell of the stage again"
        )

    def worker_code(self, pipeline: Pipeline) -> str:
        """Return the digest of the code that its workers import."""
        return self._identified(pipeline, worker_code_digest)

    def _identified(self, pipeline: Pipeline, identify: Callable[..., _T]) -> _T:
        udf, files = self.udf, local_files(pipeline, self)
        try:
            return identify(udf.target, version=udf.version, files=files)
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._location(self.name)}: {error}") from error

    def local_files(self) -> Mapping[LocalFile, FileContent]:
        """Those among the arguments of the function or class."""
        return {file: file.content() for file in self.udf.local_files}

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
