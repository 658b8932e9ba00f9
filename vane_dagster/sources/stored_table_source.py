"""`StoredTableSource`: rows that are a table in the store, which the first run writes there.

The driver alone imports this module. A table is identified by the content of its rows, or by the
code that makes them. The first run that needs it makes it, and completes it by a record that is
written last; later runs read it. Workers get a `TableReader`.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster.errors import DefinitionError, SourceError, VaneError, first_line
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    SourceReader,
    SourceTable,
)
from vane_dagster.sources.grouping import SizedFile, cut
from vane_dagster.sources.in_store import InStore
from vane_dagster.sources.table_reader import TableReader
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.stored_tables import (
    COMPLETE,
    ParquetRows,
    StoredTable,
    borrow,
    clipped,
    create_record,
    dumped_places,
    has_all_rows,
    joined,
    table_url,
    write_record,
)

if TYPE_CHECKING:
    import dagster as dg

_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class StoredTableSource(InStore):
    """Rows that are a table in the store.

    Attributes:
        partitioned_by: The argument that gives the source partitions, for messages.
        is_partitioned: Whether it has partitions.
        allow_empty: Whether a partition without rows is accepted.
    """

    partitioned_by: ClassVar[str]
    is_partitioned: bool = False
    allow_empty: bool = False

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        if self.is_partitioned != (partitions_def is not None):
            has = "has partitions" if self.is_partitioned else "has no partitions"
            raise DefinitionError(
                f"{location}: {self.place} {has}, unlike the pipeline. Partition both or neither: "
                f"pass partitions_def to the pipeline, and give the source {self.partitioned_by}"
            )

    @abstractmethod
    def identity(self, partition: str | None) -> str | None:
        """Return what identifies the rows of a partition, as hex digits; None if it has no rows.

        It is that of their content, or of the code that makes them, which is not run.
        """

    @abstractmethod
    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Write the rows of a partition into the store, in files with unique names."""

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """Return a record for each partition that may have rows, with the identity of its rows."""

        def listed(partition: str | None) -> Listed:
            try:
                identity = self.identity(partition)
                return (FileRecord(table_url(identity), 0, identity),) if identity else ()
            except VaneError as error:
                return SourceError(f"{location}: {self.place}: {error}")

        return {partition: listed(partition) for partition in partitions}

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Make the rows unless the store has them, and divide them into fragments."""
        if not files:
            return SourceTable(self.schema(location), ())
        (file,) = files
        with _one_at_a_time:  # each may use the whole cluster
            table = self._stored(partition, file.version, location)
        return SourceTable(table.schema, tuple(_fragments(file, table, rule)))

    def _stored(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Return the table of a partition, which is kept from garbage collection from now on."""
        root, table = self.bound.root, borrow(self.bound, identity)
        if table is None:
            return create_record(root, identity, self._made(partition, identity, location))
        write_record(root, identity, COMPLETE, table)
        # Files in the store may have been deleted, and others be elsewhere by now.
        if not has_all_rows(root, table):
            table = self._made(partition, identity, location)
            write_record(root, identity, COMPLETE, table)
        return table

    def _made(self, partition: str | None, identity: str, location: str) -> StoredTable:
        try:
            return self.make(partition, identity, location)
        except VaneError:
            raise
        except Exception as error:  # of the user's code, or of a library
            reason = f"{type(error).__name__}: {first_line(error)}"
            if any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__):
                # Its text has the tracebacks of the worker; the first is that of the cause.
                cause = str(error).partition("\n\nThe above exception")[0]
                reason = cause.strip().rpartition("\n")[2].strip()
            raise SourceError(
                f"{location}: {self.url_for(partition)} failed: {reason.rstrip('.')}. Nothing was "
                "stored; fix the cause and run the partition again"
            ) from error

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        return TableReader(self.bound.root).read(fragment, schema, location)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record unchanged: other rows are another table."""
        return file

    def for_workers(self) -> SourceReader:
        return TableReader(self.bound.root)


def _fragments(
    file: FileRecord, table: StoredTable, rule: FragmentRule
) -> Iterator[FragmentRecord]:
    """Yield fragments of consecutive rows, which are identified by the pieces that they are of."""
    edges = np.cumsum([0, *(piece.rows for piece in table.pieces)])
    for fragment in cut(SizedFile(file, [(p.rows, p.bytes) for p in table.pieces]), rule):
        low = np.searchsorted(edges, fragment.start, "right") - 1
        pieces = table.pieces[low : np.searchsorted(edges, fragment.stop)]
        rows = fragment.start - int(edges[low]), fragment.stop - int(edges[low])
        blocks = clipped((ParquetRows(p.identity, 0, p.rows) for p in pieces), *rows)
        places = joined(clipped((place for p in pieces for place in p.places), *rows))
        identity = hashlib.blake2b(dumped_places(0, blocks).encode(), digest_size=16).hexdigest()
        detail = dumped_places(fragment.start, places)
        yield replace(fragment, identity=identity, detail=detail)
