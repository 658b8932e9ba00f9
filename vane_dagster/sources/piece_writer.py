"""`PieceWriter`: writes rows into Parquet files of the store, of a bounded size."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import repetitive
from vane_dagster.storage.stored_tables import INGESTED, ParquetRows, Piece, joined, tables

PIECE_BYTES = 32 << 20
"""Bytes in memory at which a piece is written."""
_GROUP_ROWS = 1 << 16


class PieceWriter:
    """Writes the rows of files into files of the store, of at most about `PIECE_BYTES`.

    Rows of one schema share a file, also those of several small files. One file is written while
    more rows are read. Used in a ``with`` statement, after which all is written.

    Args:
        root: The store's root.
        folder: The folder of the files, as a path below the folder of tables.
    """

    def __init__(self, root: Location, folder: str = INGESTED) -> None:
        self._location, self._folder = tables(root).child(folder), folder
        # Not that of the version: another attempt, or another run, may divide the rows otherwise.
        self._name = secrets.token_hex(16)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._write: Future[None] | None = None
        self._count = self._bytes = 0
        self._key = ""
        self._held: dict[pa.Schema, list[tuple[int, pa.Table]]] = {}
        self._places: list[tuple[str, Piece | None]] = []  # in the order of the rows

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        with self._thread:
            if kind is None:
                self._flush_all()
                if self._write is not None:
                    self._write.result()

    def begin(self, key: str) -> None:
        """Note that the rows of a file follow, from the first one on."""
        self._places = [("" if each == key else each, piece) for each, piece in self._places]
        self._key = key

    def write(self, rows: pa.Table) -> None:
        """Write the next rows of the file."""
        if not rows.num_rows:
            return
        held = self._held.setdefault(rows.schema, [])
        held.append((len(self._places), rows))
        self._places.append((self._key, None))
        self._bytes += rows.nbytes
        if self._bytes >= PIECE_BYTES:
            self._flush_all()

    def pieces(self, key: str) -> tuple[Piece, ...]:
        """Return the rows of a file, once all is written."""
        found: list[Piece] = []
        for piece in (piece for each, piece in self._places if each == key and piece):
            places = joined([*found[-1].places, *piece.places]) if found else ()
            if len(places) == 1:
                rows, size = found[-1].rows + piece.rows, found[-1].bytes + piece.bytes
                piece = Piece(key, rows, size, tuple(places))
                found.pop()
            found.append(piece)
        return tuple(found)

    def _flush_all(self) -> None:
        for schema in list(self._held):
            self._flush(schema)
        self._bytes = 0

    def _flush(self, schema: pa.Schema) -> None:
        held = self._held.pop(schema)
        name = f"{self._name}-{self._count}.parquet"
        self._count += 1
        start = 0
        for index, rows in held:
            stop = start + rows.num_rows
            key, place = self._places[index][0], ParquetRows(f"{self._folder}/{name}", start, stop)
            self._places[index] = (key, Piece(key, rows.num_rows, rows.nbytes, (place,)))
            start = stop
        if self._write is not None:
            self._write.result()
        merged = pa.concat_tables([rows for _, rows in held])
        self._write = self._thread.submit(_write, self._location, name, merged)


def _write(folder: Location, name: str, rows: pa.Table) -> None:
    """Write rows under the name of a new file."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        row_group_size=_GROUP_ROWS,
        use_dictionary=[*repetitive(rows)],
        write_statistics=False,
        write_page_checksum=True,
    )
    folder.write(name, memoryview(sink.getvalue()))
