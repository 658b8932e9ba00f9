"""Ids that are computed while rows are read: of several columns, or of file and row number.

A source whose rows have no id column is wrapped in an `IdentifiedSource`, which adds one. The rest
of the package sees a source with an id column of text.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._secrets import masked
from vane_dagster.errors import DefinitionError, IntegrityError, SchemaError, SourceError, names
from vane_dagster.sources.base import (
    ROW_ERROR,
    WHOLE_FILE,
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    default_rule,
    find_row,
)
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.types.id_texts import (
    is_identifying,
    joined,
    joined_values,
    kind_name,
    parse_kind,
    plain_kind,
)
from vane_dagster.types.sql import computed_from, passed_through, quote, unused

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

COMPOSITE_ID, ROW_ID = "id", "row_id"
"""The default names of the two kinds of computed id columns."""

COPIED = ("kind", "version", "asset", "allow_empty", "default_id", "names_files")
"""The attributes that a source with a computed id has of the source itself."""

_MARK = "#"
_DIGITS = 18

S = TypeVar("S", bound=SourceReader)
Spanned = TypeVar("Spanned", FileSpan, FragmentRecord)


@dataclass(frozen=True)
class IdRule(ABC):
    """How the id of a row is computed.

    Attributes:
        name: The id column.
    """

    name: str

    @property
    @abstractmethod
    def record(self) -> str:
        """The rule without its name, as JSON: part of fragment keys and manifests."""

    def schema(self, source: pa.Schema, location: str) -> pa.Schema:
        """Return the schema of a source with the id column.

        Args:
            source: The schema of the source.
            location: The pipeline, for messages.

        Raises:
            SchemaError: If the source has a column of that name, or lacks one of the id.
        """
        if taken := [name for name in source.names if name.lower() == self.name.lower()]:
            raise SchemaError(
                f"{location}: the id column {self.name!r} would be computed, but the source has a "
                f"column {taken[0]!r}. Give the id another name, as id={self.renamed()}, or use "
                f"that column, as id={taken[0]!r}"
            )
        return pa.schema([pa.field(self.name, pa.string()), *source])

    @abstractmethod
    def kinds(self, source: pa.Schema) -> Mapping[str, pa.DataType]:
        """Return the columns of the source that an id is computed from, with their types."""

    @abstractmethod
    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        """Compute the ids of a fragment.

        Args:
            fragment: The fragment.
            columns: The columns of `kinds`, of all of its rows.
        """

    def places(self, fragment: FragmentRecord) -> Sequence[str]:
        """Return what ids depend on besides the rows: a source may know rows by content alone."""
        return ()

    def may_hold(self, fragment: FragmentRecord, id: str) -> bool:
        """Return whether a fragment may have a row with an id.

        Args:
            fragment: The fragment.
            id: The id.
        """
        return True

    @abstractmethod
    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        """Return the id of a row that a user names.

        Args:
            id: The id: its text, a tuple of the columns' values, or a dict of them.
            fragments: The fragments of a manifest.

        Raises:
            ValueError: If it is none of these. The message says what is expected.
        """

    def renamed(self) -> str:
        """Return the declaration with another name, for messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class CompositeId(IdRule):
    """An id of several columns; see `composite_id`.

    Attributes:
        name: The id column.
        columns: The columns, in order.
    """

    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r}, made of {names(self.columns, 20)}"

    @property
    def record(self) -> str:
        return json.dumps({"columns": self.columns})

    def schema(self, source: pa.Schema, location: str) -> pa.Schema:
        require_columns(f"{location}: id: the source", self.columns, source.names)
        for name in self.columns:
            kind = source.field(name).type
            if not is_identifying(plain_kind(kind)):
                raise SchemaError(
                    f"{location}: column {name!r} of the id is {kind}; expected numbers, text, "
                    "bytes, bools, dates or times. Name another column, or cast it in the source"
                )
        return super().schema(source, location)

    def kinds(self, source: pa.Schema) -> Mapping[str, pa.DataType]:
        return {name: plain_kind(source.field(name).type) for name in self.columns}

    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        return joined([columns.column(name) for name in self.columns])

    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        if isinstance(id, str):
            return id
        kinds = (_kinds(fragments[0]) if fragments else None) or {}
        expected = f"({', '.join(self.columns)})"
        if isinstance(id, Mapping):
            if set(id) != set(self.columns):
                raise ValueError(f"it has the columns {names(id)}; expected {names(self.columns)}")
            values = [id[name] for name in self.columns]
        elif isinstance(id, (tuple, list)) and len(id) == len(self.columns):
            values = list(id)
        else:
            raise ValueError(f"expected the values of {expected} as a tuple or dict, or their text")
        try:
            return joined_values(values, [kinds.get(name) for name in self.columns])
        except (ValueError, TypeError, pa.ArrowException) as error:
            types = ", ".join(f"{name} {kind}" for name, kind in kinds.items()) or expected
            raise ValueError(f"expected values of {types}: {error}") from error

    def renamed(self) -> str:
        listed = ", ".join(map(repr, self.columns))
        return f"vd.composite_id({listed}, name={'_'.join((*self.columns, 'id'))!r})"


