"""`MadeSource`: rows that code makes, once, into the store.

The driver alone imports this module. A table is identified by the code that makes it, so that a
listing runs nothing. The first run that needs it executes the code, and completes the table by a
record that is written last; later runs read it. Workers get a `TableReader`.
"""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from vane_dagster.errors import SourceError, VaneError
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
)
from vane_dagster.sources.table_reader import TableReader
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.store import Store
from vane_dagster.storage.stored_tables import (
    COMPLETE,
    Piece,
    StoredTable,
    clipped,
    create_record,
    dumped_places,
    read_record,
    table_url,
    write_record,
)

_MAX_PLACES = 256
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class MadeSource(Source):
    """Rows that code makes, once, into the store.

    Attributes:
        allow_empty: Whether a partition without rows is accepted.
        root: The store's root, once the source is bound to it.
    """

    allow_empty: bool = False
    root: Location | None = field(default=None, init=False, repr=False, compare=False)

    @abstractmethod
    def identity(self, partition: str | None) -> str:
        """Return what identifies the rows of a partition, as hex digits; it runs no code.

        Raises:
            VaneError: If they have no identity.
        """

    @abstractmethod
    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Make the rows of a partition, and write them into the store under unique names.

        Args:
            partition: The partition's key.
            identity: Their identity.
            location: The pipeline, for messages.

        Raises:
            SourceError: If the code fails.
            StoreError: If the store refuses.
        """

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "root", store.root)
        return bound

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """Return a record for each partition, identified by the code that makes its rows.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.
        """

        def listed(partition: str | None) -> Listed:
            try:
                identity = self.identity(partition)
            except VaneError as error:
                return SourceError(f"{location}: {self.place}: {error}")
            return (FileRecord(table_url(identity), 0, identity),)

        return {partition: listed(partition) for partition in partitions}

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Make the rows unless the store has them, and divide them into fragments.

        Args:
            files: The partition's record.
            rule: The maximum size of a fragment.
            location: The pipeline, for messages.
            partition: The partition's key.

        Raises:
            SourceError: If the code fails, or makes no rows.
            StoreError: If the store refuses.
        """
        if not files:
            return SourceTable(pa.schema([]), ())
        (file,) = files
        with _one_at_a_time:  # each may use the whole cluster
            table = read_record(self.store_root, file.version)
            if table is None:
                made = self.make(partition, file.version, location)
                table = create_record(self.store_root, file.version, made)
            else:
                write_record(self.store_root, file.version, COMPLETE, table)
        if not table.pieces and not self.allow_empty:
            where = "" if partition is None else f" for partition {partition!r}"
            raise SourceError(
                f"{location}: {self.place} made no rows{where}. If that is in order, give "
                "allow_empty=True"
            )
        return SourceTable(table.schema, tuple(_fragments(file.url, table, rule)))

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        return TableReader(self.store_root).read(fragment, schema, context)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record unchanged: other code makes another table."""
        return file

    def for_workers(self) -> SourceReader:
        return TableReader(self.store_root)

    @property
    def store_root(self) -> Location:
        """The root of the store to which the source is bound."""
        assert self.root is not None, f"{self.place} is bound to a store before it is used"
        return self.root


def _fragments(url: str, table: StoredTable, rule: FragmentRule) -> Iterator[FragmentRecord]:
    """Yield fragments of consecutive rows, of a part of a large piece or of several small ones."""
    first = 0
    held: list[tuple[Piece, int, int]] = []
    rows = size = 0
    for piece, start, stop in _cuts(table, rule):
        count, own = stop - start, piece.bytes * (stop - start) // piece.rows
        is_full = rows + count > rule.rows or size + own > rule.bytes or len(held) == _MAX_PLACES
        if held and is_full:
            yield _fragment(url, first, held, size)
            first, held, rows, size = first + rows, [], 0, 0
        held.append((piece, start, stop))
        rows, size = rows + count, size + own
    if held:
        yield _fragment(url, first, held, size)


def _cuts(table: StoredTable, rule: FragmentRule) -> Iterator[tuple[Piece, int, int]]:
    """Yield row ranges of pieces, none of which is larger than a fragment."""
    for piece in table.pieces:
        count = max(-(-piece.rows // rule.rows), min(piece.rows, -(-piece.bytes // rule.bytes)), 1)
        edges = [piece.rows * i // count for i in range(count + 1)]
        yield from ((piece, low, high) for low, high in itertools.pairwise(edges) if high > low)


def _fragment(
    url: str, first: int, held: Sequence[tuple[Piece, int, int]], size: int
) -> FragmentRecord:
    spans = [(FileRecord("", piece.rows, piece.identity), low, high) for piece, low, high in held]
    identity = fragment_record(spans, size).identity
    places = [place for piece, low, high in held for place in clipped(piece.places, low, high)]
    stop = first + sum(high - low for _, low, high in held)
    return FragmentRecord(url, first, stop, identity, size, detail=dumped_places(places))
