"""Ids that are computed while rows are read: of several columns, or of file and row number.

Sources know nothing of them: the planner adds the id column to the rows that a source has split,
and whoever reads the rows reads them through the pipeline's `IdRule`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np
import pyarrow as pa

from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._lazy import pc
from vane_dagster._secrets import masked
from vane_dagster.errors import DefinitionError, IntegrityError, SchemaError, names
from vane_dagster.sources.base import (
    ROW_ERROR,
    WHOLE_FILE,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    find_row,
)
from vane_dagster.storage.manifest import FileSpan, FragmentRecord
from vane_dagster.types.id_texts import (
    is_identifying,
    joined,
    joined_values,
    kind_name,
    parse_kind,
    plain_kind,
)

COMPOSITE_ID, ROW_ID = "id", "row_id"
"""The default names of the two kinds of computed id columns."""

_MARK = "#"
_DIGITS = 18


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

    def of(self, source: pa.Schema) -> IdRule:
        """Return the rule with the types of the columns that ids are computed from."""
        return self

    def schema(self, source: pa.Schema, location: str) -> pa.Schema:
        """Return the schema of a source with the id column."""
        if taken := [name for name in source.names if name.lower() == self.name.lower()]:
            raise SchemaError(
                f"{location}: the id column {self.name!r} would be computed, but the source has a "
                f'column {taken[0]!r}. Give the id another name, as id={{"name": [...]}} or '
                f"vd.row_id(name), or use that column, as id={taken[0]!r}"
            )
        return pa.schema([pa.field(self.name, pa.string()), *source])

    @property
    def read_columns(self) -> pa.Schema:
        """The columns of the source that ids are computed from."""
        return pa.schema([])

    @abstractmethod
    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        """Compute the ids of a fragment."""

    def read(
        self,
        reader: SourceReader,
        fragment: FragmentRecord,
        schema: pa.Schema,
        context: ReadContext,
    ) -> pa.Table:
        """Read columns of a fragment and compute its ids; see `SourceReader.read`."""
        needed = self.read_columns
        own = [field for field in schema if field.name != self.name]
        inner = pa.schema([*own, *(field for field in needed if field.name not in schema.names)])
        if not inner.names:
            ids = self.ids(fragment, pa.table({}))
            return pa.table({self.name: ids}).select(schema.names)
        rows = reader.read(fragment, inner, context)
        planned = fragment.stop - fragment.start
        if rows.num_rows != planned and not needed.names:
            raise IntegrityError(
                f"{context.location}: {rows.num_rows} rows were read of {fragment}, expected "
                f"{planned} by what was planned, so their numbers are not known. Write the file "
                "again"
            )
        columns = rows.select(needed.names).cast(needed)
        rows = rows.append_column(self.name, self.ids(fragment, columns))
        errors = [ROW_ERROR] if ROW_ERROR in rows.column_names else []
        return rows.select([*schema.names, *errors])

    def find(
        self, source: SourceReader | None, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row by its id; see `SourceReader.find`."""
        assert source is not None, "ids of columns are found in the source"
        return find_row(functools.partial(self.read, source), spans, column, id)

    def places(self, fragment: FragmentRecord) -> Sequence[str]:
        """Return what ids depend on besides the rows: a source may know rows by content alone."""
        return ()

    @abstractmethod
    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        """Return the id of a row that a user names."""


