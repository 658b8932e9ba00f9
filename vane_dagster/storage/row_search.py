"""Search for rows of parts by id, which reads the columns of ids alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import read_part

Row = tuple[Any, ...]
"""A row's key values: its id, then the ids of the rows it was made from."""


@dataclass(frozen=True)
class Found:
    """A row that was found.

    Attributes:
        folder: The folder of its part.
        name: The part's file name.
        row: Its number in the file, counted from 0.
        keys: Its keys.
    """

    folder: StoragePath
    name: str
    row: int
    keys: Row

    @property
    def url(self) -> str:
        """The part's URL."""
        return self.folder.file_url(self.name)


def find(
    folder: StoragePath, name: str, keys: Sequence[str], position: int, wanted: Collection[Any]
) -> list[Found]:
    """Return the rows of a part with one of the wanted keys."""
    if not wanted:
        return []
    rows = read_part(folder, name, keys).select(list(keys))
    column = rows.column(position)
    numbers = pc.indices_nonzero(pc.is_in(column, value_set=_values(wanted, column.type)))
    values = zip(*(column.to_pylist() for column in rows.take(numbers).columns))
    return [Found(folder, name, n, k) for n, k in zip(numbers.to_pylist(), values)]


def row_at(folder: StoragePath, name: str, keys: Sequence[str], row: int) -> Found:
    """Return the row with a number."""
    table = read_part(folder, name, keys).select(list(keys)).slice(row, 1)
    if not table.num_rows:
        raise StoreError(f"{folder.file_url(name)!r} has no row {row}; was it rewritten?")
    return Found(folder, name, row, tuple(column[0].as_py() for column in table.columns))


def _values(wanted: Collection[Any], kind: pa.DataType) -> pa.Array:
    """Return the values that a column can hold: ids may be of a wider type than one file's."""
    if not pa.types.is_integer(kind):
        return pa.array(list(wanted), kind)
    low = -(1 << (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
    high = low + (1 << kind.bit_width)
    return pa.array([value for value in wanted if low <= value < high], kind)
