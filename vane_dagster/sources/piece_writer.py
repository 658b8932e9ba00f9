"""`PieceWriter`: writes rows into Parquet files of the store, of a bounded size."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import DICTIONARY_BYTES, encoded
from vane_dagster.storage.stored_tables import ParquetRows, tables

PIECE_BYTES = 32 << 20
"""Bytes in memory at which a file is written."""
GROUP_ROWS = 1 << 14
"""Rows of a row group, which is decoded as a whole."""


class PieceWriter:
    """Writes rows into files of a folder of tables, of at most about `PIECE_BYTES`.

    Rows of one schema share a file, also those of several small files. One file is written while
    more rows are read. Used in a ``with`` statement, after which all is written.
    """

    def __init__(self, root: StoragePath, folder: str) -> None:
        self._path, self._folder = tables(root).child(folder), folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._write: Future[None] = self._thread.submit(lambda: None)
        # By schema, the name of a file that no other attempt or run uses, and its rows.
        self._held: dict[pa.Schema, tuple[str, list[pa.Table]]] = {}
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
        if rows.schema not in self._held:
            self._held[rows.schema] = f"{secrets.token_hex(16)}.parquet", []
        name, held = self._held[rows.schema]
        start = sum(map(len, held))
        held.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= PIECE_BYTES:
            self._flush()
        return ParquetRows(f"{self._folder}/{name}", start, start + len(rows))

    def _flush(self) -> None:
        for name, held in self._held.values():
            self._write.result()
            self._write = self._thread.submit(self._encode, name, pa.concat_tables(held))
        self._held, self._bytes = {}, 0

    def _encode(self, name: str, rows: pa.Table) -> None:
        data = encoded(
            rows,
            row_group_size=GROUP_ROWS,
            dictionary_pagesize_limit=DICTIONARY_BYTES,
            write_statistics=False,
        )
        self._path.write(name, data)
