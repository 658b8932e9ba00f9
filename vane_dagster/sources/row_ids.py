"""Ids that are computed while rows are read: of several columns, or of file and row number.

Sources know nothing of them: the planner adds the id column to the rows that a source has split,
and whoever reads the rows reads them through the pipeline's `IdRule`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import text
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._lazy import pc
from vane_dagster._secrets import masked
from vane_dagster.errors import DefinitionError, IntegrityError, SchemaError, names
from vane_dagster.sources.base import (
    ROW_ERROR,
    Source,
    SourceReader,
    SourceTable,
    find_row,
)
from vane_dagster.storage.manifest import FileSpan, FragmentRecord
from vane_dagster.types.id_texts import (
    is_identifying,
    joined,
    parse_kind,
)

COMPOSITE_ID, ROW_ID = "id", "row_id"
"""The default names of the two kinds of computed id columns."""

_MARK = "#"
_ROW = re.compile(rf"(.*){_MARK}(0|[1-9][0-9]{{0,17}})", re.DOTALL)


@dataclass(frozen=True)
class IdRule:
    """How the id of a row is computed: from some columns, or from file and row number.

    Attributes:
        name: The id column.
        columns: The columns, in order; empty for file and row number.
        types: Their types, once they are known; see `of`.
    """

    name: str
    columns: tuple[str, ...] = ()
    types: tuple[pa.DataType, ...] = ()

    @property
    def record(self) -> str:
        """The rule without its name, as JSON: part of fragment keys and manifests."""
        if not self.columns:
            return json.dumps({"row": True})
        return json.dumps({"columns": self.columns, "types": [*map(str, self.types)]})

    def of(self, source: pa.Schema) -> IdRule:
        """Return the rule with the types of the columns that ids are computed from."""
        kinds = tuple(source.field(name).type for name in self.columns)
        return replace(self, types=kinds)

    def schema(self, source: pa.Schema, location: str) -> pa.Schema:
        """Return the schema of a source with the id column."""
        require_columns(f"{location}: id: the source", self.columns, source.names)
        for name in self.columns:
            kind = source.field(name).type
            if not is_identifying(kind):
                raise SchemaError(
                    f"{location}: column {name!r} of the id is {kind}; expected numbers, text, "
                    "bytes, bools, dates or times. Name another column, or cast it in the source"
                )
        if taken := [name for name in source.names if name.lower() == self.name.lower()]:
            raise SchemaError(
                f"{location}: the id column {self.name!r} would be computed, but the source has a "
                f'column {taken[0]!r}. Give the id another name: id={{"name": [...]}} or '
                f"vd.row_id(name), or use that column: id={taken[0]!r}"
            )
        return pa.schema([pa.field(self.name, pa.string()), *source])

    def check(self, source: Source, location: str) -> None:
        """Check that no secret becomes part of the ids."""
        if not self.columns and (shown := masked(source.place)) != source.place:
            raise DefinitionError(
                f"{location}: vd.row_id() would put the secret in the URL {shown!r} into every "
                "id. Give credentials as storage_options, or name columns as the id"
            )

    def read(
        self,
        reader: SourceReader,
        fragment: FragmentRecord,
        schema: pa.Schema,
        location: str,
    ) -> pa.Table:
        """Read columns of a fragment and compute its ids; see `SourceReader.read`."""
        needed = pa.schema(list(zip(self.columns, self.types)))
        own = [field for field in schema if field.name != self.name]
        inner = pa.schema([*own, *(field for field in needed if field.name not in schema.names)])
        if not inner.names:
            return pa.table({self.name: _numbered(fragment)}).select(schema.names)
        rows = reader.read(fragment, inner, location)
        if needed.names:
            columns = rows.select(needed.names).cast(needed).columns
            ids = joined(columns)
        else:
            ids = _numbered(fragment)
            if rows.num_rows != len(ids):
                raise IntegrityError(
                    f"{location}: {rows.num_rows} rows were read of {fragment}, but the plan has "
                    f"{len(ids)}, so their numbers are not known. Write the file again"
                )
        errors = [ROW_ERROR] if ROW_ERROR in rows.column_names else []
        return rows.append_column(self.name, ids).select([*schema.names, *errors])

    def find(
        self, source: SourceReader | None, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row by its id; see `SourceReader.find`. A row number is found without reading."""
        if self.columns:
            assert source is not None, "ids of columns are found in the source"
            return find_row(functools.partial(self.read, source), spans, column, id)
        url, row = row_of(id) or ("", -1)
        held = (span for span in spans if span.url == url and span.start <= row < span.stop)
        return next(((span, row) for span in held), None)


