"""`RowsSource`: rows that the driver holds or can read, identified by their content.

The driver alone imports this module. A run copies rows that workers cannot reach into the store,
under the digest of their content, and workers get a `TableReader`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import DefinitionError, SourceError, names
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
)
from vane_dagster.sources.row_blocks import LISTED, RowBlock, blocks
from vane_dagster.sources.table_reader import TableReader
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.stored_tables import (
    ROWS,
    ParquetRows,
    Piece,
    Place,
    StoredTable,
    dumped_places,
    rows_name,
    stored_rows,
    table_url,
    write_record,
    write_rows,
)

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

_ATTEMPTS = 3

Positions = slice | npt.NDArray[np.int64]
"""Numbers of rows, in the order of the rows."""


class Rows(ABC):
    """Rows in an order that does not change, with plain types.

    Attributes:
        schema: Their columns.
        count: Their number.
        window: How many are held in memory at a time, besides those that are there anyway.
    """

    schema: pa.Schema
    count: int
    window: int

    @abstractmethod
    def take(self, positions: Positions) -> pa.Table:
        """Return some rows."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """Return the values of a column, of all rows."""

    def places(self, positions: Positions) -> tuple[Place, ...] | None:
        """Return where workers can read some rows; None if they have to be copied."""
        return None


@dataclass(frozen=True)
class _Identified:
    """A partition's rows: their positions, and the identity of their content."""

    positions: Positions
    count: int
    identity: str
    bytes: int


class Catalog:
    """The rows of a source and their identities, computed once in a process.

    Args:
        load: Returns the rows.
        partition_column: The column with the partition's key; None if there are no partitions.
    """

    def __init__(self, load: Callable[[], Rows], partition_column: str | None) -> None:
        self._load, self._column = load, partition_column
        self._lock = threading.RLock()
        self._identified: dict[str | None, _Identified | None] = {}

    @property
    def rows(self) -> Rows:
        """All rows."""
        with self._lock:
            return self._rows

    @cached_property
    def _rows(self) -> Rows:
        return self._load()

    def find(self, partition: str | None) -> _Identified | None:
        """Return the rows of a partition; None if it has none."""
        with self._lock:
            if partition not in self._identified:
                self._identified[partition] = self._identify(partition)
            return self._identified[partition]

    @property
    def keys(self) -> Sequence[str]:
        """The keys of all partitions that have rows."""
        with self._lock:
            return list(self._positions)

    def chunks(self, positions: Positions) -> Iterator[pa.Table]:
        """Yield some rows, as many at a time as may be in memory."""
        for start in range(0, self._count(positions), self.rows.window):
            yield self.rows.take(self.part(positions, start, start + self.rows.window))

    def part(self, positions: Positions, start: int, stop: int) -> Positions:
        """Return a range of positions.

        Args:
            positions: The positions.
            start: First of the range.
            stop: The one after its last.
        """
        if isinstance(positions, slice):
            return slice(positions.start + start, min(positions.stop, positions.start + stop))
        return positions[start:stop]

    def _identify(self, partition: str | None) -> _Identified | None:
        whole = slice(0, self.rows.count)
        positions = whole if self._column is None else self._positions.get(str(partition))
        if positions is None or not self._count(positions):
            return None
        state = hashlib.sha256()
        size = 0
        for block in blocks(self.chunks(positions), LISTED):
            state.update(f"{block.digest}\n".encode())
            size += block.bytes
        identity = state.hexdigest()[:40]
        return _Identified(positions, self._count(positions), identity, size)

    @staticmethod
    def _count(positions: Positions) -> int:
        if isinstance(positions, slice):
            return int(positions.stop - positions.start)
        return len(positions)

    @cached_property
    def _positions(self) -> Mapping[str, Positions]:
        assert self._column is not None, "partitions have a column"
        column = self.rows.column(self._column)
        try:
            texts = column.cast(pa.string())
        except pa.ArrowException as error:
            raise SourceError(
                f"partition_column {self._column!r} is {column.type}, which has no text; expected "
                "a column of strings, numbers, dates or booleans"
            ) from error
        if texts.null_count:
            raise SourceError(
                f"partition_column {self._column!r} is null in {texts.null_count:,} of "
                f"{len(texts):,} rows, which so belong to no partition. Fill it, or filter them out"
            )
        encoded = pc.dictionary_encode(texts.combine_chunks())
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        keys = encoded.dictionary.to_pylist()
        edges = np.searchsorted(codes[order], np.arange(len(keys) + 1))
        found = (order[low:high] for low, high in itertools.pairwise(edges))
        return {key: _as_slice(positions) for key, positions in zip(keys, found)}


