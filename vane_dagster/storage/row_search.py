"""Search for rows of Parquet files by id, reading as little as the footers allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from vane_dagster._dataclass import dataclass
from vane_dagster._lazy import pc, pq
from vane_dagster.errors import StoreError, described
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.types.schema import plain_type

Row = tuple[Any, ...]
"""A row's key values: its id, then the ids of the rows it was made from."""


@dataclass(frozen=True)
class RowFile:
    """A Parquet file: its folder, and its name there."""

    folder: Location
    name: str

    @property
    def url(self) -> str:
        """The file's URL."""
        return self.folder.file_url(self.name)


@dataclass(frozen=True)
class Found:
    """A row that was found: its file, its number in the file counted from 0, and its keys."""

    file: RowFile
    row: int
    keys: Row


def find(file: RowFile, keys: Sequence[str], position: int, wanted: Collection[Any]) -> list[Found]:
    """Return the rows of a file with one of the wanted keys.

    Only row groups with matching statistics are read, and of these only the key column. The other
    keys are read only from row groups with a match.
    """
    found: list[Found] = []
    if not wanted:
        return found
    with _opened(file) as parquet:
        for group, first in _groups(parquet.metadata, file, keys[position], wanted):
            column = _read(parquet, group, [keys[position]]).column(0)
            matches = pc.is_in(column, value_set=_values(wanted, column.type))
            numbers = pc.indices_nonzero(matches)
            if not len(numbers):
                continue
            rows = _read(parquet, group, keys).take(numbers).select(list(keys))
            values = zip(*(column.to_pylist() for column in rows.columns))
            found += [Found(file, first + n, k) for n, k in zip(numbers.to_pylist(), values)]
    return found


def find_any(
    files: Sequence[RowFile], keys: Sequence[str], wanted: Any
) -> tuple[int, Found] | None:
    """Return the row with an id that is in at most one of several files."""
    failed: Exception | None = None
    with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
        futures = [threads.submit(find, file, keys, 0, [wanted]) for file in files]
        for index, future in enumerate(futures):
            try:
                if found := future.result():
                    for other in futures:
                        other.cancel()
                    return index, found[0]
            except (FileNotFoundError, StoreError) as error:
                failed = failed or error
    if failed is not None:
        raise failed
    return None


def row_at(file: RowFile, keys: Sequence[str], row: int) -> Found:
    """Return the row with a number."""
    with _opened(file) as parquet:
        found = _plain(parquet.read(columns=list(keys))).slice(row, 1).select(list(keys))
    if not found.num_rows:
        raise StoreError(f"{file.url!r} has no row {row}; was it rewritten?")
    return Found(file, row, tuple(column[0].as_py() for column in found.columns))


def _values(wanted: Collection[Any], kind: pa.DataType) -> pa.Array:
    """Return the values that a column can hold: ids may be of a wider type than one file's."""
    if not pa.types.is_integer(kind):
        return pa.array(list(wanted), kind)
    low = -(1 << (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
    high = low + (1 << kind.bit_width)
    return pa.array([value for value in wanted if low <= value < high], kind)


@contextmanager
def _opened(file: RowFile) -> Iterator[pq.ParquetFile]:
    # No read-ahead: the ranges to read are known exactly.
    options = {} if file.folder.is_local else {"cache_type": "none"}
    try:
        with (
            file.folder.fs.open(file.folder.file(file.name), "rb", **options) as stream,
            pq.ParquetFile(stream, pre_buffer=False) as parquet,
        ):
            yield parquet
    except (FileNotFoundError, StoreError):
        raise
    except Exception as error:  # from pyarrow, or from a file system's driver
        raise StoreError(
            f"{file.url!r} cannot be read: {described(error)}. Check that it is whole "
            "and that the credentials reach it"
        ) from error


def _read(parquet: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
    return _plain(
        parquet.read_row_group(group, columns=list(dict.fromkeys(columns)), use_threads=False)
    )


def _plain(table: pa.Table) -> pa.Table:
    return table.cast(
        pa.schema([field.with_type(plain_type(field.type)) for field in table.schema])
    )


def _groups(
    footer: pq.FileMetaData, file: RowFile, column: str, wanted: Collection[Any]
) -> Iterator[tuple[int, int]]:
    """Yield row groups that may have a value, by their statistics, each with its first row."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    if column not in paths:
        raise StoreError(f"{file.url!r} has no column {column!r}; was it rewritten?")
    index = paths.index(column)
    first = 0
    for group in range(footer.num_row_groups):
        if _may_hold(footer.row_group(group).column(index), wanted):
            yield group, first
        first += footer.row_group(group).num_rows


def _may_hold(column: pq.ColumnChunkMetaData, wanted: Collection[Any]) -> bool:
    try:
        statistics = column.statistics
        if statistics is None or not statistics.has_min_max:
            return True
        return any(statistics.min <= value <= statistics.max for value in wanted)
    except (TypeError, UnicodeDecodeError, pa.ArrowException):
        return True  # statistics of another type, or texts cut within a character
