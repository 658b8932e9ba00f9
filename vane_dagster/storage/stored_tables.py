"""Tables in the store that are not output of a stage: rows of memory, of datasets, of Ray Data.

Below ``<root>/~tables``:

| path | content |
|---|---|
| ``made/<identity>/*.parquet`` | rows of a table that the driver has written |
| ``made/<identity>-<attempt>/*.parquet`` | rows of a table that one execution on Ray has written |
| ``files/<partition>/*.parquet`` | rows of versions of files of another format |
| ``records/<identity>/<name>.json`` | where the rows of a table are |

A table's identity is that of its content, or of the code that makes it. Each run that needs a table
writes its record again, so the record's age tells garbage collection when it was last needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from vane_dagster.storage.codec import Codec, parse_file, read_file
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import FileSpan

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store

TABLES = "~tables"
"""The folder below the store's root; no pipeline has such a name."""
MADE = "made"
INGESTED = "files"
RECORDS = "records"
SCHEME = "table://"
"""The prefix of the URLs that identify tables in manifests."""
COMPLETE = "complete"
"""The name of a table's record, which is written last."""
_SUFFIX = ".json"


class ParquetRows(NamedTuple):
    """Rows `start` to `stop` of a Parquet file.

    Attributes:
        name: The file's path below the folder of tables.
        start: First row.
        stop: The row after the last.
    """

    name: str
    start: int
    stop: int


class Piece(NamedTuple):
    """Consecutive rows of a table.

    Attributes:
        identity: What identifies the rows: a digest of them, or the name of a file that is written
            once.
        rows: Their number.
        bytes: Their size in memory, estimated.
        places: Where they are, in order.
    """

    identity: str
    rows: int
    bytes: int
    places: tuple[ParquetRows, ...]


@dataclass(frozen=True)
class StoredTable:
    """A table as its record describes it.

    Attributes:
        schema: Its columns.
        pieces: Its rows, in order.
        facts: What else is known of its pieces, by their identity, as JSON values.
    """

    schema: pa.Schema
    pieces: tuple[Piece, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """The files that it needs, as paths below the folder of tables."""
        return {place.name for piece in self.pieces for place in piece.places}


_CODEC = Codec(StoredTable)


def clipped(places: Iterable[ParquetRows], start: int, stop: int) -> Iterator[ParquetRows]:
    """Yield the part of some places that is a range of all of their rows."""
    first = 0
    for place in places:
        last = first + place.stop - place.start
        low, high = max(first, start), min(last, stop)
        if low < high:
            move = place.start - first
            yield place._replace(start=low + move, stop=high + move)
        first = last


def joined(places: Iterable[ParquetRows]) -> list[ParquetRows]:
    """Return places, of which those that follow each other in a file are one."""
    merged: list[ParquetRows] = []
    for place in places:
        if merged and (merged[-1].name, merged[-1].stop) == place[:2]:
            merged[-1] = merged[-1]._replace(stop=place.stop)
        else:
            merged.append(place)
    return merged


def tables(root: StoragePath) -> StoragePath:
    """Return the folder of tables in a store."""
    return root.child(TABLES)


def table_url(identity: str) -> str:
    """Return the URL that identifies a table in manifests."""
    return SCHEME + identity


def identity_of(url: str) -> str | None:
    """Return the identity of the table that a URL identifies; None for another URL."""
    return url[len(SCHEME) :] if url.startswith(SCHEME) else None


def kept_types(store: Store, pipeline: str, source: str) -> pa.Schema | None:
    """Return the types of a pipeline's source; None if none were kept."""
    types = store.read_record((pipeline,), _types_file(source), _CODEC.load)
    return types and types.schema


def keep_types(store: Store, pipeline: str, source: str, types: pa.Schema) -> pa.Schema:
    """Keep the types of a pipeline's source, for ever; those of the first of several runs."""
    store.root.child(pipeline).create(_types_file(source), _CODEC.dumps(StoredTable(types)))
    return kept_types(store, pipeline, source) or types


def write_record(root: StoragePath, identity: str, name: str, table: StoredTable) -> None:
    """Write a record, which keeps its files from garbage collection for some time."""
    _records(root, identity).write(name + _SUFFIX, _CODEC.dumps(table))


def create_record(
    root: StoragePath, identity: str, table: StoredTable, name: str = COMPLETE
) -> StoredTable:
    """Write a record once: of several runs that write it, the first one's is that of all."""
    folder = _records(root, identity)
    folder.create(name + _SUFFIX, _CODEC.dumps(table))
    return read_record(root, identity, name) or table


def read_record(root: StoragePath, identity: str, name: str = COMPLETE) -> StoredTable | None:
    """Return a table by one of its records; None if there is no such record."""
    return read_file(_records(root, identity), name + _SUFFIX, _CODEC.load)


def borrow(store: Store, identity: str, name: str = COMPLETE) -> StoredTable | None:
    """Return a table by one of its records; a branch copies it from its fallback if it lacks it.

    So a collection there takes nothing from the branch.
    """
    root, table = store.root, read_record(store.root, identity, name)
    if table is not None or store.fallback is None:
        return table
    fallback = store.fallback.root
    table = read_record(fallback, identity, name)
    if table is None or not has_all_rows(fallback, table):
        return None
    places = sorted(table.files)
    in_threads(lambda each: tables(root).write(each, tables(fallback).read(each)), places)
    return create_record(root, identity, table, name)


def has_all_rows(root: StoragePath, table: StoredTable) -> bool:
    """Return whether the store has all files of a table."""
    folders = {name.rpartition("/")[0] for name in table.files}
    present = {f"{each}/{name}" for each in folders for name in tables(root).child(each).names()}
    return table.files <= present


def record_of(path: str) -> str | None:
    """Return the identity of the table that a file describes; None for another file."""
    parts = path.split("/")
    is_record = len(parts) == 3 and parts[0] == RECORDS and parts[2].endswith(_SUFFIX)
    return parts[1] if is_record else None


def files_of(data: bytes, url: str) -> set[str]:
    """Return the files that a record names, as paths below the folder of tables."""
    return parse_file(data, url, _CODEC.load).files


def dumped_places(first: int, places: Iterable[ParquetRows]) -> str:
    """Return where rows are as a text, for the `detail` of their `FileSpan`."""
    return json.dumps([first, [*places]], separators=(",", ":"))


def places_of(span: FileSpan) -> Iterator[ParquetRows]:
    """Yield where the rows of a span are."""
    if not span.detail:
        raise FileNotFoundError(span.url)
    first, records = json.loads(span.detail)
    return clipped(map(ParquetRows._make, records), span.start - first, span.stop - first)


def _types_file(source: str) -> str:
    return f"types-{source}{_SUFFIX}"


def _records(root: StoragePath, identity: str) -> StoragePath:
    return root.child(TABLES, RECORDS, identity)
