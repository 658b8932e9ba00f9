"""`RowsSource`: rows that the driver holds or can read, identified by their content.

The driver alone imports this module. A run copies rows that workers cannot reach into the store.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import SourceError, names
from vane_dagster.sources.row_blocks import BLOCK_ROWS, blocks
from vane_dagster.sources.stored_table_source import StoredTableSource, write_blocks
from vane_dagster.storage.stored_tables import Piece, Place, StoredTable

_one_at_a_time = threading.RLock()

Positions = range | npt.NDArray[np.int64]
"""Numbers of rows, in the order of the rows."""


class Rows(ABC):
    """Rows in an order that does not change, with plain types."""

    def __init__(self, schema: pa.Schema, count: int, partition_column: str | None) -> None:
        self.schema, self.count, self._partition_column = schema, count, partition_column
        self._blocks: dict[str | None, tuple[Piece, ...]] = {}

    @abstractmethod
    def take(self, positions: Positions) -> pa.Table:
        """Return some rows."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """Return the values of a column, of all rows."""

    def places(self, positions: Positions) -> Sequence[Place] | None:
        """Return where workers can read the rows of a block; None to copy those of all blocks."""
        return None

    def blocks(self, partition: str | None) -> tuple[Piece, ...]:
        """Return the blocks of a partition's rows, which are read once in a process."""
        if partition not in self._blocks:
            self._blocks[partition] = tuple(block for block, _ in blocks(self.chunks(partition)))
        return self._blocks[partition]

    def chunks(self, partition: str | None) -> Iterator[pa.Table]:
        """Yield the rows of a partition, in a part of the memory that all need."""
        positions = self.positions.get(partition, range(0))
        for start in range(0, len(positions), BLOCK_ROWS):
            yield self.take(positions[start : start + BLOCK_ROWS])

    @cached_property
    def positions(self) -> Mapping[str | None, Positions]:
        """The rows of each partition that has some."""
        if self._partition_column is None:
            return {None: range(self.count)}
        column = self.column(self._partition_column)
        try:
            texts = column.cast(pa.string())
        except pa.ArrowException as error:
            raise SourceError(
                f"partition_column {self._partition_column!r} is {column.type}, which has no text; "
                "expected a column of strings, numbers, dates or booleans"
            ) from error
        if texts.null_count:
            raise SourceError(
                f"partition_column {self._partition_column!r} is null in {texts.null_count:,} of "
                f"{len(texts):,} rows, which so belong to no partition. Fill it, or filter them out"
            )
        encoded = pc.dictionary_encode(texts.combine_chunks())
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        keys = encoded.dictionary.to_pylist()
        edges = np.searchsorted(codes[order], np.arange(len(keys) + 1))
        found = (order[low:high] for low, high in itertools.pairwise(edges))
        return {key: _as_range(positions) for key, positions in zip(keys, found)}


@dataclass(frozen=True, kw_only=True)
class RowsSource(StoredTableSource):
    """Rows that the driver holds or can read.

    Attributes:
        load: Returns the rows, always the same object.
        partition_column: The column whose value, as text, is the partition's key.
        label: What the rows are, for messages.
    """

    partitioned_by: ClassVar[str] = "partition_column='day'"
    load: Callable[[], Rows] = field(repr=False, compare=False)
    partition_column: str | None = None
    label: str

    @property
    def rows(self) -> Rows:
        """The rows."""
        with _one_at_a_time:
            return self.load()

    def url_for(self, partition_key: str | None) -> str:
        """Return what the rows are, for messages."""
        where = "" if partition_key is None else f", {self.partition_column} = {partition_key}"
        return f"{self.label}{where}"

    def schema(self, location: str) -> pa.Schema:
        return self.rows.schema

    def identity(self, partition: str | None) -> str | None:
        return _identity(self.rows.blocks(partition))

    def bytes_of(self, partition: str | None) -> int:
        return sum(block.bytes for block in self.rows.blocks(partition))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        if partition is None:
            return SourceError(
                f"{location}: {self.place} has no rows; give some, or allow_empty=True"
            )
        present = names(sorted(map(str, self.rows.positions)))
        return SourceError(
            f"{location}: {self.place} has no row with {self.partition_column!r} equal to "
            f"{partition!r}; as text, the column has {present}. Expected a value for each "
            "partition that is materialized; or give allow_empty=True"
        )

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Return where workers can read the rows, or copy them into the store."""
        rows, found, start = self.rows, [], 0
        for block in rows.blocks(partition):
            positions = rows.positions[partition][start : start + block.rows]
            if (places := rows.places(positions)) is None:
                found = [*write_blocks(self.store_root, identity, rows.chunks(partition))]
                break
            found.append(replace(block, places=tuple(places)))
            start += block.rows
        if _identity(found) != identity:
            raise SourceError(
                f"{location}: {self.url_for(partition)} has changed while the run was planned; its "
                f"rows were {identity} and are {_identity(found)}. Run the partition again, in a "
                "new process"
            )
        return StoredTable(rows.schema, tuple(found))


def _identity(found: Iterable[Piece]) -> str | None:
    """Return the identity of the rows of some blocks; None if there are none."""
    text = "\n".join(block.identity for block in found)
    return hashlib.sha256(text.encode()).hexdigest()[:40] if text else None


def _as_range(positions: npt.NDArray[np.int64]) -> Positions:
    """Return positions as a range if they are one."""
    if positions[-1] - positions[0] + 1 == len(positions):
        return range(int(positions[0]), int(positions[-1]) + 1)
    return positions
