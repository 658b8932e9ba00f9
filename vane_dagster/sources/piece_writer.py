"""`PieceWriter`: writes rows into Parquet files of the store, of a bounded size."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import DICTIONARY_BYTES
from vane_dagster.storage.stored_tables import ParquetRows, tables

PIECE_BYTES = 32 << 20
"""Bytes in memory at which a file is written."""
GROUP_ROWS = 1 << 14
"""Rows of a row group, which is decoded as a whole."""


@dataclass
class _Held:
    """Rows of a file of the store that is not written yet.

    Attributes:
        name: The file's name, which no other attempt or run uses.
        rows: The number of rows.
        parts: The rows.
    """

    name: str = field(default_factory=lambda: f"{secrets.token_hex(16)}.parquet")
    rows: int = 0
    parts: list[pa.Table] = field(default_factory=list)


class PieceWriter:
    """Writes rows into files of a folder of tables, of at most about `PIECE_BYTES`.

    Rows of one schema share a file, also those of several small files. One file is written while
    more rows are read. Used in a ``with`` statement, after which all is written.
    """

    def __init__(self, root: Location, folder: str) -> None:
        self._location, self._folder = tables(root).child(folder), folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._write: Future[None] = self._thread.submit(lambda: None)
        self._held: dict[pa.Schema, _Held] = {}
        self._bytes = 0

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        with self._thread:
            if kind is None:
                self._flush()
                self._write.result()

    def write(self, rows: pa.Table) -> ParquetRows:
        """Write rows, and return where they are once all is written."""
        held = self._held.setdefault(rows.schema, _Held())
        start, held.rows = held.rows, held.rows + rows.num_rows
        held.parts.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= PIECE_BYTES:
            self._flush()
        return ParquetRows(f"{self._folder}/{held.name}", start, held.rows)

    def _flush(self) -> None:
        for held in self._held.values():
            self._write.result()
            merged = pa.concat_tables(held.parts)
            self._write = self._thread.submit(_write, self._location, held.name, merged)
        self._held, self._bytes = {}, 0


def _write(folder: Location, name: str, rows: pa.Table) -> None:
    """Write rows under the name of a new file."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        row_group_size=GROUP_ROWS,
        dictionary_pagesize_limit=DICTIONARY_BYTES,
        write_statistics=False,
        write_page_checksum=True,
    )
    folder.write(name, memoryview(sink.getvalue()))