@dataclass(frozen=True)
class RowId(IdRule):
    """An id of file and row number; see `row_id`.

    Attributes:
        name: The id column.
    """

    def __str__(self) -> str:
        return f"{self.name!r}, made of file and row number"

    @property
    def record(self) -> str:
        return json.dumps({"row": True})

    def kinds(self, source: pa.Schema) -> Mapping[str, pa.DataType]:
        return {}

    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        chunks = []
        for span in fragment.spans:
            numbers = pa.array(np.arange(span.start, span.stop)).cast(pa.string())
            chunks.append(pc.binary_join_element_wise(f"{span.url}{_MARK}", numbers, ""))
        return pa.chunked_array(chunks, pa.string())

    def places(self, fragment: FragmentRecord) -> Sequence[str]:
        return [f"{span.url}{_MARK}{span.start}" for span in fragment.spans]

    def may_hold(self, fragment: FragmentRecord, id: str) -> bool:
        url, row = row_of(id) or ("", -1)
        return any(span.url == url and span.start <= row < span.stop for span in fragment.spans)

    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        text = f"{id[0]}{_MARK}{id[1]}" if isinstance(id, tuple) and len(id) == 2 else id
        if not isinstance(text, str):
            raise ValueError(
                f"expected file and row number, as ('s3://bucket/a.parquet', 17), or their text, "
                f"as 's3://bucket/a.parquet{_MARK}17'"
            )
        is_path = text.startswith("/") and not any(self.may_hold(f, text) for f in fragments)
        return f"file://{text}" if is_path else text

    def renamed(self) -> str:
        return "vd.row_id(name='row_number_id')"


@known_keywords("vd.composite_id")
def composite_id(*columns: str, name: str = COMPOSITE_ID) -> CompositeId:
    r"""Declare several columns as the id of a source's rows; ``Pipeline(id=[...])`` is the same.

    The rows get a text column that joins the values by ``|``, as ``a|3``. Different values have
    different texts: ``|`` in a value becomes ``\|``, and ``\`` becomes ``\\``. Times are in ISO
    form, those with a time zone in UTC, and bytes are hexadecimal.

    Args:
        *columns: The columns, in order. A row with a null in one of them has no id.
        name: The id column that every stage has.

    Raises:
        DefinitionError: If there is no column, one is repeated, or `name` is one of them.
    """
    location = "vd.composite_id"
    if not columns or not all(isinstance(column, str) and column for column in columns):
        raise DefinitionError(
            f"{location}: columns are {columns!r}; expected names, as "
            "vd.composite_id('doc', 'page')"
        )
    folded = [column.lower() for column in columns]
    if twice := [column for column in columns if folded.count(column.lower()) > 1]:
        raise DefinitionError(f"{location}: {names(twice)} are the same column; name each once")
    _check_name(location, name)
    if name.lower() in folded:
        raise DefinitionError(
            f"{location}: name is {name!r}, which is one of the columns. Give the id another name, "
            f"as {CompositeId(name, columns).renamed()}"
        )
    return CompositeId(name, columns)


@known_keywords("vd.row_id")
def row_id(name: str = ROW_ID) -> RowId:
    """Declare that rows are identified by their file and their number in it.

    The rows get a text column, as ``s3://bucket/file.parquet#17`` for the 18th row of the file. A
    row keeps its id as long as its file keeps its URL and its order.

    Args:
        name: The id column that every stage has.

    Raises:
        DefinitionError: If the name is no text, or empty.
    """
    _check_name("vd.row_id", name)
    return RowId(name)


IdLike = Union[str, Sequence[str], IdRule]


def as_id(location: str, id: Any) -> str | IdRule:
    """Convert the `id` of a pipeline to a column's name, or to a rule.

    Args:
        location: The pipeline, for messages.
        id: A name, a list of names, or the result of `composite_id` or `row_id`.

    Raises:
        DefinitionError: If it is none of these, or invalid.
    """
    if isinstance(id, IdRule) or (isinstance(id, str) and id):
        return id
    if id is composite_id or id is row_id:
        raise DefinitionError(f"{location}: id is the function vd.{id.__name__}; call it")
    if not isinstance(id, (list, tuple)) or not id:
        raise DefinitionError(
            f"{location}: id is {id!r}; expected the name of the id column, a list of several "
            "columns, or vd.row_id() if no column identifies a row"
        )
    try:
        rule = composite_id(*id)
    except DefinitionError as error:
        raise DefinitionError(f"{location}: id is {id!r}. {error}") from None
    return rule.columns[0] if len(rule.columns) == 1 else rule


