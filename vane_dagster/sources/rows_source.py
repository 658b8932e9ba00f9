"""`RowsSource`: rows that the driver holds or can read, identified by their content.

The driver alone imports this module. A run copies the rows into the store.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import require_columns
from vane_dagster.errors import SourceError, names
from vane_dagster.sources.piece_writer import PieceWriter
from vane_dagster.sources.row_blocks import BLOCK_ROWS, blocks
from vane_dagster.sources.stored_table_source import StoredTableSource
from vane_dagster.storage.stored_tables import MADE, Piece, StoredTable

_one_at_a_time = threading.RLock()

Positions = range | npt.NDArray[np.int64]
"""Numbers of rows, in the order of the rows."""


@dataclass(eq=False)
class Rows:
    """Rows in an order that does not change, with plain types.

    Attributes:
        schema: Their columns.
        count: Their number.
        take: Returns some rows.
        column: Returns the values of a column, of all rows.
        partition_column: The column whose value, as text, is the partition's key.
    """

    schema: pa.Schema
    count: int
    take: Callable[[Positions], pa.Table]
    column: Callable[[str], pa.ChunkedArray]
    partition_column: str | None
    _blocks: dict[str | None, tuple[Piece, ...]] = field(default_factory=dict, init=False)

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
        name = self.partition_column
        if name is None:
            return {None: range(self.count)}
        require_columns("partition_column: the source", [name], self.schema.names, SourceError)
        kind = self.schema.field(name).type
        try:
            texts = _days(self.column(name)).cast(pa.string())
        except pa.ArrowException:
            texts = None
        if texts is None or texts.null_count:
            raise SourceError(
                f"partition_column {name!r} is {kind}, and not every row has a text in it; "
                "expected strings, numbers, dates or booleans, without nulls. Fill in the values, "
                "or filter the rows out"
            )
        encoded = pc.dictionary_encode(texts.combine_chunks())
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        keys = encoded.dictionary.to_pylist()
        edges = np.searchsorted(codes[order], np.arange(len(keys) + 1))
        slices = (order[low:high] for low, high in itertools.pairwise(edges))
        return dict(zip(keys, slices))


def _days(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times as dates if all are at midnight, and other values unchanged."""
    if not pa.types.is_timestamp(values.type):
        return values
    local = pc.local_timestamp(values) if values.type.tz else values
    days = local.cast(pa.date32())
    return days if days.cast(local.type).equals(local) else values


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

    def _rows_by_key(self) -> Mapping[str | None, int]:
        return {key: len(positions) for key, positions in self.rows.positions.items()}

    def identity(self, partition: str | None) -> str | None:
        return _identity(self.rows.blocks(partition))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        given = f". It has rows of {names(sorted(map(str, self.rows.positions)))}"
        return SourceError(
            f"{location}: {self.url_for(partition)} has no rows{given if partition else ''}. Give "
            "some, or allow_empty=True"
        )

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Copy the rows into the store."""
        rows = self.rows
        with PieceWriter(self.bound.root, f"{MADE}/{identity}") as writer:
            pieces = tuple(
                block._replace(places=(writer.write(part),))
                for block, part in blocks(rows.chunks(partition))
            )
        if (now := _identity(pieces)) != identity:
            raise SourceError(
                f"{location}: {self.url_for(partition)} has changed while the run was planned; its "
                f"rows were {identity} and are {now}. Run the partition again, in a new process"
            )
        return StoredTable(rows.schema, pieces)


def _identity(pieces: Iterable[Piece]) -> str | None:
    """Return the identity of the rows of some blocks; None if there are none."""
    text = "\n".join(block.identity for block in pieces)
    return hashlib.sha256(text.encode()).hexdigest()[:40] if text else None