def _numbered(fragment: FragmentRecord) -> pa.ChunkedArray:
    """Return the files and row numbers of a fragment."""
    chunks = []
    for span in fragment.spans:
        numbers = pa.array(np.arange(span.start, span.stop)).cast(pa.string())
        chunks.append(pc.binary_join_element_wise(f"{span.url}{_MARK}", numbers, ""))
    return pa.chunked_array(chunks, pa.string())


def composite_id(location: str, columns: Any, name: Any = COMPOSITE_ID) -> IdRule:
    r"""Return the rule for an id of several columns.

    The rows get a text column that joins the values by ``|``, such as ``a|3``. Different values
    have different texts: ``|`` in a value becomes ``\|``, and ``\`` becomes ``\\``. Times are in
    ISO form, those with a time zone in UTC, and bytes are hexadecimal.
    """
    is_list = isinstance(columns, (list, tuple)) and bool(columns)
    if not is_list or not all(isinstance(column, str) and column for column in columns):
        raise DefinitionError(
            f'{location}: the id has columns {columns!r}; expected names such as ["doc", "page"]'
        )
    text(location, "name", name, "the name of the id column")
    folded = [column.lower() for column in (*columns, name)]
    if twice := [column for column in (*columns, name) if folded.count(column.lower()) > 1]:
        raise DefinitionError(
            f"{location}: {names(twice)} of the id {name!r} are the same column. Name each column "
            f"once, and choose another name for the id: id={{'{name}_text': {list(columns)!r}}}"
        )
    return IdRule(name, tuple(columns))


@known_keywords("vd.row_id")
def row_id(name: str = ROW_ID) -> IdRule:
    """Declare that rows are identified by their file and their number in it.

    The rows get a text column, such as ``s3://bucket/file.parquet#17`` for the 18th row of the
    file. A row keeps its id as long as its file keeps its URL and its order.

    The id identifies the position of a row, not its content: if a file is rewritten, its rows are
    computed again, and inserting a row changes the ids of all rows after it. A moved file has new
    ids.
    Tables that rewrite their files (Delta, Iceberg, Lance) and rows in memory get new ids with
    every change.

    Args:
        name: The id column that every stage has.

    Raises:
        DefinitionError: If the name is not a text, or empty.
    """
    text("vd.row_id", "name", name, "the name of the id column")
    return IdRule(name)


IdLike = Union[str, Sequence[str], Mapping[str, Sequence[str]], IdRule]


def as_id(location: str, id: Any) -> str | IdRule:
    """Convert the `id` of a pipeline to a column's name, or to a rule."""
    if isinstance(id, IdRule) or (isinstance(id, str) and id):
        return id
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
    schema, record = rule.schema(table.schema, location), rule.of(table.schema).record
    keyed = []
    for fragment in table.fragments:
        # A source may know rows by content alone.
        places = (
            [] if rule.columns else [f"{span.url}{_MARK}{span.start}" for span in fragment.spans]
        )
        text = "\n".join((fragment.identity, record, *places))
        identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        keyed.append(replace(fragment, identity=identity))
    return replace(table, schema=schema, fragments=tuple(keyed))


def rule_of(record: str, name: str) -> IdRule:
    """Return the rule of a manifest."""
    fields = json.loads(record)
    types = tuple(map(parse_kind, fields.get("types", ())))
    return IdRule(name, tuple(fields.get("columns", ())), types)


def row_of(id: Any) -> tuple[str, int] | None:
    """Return the file and row number of an id made of them; None for another text."""
    match = _ROW.fullmatch(str(id))
    return (match[1], int(match[2])) if match else None