def identified(source: Source, rule: IdRule) -> IdentifiedSource:
    """Return a source whose rows have a computed id.

    Args:
        source: The source.
        rule: How the id is computed. It replaces an earlier one.
    """
    return IdentifiedSource(plain(source), rule)


def plain(source: S) -> S:
    """Return a source, or its reader, as it was declared, without a computed id."""
    return cast(S, source.inner) if isinstance(source, IdentifiedReader) else source


def rule_of(record: str, name: str) -> IdRule:
    """Return the rule of a manifest.

    Args:
        record: `IdRule.record`.
        name: The id column.
    """
    columns = json.loads(record).get("columns")
    return CompositeId(name, tuple(columns)) if columns else RowId(name)


def row_of(id: Any) -> tuple[str, int] | None:
    """Return the file and row number of an id of `RowId`; None for another text."""
    url, mark, number = str(id).rpartition(_MARK)
    is_number = mark and len(number) <= _DIGITS and number.isascii() and number.isdigit()
    return (url, int(number)) if is_number and number == str(int(number)) else None


@dataclass(frozen=True)
class IdentifiedReader(SourceReader):
    """Reads rows with a computed id.

    Attributes:
        inner: Reads the rows.
        rule: How the id is computed.
    """

    inner: SourceReader
    rule: IdRule

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_contents", self.inner.reads_contents)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.inner.options_for(url)

    def current(self, file: FileRecord) -> FileRecord:
        return self.inner.current(file)

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read the columns that the id is computed from too."""
        kinds = self._types(fragment, context.location)
        inner = _with_columns(_without(schema, self.rule.name), kinds)
        planned = fragment.stop - fragment.start
        own = _unwrapped(fragment)
        if not inner.names:
            ids = self.rule.ids(own, pa.table({}))
            return pa.table({self.rule.name: ids}).select(schema.names)
        rows = self.inner.read(own, inner, context)
        if rows.num_rows != planned and not kinds:
            raise IntegrityError(
                f"{context.location}: {rows.num_rows} rows were read of {own}, expected {planned} "
                "by what was planned, so their numbers are not known. Write the file again"
            )
        columns = rows.select(list(kinds)).cast(_with_columns(pa.schema([]), kinds))
        rows = rows.append_column(self.rule.name, self.rule.ids(own, columns))
        errors = [ROW_ERROR] if ROW_ERROR in rows.column_names else []
        return rows.select([*schema.names, *errors])

    def project(
        self,
        fragment: FragmentRecord,
        schema: pa.Schema,
        columns: Sequence[tuple[str, str]],
        where: str | None,
        context: ReadContext,
    ) -> pa.Table | None:
        """Compute SQL in the source if the id is computed from columns and is only passed on."""
        kinds = self._types(fragment, context.location)
        passed = passed_through(columns, schema)
        ids = [name for name, column in passed.items() if column == self.rule.name]
        others = [(name, expression) for name, expression in columns if name not in ids]
        if not kinds or self.rule.name in computed_from(others, where, schema):
            return None
        taken = [name for name, _ in columns]
        parts = {name: unused(f"id_of_{name}", taken) for name in kinds}
        rows = self.inner.project(
            _unwrapped(fragment),
            _with_columns(_without(schema, self.rule.name), kinds),
            [*others, *((part, quote(name)) for name, part in parts.items())],
            where,
            context,
        )
        if rows is None:
            return None
        made = pa.table({name: rows.column(part) for name, part in parts.items()})
        computed = self.rule.ids(fragment, made.cast(_with_columns(pa.schema([]), kinds)))
        found = {name: computed if name in ids else rows.column(name) for name in taken}
        return pa.table(found)

    def locate(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row by the number in its id, or by reading the columns of the id.

        Args:
            spans: The spans to search.
            column: The id column.
            id: The id.

        Returns:
            The span, and the row's number in its file; None if no span has the row.
        """
        if not isinstance(self.rule, RowId):
            return find_row(self, spans, column, id)
        url, row = row_of(id) or ("", -1)
        for span in spans:
            is_inside = span.url == url and span.start <= row < span.stop
            if is_inside and (span.stop < WHOLE_FILE or row < self._length(url)):
                return span, row
        return None

    def _length(self, url: str) -> int:
        """Return the number of rows that a file has now, as far as it is known."""
        return WHOLE_FILE

    def _types(self, fragment: FragmentRecord, location: str) -> Mapping[str, pa.DataType]:
        """Return the types of the columns that the id is computed from."""
        kinds = _kinds(fragment)
        if kinds is None:
            raise SourceError(
                f"{location}: the types of the id {self.rule.name!r} are not recorded in {fragment}"
            )
        return kinds