@dataclass(frozen=True)
class RowsSource(Source):
    """Rows that the driver holds or can read.

    Attributes:
        catalog: The rows.
        partition_column: The column whose value, as text, is the partition's key.
        allow_empty: Whether a partition without rows is accepted.
        root: The store's root, once the source is bound to it.
    """

    catalog: Catalog = field(repr=False, compare=False)
    partition_column: str | None = None
    allow_empty: bool = False
    root: Location | None = field(default=None, init=False, repr=False, compare=False)

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        if (partitions_def is None) != (self.partition_column is None):
            check_partitions(location, partitions_def, self.place, "partition_column='day'")

    def schema(self, location: str) -> pa.Schema:
        return self.catalog.rows.schema

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "root", store.root)
        return bound

    @property
    def splitting(self) -> str:
        return "blocks by content, 1"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """Return a record for each partition with rows, identified by their content.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.
        """

        def listed(partition: str | None) -> Listed:
            try:
                found = self.catalog.find(partition)
            except (SourceError, DefinitionError) as error:
                return SourceError(f"{location}: {self.place}: {error}")
            if found is None:
                return ()
            return (FileRecord(table_url(found.identity), found.bytes, found.identity),)

        return {partition: listed(partition) for partition in partitions}

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        if partition is None:
            return SourceError(
                f"{location}: {self.place} has no rows; give some, or allow_empty=True"
            )
        return SourceError(
            f"{location}: {self.place} has no row with {self.partition_column!r} equal to "
            f"{partition!r}; as text, the column has {names(sorted(self.catalog.keys))}. Expected "
            "a value for each partition that is materialized; or give allow_empty=True"
        )

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Divide the rows into blocks by content, and copy into the store what it lacks.

        Args:
            files: The partition's record.
            rule: The maximum size of a fragment.
            location: The pipeline, for messages.
            partition: The partition's key.

        Raises:
            StoreError: If the store refuses.
        """
        found = self.catalog.find(partition) if files else None
        schema = self.catalog.rows.schema
        if found is None:
            return SourceTable(schema, ())
        for _ in range(_ATTEMPTS):
            rows = blocks(self.catalog.chunks(found.positions), rule)
            own = functools.partial(self._places, found)
            pieces, reused = stored_pieces(self._root, rows, own, stored_rows(self._root))
            table = StoredTable(schema, tuple(pieces))
            write_record(self._root, found.identity, f"{rule.rows}-{rule.bytes}", table)
            # A collection may have deleted some before the record said that they are needed.
            if reused <= stored_rows(self._root):
                break
        return SourceTable(schema, tuple(fragments_of(files[0].url, table)))

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        return TableReader(self._root).read(fragment, schema, context)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record unchanged: another content would be another table."""
        return file

    def for_workers(self) -> SourceReader:
        return TableReader(self._root)

    @property
    def _root(self) -> Location:
        assert self.root is not None, f"{self.place} is bound to a store before it is used"
        return self.root

    def _places(self, found: _Identified, block: RowBlock) -> tuple[Place, ...] | None:
        own = self.catalog.part(found.positions, block.first, block.first + len(block.rows))
        return self.catalog.rows.places(own)


def stored_pieces(
    root: Location,
    rows: Iterable[RowBlock],
    places_of: Callable[[RowBlock], tuple[Place, ...] | None],
    present: Collection[str],
) -> tuple[list[Piece], set[str]]:
    """Write blocks of rows into a store.

    Args:
        root: The store's root.
        rows: The blocks.
        places_of: Returns where workers can read a block; None if it has to be copied.
        present: The names of the files that the store has.

    Returns:
        The pieces, and the names of those of their files that were there already.

    Raises:
        StoreError: If the store refuses.
    """
    reused: set[str] = set()
    pieces: list[Piece] = []
    repeated: Counter[str] = Counter()
    with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
        writes: deque[Future[None]] = deque()
        for block in rows:
            places, count = places_of(block), repeated[block.digest]
            if places is None:
                name = rows_name(block.digest)
                places = (ParquetRows(f"{ROWS}/{name}", 0, len(block.rows)),)
                if name in present:
                    reused.add(name)
                elif not count:
                    writes.append(threads.submit(write_rows, root, block.digest, block.rows))
                if len(writes) > IO_THREADS:
                    writes.popleft().result()
            # Equal blocks are different rows.
            identity = f"{block.digest}~{count}" if count else block.digest
            repeated[block.digest] += 1
            pieces.append(Piece(identity, len(block.rows), block.bytes, places))
        for write in writes:
            write.result()
    return pieces, reused


def fragments_of(url: str, table: StoredTable) -> Iterator[FragmentRecord]:
    """Yield a fragment for each piece of a table.

    Args:
        url: The URL that identifies the table.
        table: The table.
    """
    first = 0
    for piece in table.pieces:
        file = FileRecord("", piece.bytes, piece.identity)
        identity = fragment_record([(file, 0, piece.rows)], piece.bytes).identity
        stop = first + piece.rows
        detail = dumped_places(piece.places)
        yield FragmentRecord(url, first, stop, identity, piece.bytes, detail=detail)
        first = stop


def check_partitions(
    location: str,
    partitions_def: dg.PartitionsDefinition[Any] | None,
    place: str,
    argument: str,
) -> None:
    """Raise the error for a source whose partitions are not those of the pipeline.

    Args:
        location: The pipeline.
        partitions_def: Its partitions.
        place: The source.
        argument: The argument that gives a source partitions.

    Raises:
        DefinitionError: In any case.
    """
    if partitions_def is None:
        raise DefinitionError(
            f"{location}: {place} has partitions, and the pipeline has no partitions_def. Give "
            "one, or leave the source's out"
        )
    raise DefinitionError(
        f"{location}: the pipeline has partitions, and {place} does not say which of its rows "
        f"belong to one. Give it, for example {argument}"
    )


def _as_slice(positions: npt.NDArray[np.int64]) -> Positions:
    """Return positions as a slice if they are a range."""
    if len(positions) and positions[-1] - positions[0] + 1 == len(positions):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions
