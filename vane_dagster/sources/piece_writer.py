"""`PieceWriter`: writes rows into Parquet files of the store, of a bounded size."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import repetitive
from vane_dagster.storage.stored_tables import INGESTED, ParquetRows, Piece, tables

PIECE_BYTES = 32 << 20
"""Bytes in memory at which a piece is written."""
GROUP_ROWS = 1 << 14
"""Rows of a row group, which is decoded as a whole."""


class _Held(NamedTuple):
    """Consecutive rows of a file that are not written yet.

    Attributes:
        pieces: The pieces of the file, also of one that is read again.
        position: The position of the piece among them.
        rows: The rows.
    """

    pieces: list[Piece]
    position: int
    rows: list[pa.Table]


class PieceWriter:
    """Writes the rows of files into files of the store, of at most about `PIECE_BYTES`.

    Rows of one schema share a file, also those of several small files. One file is written while
    more rows are read. Used in a ``with`` statement, after which all is written.
    """

    def __init__(self, root: Location, folder: str = INGESTED) -> None:
        self._location, self._folder = tables(root).child(folder), folder
        # Not that of the version: another attempt, or another run, may divide the rows otherwise.
        self._name = secrets.token_hex(16)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._write: Future[None] | None = None
        self._count = self._bytes = 0
        self._key = ""
        self._pieces: dict[str, list[Piece]] = {}
        self._held: dict[pa.Schema, list[_Held]] = {}

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        with self._thread:
            if kind is None:
                self._flush()
                if self._write is not None:
                    self._write.result()

    def begin(self, key: str) -> None:
        """Note that the rows of a file follow, from the first one on."""
        self._key, self._pieces[key] = key, []

    def write(self, rows: pa.Table) -> None:
        """Write the next rows of the file."""
        if not rows.num_rows:
            return
        pieces = self._pieces[self._key]
        held = self._held.setdefault(rows.schema, [])
        if held and held[-1].pieces is pieces and held[-1].position == len(pieces) - 1:
            held[-1].rows.append(rows)
        else:
            held.append(_Held(pieces, len(pieces), [rows]))
            pieces.append(Piece(self._key, 0, 0, ()))
        self._bytes += rows.nbytes
        if self._bytes >= PIECE_BYTES:
            self._flush()

    def pieces(self, key: str) -> tuple[Piece, ...]:
        """Return the rows of a file, once all is written."""
        return tuple(self._pieces[key])

    def _flush(self) -> None:
        for held in self._held.values():
            name, start = f"{self._name}-{self._count}.parquet", 0
            self._count += 1
            for pieces, position, parts in held:
                rows, size = sum(map(len, parts)), sum(part.nbytes for part in parts)
                place = ParquetRows(f"{self._folder}/{name}", start, start + rows)
                pieces[position] = Piece(pieces[position].identity, rows, size, (place,))
                start = place.stop
            if self._write is not None:
                self._write.result()
            merged = pa.concat_tables([part for each in held for part in each.rows])
            self._write = self._thread.submit(_write, self._location, name, merged)
        self._held, self._bytes = {}, 0


def _write(folder: Location, name: str, rows: pa.Table) -> None:
    """Write rows under the name of a new file."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        row_group_size=GROUP_ROWS,
        use_dictionary=[*repetitive(rows)],
        write_statistics=False,
        write_page_checksum=True,
    )
    folder.write(name, memoryview(sink.getvalue()))