@dataclass(frozen=True)
class IdentifiedSource(IdentifiedReader, Source):
    """A source whose rows have a computed id, and otherwise those of another source.

    Attributes:
        inner: The source.
        rule: How the id is computed.
    """

    inner: Source

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in COPIED:
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def id_rule(self) -> str:
        return self.rule.record

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        self.inner.validate(location, partitions_def)
        if isinstance(self.rule, RowId) and masked(self.place) != self.place:
            raise DefinitionError(
                f"{location}: vd.row_id() would put the secret in the URL {masked(self.place)!r} "
                "into every id. Give credentials as storage_options, or name columns as the id"
            )

    def describe(self) -> str:
        return self.inner.describe()

    def url_for(self, partition_key: str | None) -> str:
        return self.inner.url_for(partition_key)

    @property
    def place(self) -> str:
        return self.inner.place

    @property
    def urls(self) -> tuple[str, ...]:
        return self.inner.urls

    def schema(self, location: str) -> pa.Schema:
        return self.rule.schema(self.inner.schema(location), location)

    def of_pipeline(self, name: str) -> Source:
        return replace(self, inner=self.inner.of_pipeline(name))

    def bind(self, store: Store) -> Source:
        return replace(self, inner=self.inner.bind(store))

    def needs_cluster(self, partitions: Sequence[str | None]) -> bool:
        return self.inner.needs_cluster(partitions)

    @property
    def splitting(self) -> str:
        return f"{self.inner.splitting}\nid {self.rule.record}"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        return self.inner.list_files(partitions, location)

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        return self.inner.missing(partition, location)

    def required(
        self, listed: Listed, partition: str | None, location: str
    ) -> tuple[FileRecord, ...]:
        return self.inner.required(listed, partition, location)

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        table = self.inner.split(files, rule, location, partition)
        schema, kinds = self.rule.schema(table.schema, location), self.rule.kinds(table.schema)
        for name in kinds:
            table.require_everywhere(name, location)
        types = json.dumps({name: kind_name(kind) for name, kind in kinds.items()})
        keyed = (_keyed(f, self.rule, types) for f in table.fragments)
        return replace(table, schema=schema, fragments=tuple(keyed))

    def for_workers(self) -> SourceReader:
        return IdentifiedReader(self.inner.for_workers(), self.rule)

    def find(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        return self.locate(spans, column, id)

    def _types(self, fragment: FragmentRecord, location: str) -> Mapping[str, pa.DataType]:
        """Read the types in the file if they are not recorded, as for a file that has changed."""
        if isinstance(self.rule, RowId):
            return {}
        if (kinds := _kinds(fragment)) is not None:
            return kinds
        return self.rule.kinds(self._split_now(fragment.url).schema)

    def _length(self, url: str) -> int:
        return max(
            (span.stop for f in self._split_now(url).fragments for span in f.spans), default=0
        )

    def _split_now(self, url: str) -> SourceTable:
        file = self.inner.current(FileRecord(url, 0, ""))
        return self.inner.split([file], default_rule([]), "trace")


def _check_name(location: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise DefinitionError(f"{location}: name is {name!r}; expected the name of the id column")


def _without(schema: pa.Schema, name: str) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != name])


def _with_columns(schema: pa.Schema, kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    new = [pa.field(name, kind) for name, kind in kinds.items() if name not in schema.names]
    return pa.schema([*schema, *new])


def _keyed(fragment: FragmentRecord, rule: IdRule, types: str) -> FragmentRecord:
    """Return a fragment whose identity includes the definition of its ids.

    The types of the id's columns are in the detail of its first span.
    """
    places = rule.places(fragment)
    text = "\n".join((fragment.identity, rule.record, types, *places))
    identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    fragment = replace(fragment, identity=identity)
    first, *rest = fragment.spans
    spans = [_wrapped(first, types), *(_wrapped(span, "") for span in rest)]
    if fragment.files:
        return replace(fragment, files=tuple(spans))
    return replace(fragment, detail=spans[0].detail)


def _wrapped(span: FileSpan, types: str) -> FileSpan:
    return replace(span, detail=f"{types}\n{span.detail}" if types or span.detail else "")


def _unwrapped(fragment: FragmentRecord) -> FragmentRecord:
    """Return a fragment with the details of the source itself."""

    def inner(spanned: Spanned) -> Spanned:
        return replace(spanned, detail=spanned.detail.partition("\n")[2])

    return inner(replace(fragment, files=tuple(map(inner, fragment.files))))


def _kinds(fragment: FragmentRecord) -> Mapping[str, pa.DataType] | None:
    """Return the types of the id's columns that a fragment records; None if it records none."""
    text = fragment.spans[0].detail.partition("\n")[0]
    return {name: parse_kind(kind) for name, kind in json.loads(text).items()} if text else None