@dataclass(frozen=True)
class CompositeId(IdRule):
    """An id of several columns; see `composite_id`.

    Attributes:
        name: The id column.
        columns: The columns, in order.
        types: Their types, once they are known; see `of`.
    """

    columns: tuple[str, ...]
    types: tuple[pa.DataType, ...] = ()

    def __str__(self) -> str:
        return f"{self.name!r}, made of {names(self.columns, 20)}"

    @property
    def record(self) -> str:
        return json.dumps({"columns": self.columns, "types": [*map(kind_name, self.types)]})

    def of(self, source: pa.Schema) -> CompositeId:
        kinds = tuple(plain_kind(source.field(name).type) for name in self.columns)
        return replace(self, types=kinds)

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

    @property
    def read_columns(self) -> pa.Schema:
        return pa.schema(list(zip(self.columns, self.types)))

    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        return joined([columns.column(name) for name in self.columns])

    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        if isinstance(id, str):
            return id
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
            return joined_values(values, self.types)
        except (ValueError, TypeError, pa.ArrowException) as error:
            types = ", ".join(f"{name} {kind}" for name, kind in zip(self.columns, self.types))
            raise ValueError(f"expected values of {types}: {error}") from error


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

    def check(self, source: Source, location: str) -> None:
        """Check that no secret becomes part of the ids."""
        if (shown := masked(source.place)) != source.place:
            raise DefinitionError(
                f"{location}: vd.row_id() would put the secret in the URL {shown!r} into every "
                "id. Give credentials as storage_options, or name columns as the id"
            )

    def ids(self, fragment: FragmentRecord, columns: pa.Table) -> pa.ChunkedArray:
        chunks = []
        for span in fragment.spans:
            numbers = pa.array(np.arange(span.start, span.stop)).cast(pa.string())
            chunks.append(pc.binary_join_element_wise(f"{span.url}{_MARK}", numbers, ""))
        return pa.chunked_array(chunks, pa.string())

    def places(self, fragment: FragmentRecord) -> Sequence[str]:
        return [f"{span.url}{_MARK}{span.start}" for span in fragment.spans]

    def find(
        self, source: SourceReader | None, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row by the number in its id; none in a file that was changed."""
        url, row = row_of(id) or ("", -1)
        for span in spans:
            if span.url == url and span.start <= row < span.stop < WHOLE_FILE:
                return span, row
        return None

    def may_hold(self, fragment: FragmentRecord, id: str) -> bool:
        """Return whether a fragment has the row of an id."""
        return self.find(None, fragment.spans, pa.field(self.name, pa.string()), id) is not None

    def text(self, id: Any, fragments: Sequence[FragmentRecord]) -> str:
        text = f"{id[0]}{_MARK}{id[1]}" if isinstance(id, tuple) and len(id) == 2 else id
        if not isinstance(text, str):
            raise ValueError(
                f"expected file and row number, as ('s3://bucket/a.parquet', 17), or their text, "
                f"as 's3://bucket/a.parquet{_MARK}17'"
            )
        is_path = text.startswith("/") and not any(self.may_hold(f, text) for f in fragments)
        return f"file://{text}" if is_path else text


def composite_id(location: str, columns: Any, name: Any = COMPOSITE_ID) -> CompositeId:
    r"""Return the rule for an id of several columns.

    The rows get a text column that joins the values by ``|``, as ``a|3``. Different values have
    different texts: ``|`` in a value becomes ``\|``, and ``\`` becomes ``\\``. Times are in ISO
    form, those with a time zone in UTC, and bytes are hexadecimal.
    """
    is_list = isinstance(columns, (list, tuple)) and bool(columns)
    if not is_list or not all(isinstance(column, str) and column for column in columns):
        raise DefinitionError(
            f'{location}: the columns of the id are {columns!r}; expected names, as ["doc", "page"]'
        )
    folded = [column.lower() for column in columns]
    if twice := [column for column in columns if folded.count(column.lower()) > 1]:
        raise DefinitionError(
            f"{location}: {names(twice)} of the id are the same column; name each once"
        )
    _check_name(location, name)
    if name.lower() in folded:
        raise DefinitionError(
            f"{location}: the id is named {name!r}, which is one of its columns. Give it another "
            f"name, as id={{'{name}_text': {list(columns)!r}}}"
        )
    return CompositeId(name, tuple(columns))


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


IdLike = Union[str, Sequence[str], Mapping[str, Sequence[str]], IdRule]


def as_id(location: str, id: Any) -> str | IdRule:
    """Convert the `id` of a pipeline to a column's name, or to a rule."""
    if isinstance(id, IdRule) or (isinstance(id, str) and id):
        return id
    if id is row_id:
        raise DefinitionError(f"{location}: id is the function vd.row_id; call it")
    if isinstance(id, Mapping) and len(id) == 1:
        ((name, columns),) = id.items()
        return composite_id(location, columns, name)
    if not isinstance(id, (list, tuple)) or not id:
        raise DefinitionError(
            f"{location}: id is {id!r}; expected the name of the id column, a list of several "
            "columns, or vd.row_id() if no column identifies a row"
        )
    rule = composite_id(location, id)
    return rule.columns[0] if len(rule.columns) == 1 else rule


def with_ids(table: SourceTable, rule: IdRule | None, location: str) -> SourceTable:
    """Return the rows of a partition with the ids that a pipeline gives them."""
    if rule is None:
        return table
    schema = rule.schema(table.schema, location)
    rule = rule.of(table.schema)
    keyed = []
    for fragment in table.fragments:
        text = "\n".join((fragment.identity, rule.record, *rule.places(fragment)))
        identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        keyed.append(replace(fragment, identity=identity))
    return replace(table, schema=schema, fragments=tuple(keyed))


def rule_of(record: str, name: str) -> IdRule:
    """Return the rule of a manifest."""
    found = json.loads(record)
    if "columns" not in found:
        return RowId(name)
    return CompositeId(name, tuple(found["columns"]), tuple(map(parse_kind, found["types"])))


def row_of(id: Any) -> tuple[str, int] | None:
    """Return the file and row number of an id of `RowId`; None for another text."""
    url, mark, number = str(id).rpartition(_MARK)
    is_number = mark and len(number) <= _DIGITS and number.isascii() and number.isdigit()
    return (url, int(number)) if is_number and number == str(int(number)) else None


def _check_name(location: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise DefinitionError(f"{location}: name is {name!r}; expected the name of the id column")
