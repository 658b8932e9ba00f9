"""`Source`: what a pipeline knows of the place where its rows come from.

A source lists files, splits them into fragments, and reads fragments. Everything else in the
package works with `FileRecord` and `FragmentRecord` and knows no format. A new source is one file
with a subclass, and one line in ``vane_dagster/sources/__init__.py``. A class in the user's own
code needs no registration: its code is part of the keys, and travels to the workers.

| phase | process | methods |
|---|---|---|
| declare | driver | `validate`, `kind`, `describe`, `url_for`, `urls` |
| plan | driver | `bind`, `list_files`, `missing`, `split` |
| execute | worker | `read`, `project`, `current` |
| trace | driver | `find`, `current` |
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.files import file_identity, listed_file
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.transient_errors import advice
from vane_dagster.types.duckdb_connection import shared

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

_BATCHES_A_FRAGMENT = 64
_DEFAULT_ROWS = 131_072
_LEAST_ROWS = 1_024
_MOST_BYTES = 64 << 20

Listed = Union[tuple[FileRecord, ...], SourceError]
"""The files of a partition, perhaps none, in the order of their rows, or why they cannot be listed.
"""


@dataclass(frozen=True)
class FragmentRule:
    """How large fragments are.

    Attributes:
        rows: Rows of a fragment, at most.
        bytes: Uncompressed bytes of a fragment over all columns, at most.
    """

    rows: int
    bytes: int = _MOST_BYTES

    def __str__(self) -> str:
        return f"at most {self.rows:,} rows and {self.bytes / (1 << 20):g} MiB"


def default_rule(batch_sizes: Sequence[int]) -> FragmentRule:
    """Enough batches a fragment to keep workers busy, few enough to lose little: 64 or so."""
    if not batch_sizes:
        return FragmentRule(_DEFAULT_ROWS)
    rows = _BATCHES_A_FRAGMENT * (1 << (min(batch_sizes) - 1).bit_length())
    return FragmentRule(max(_LEAST_ROWS, min(rows, 1 << 20)))


@dataclass(frozen=True)
class SourceTable:
    """A partition of the source, split.

    Attributes:
        schema: Schema of the rows.
        fragments: The fragments, in the order of their rows.
    """

    schema: pa.Schema
    fragments: tuple[FragmentRecord, ...]


@dataclass(frozen=True)
class ReadContext:
    """What a worker gives a source that reads.

    Attributes:
        location: Stage and fragment, for messages.
        connect: Returns the worker's DuckDB connection.
    """

    location: str
    connect: Callable[[], duckdb.DuckDBPyConnection] = shared


class Source(ABC):
    """Where a pipeline's rows come from.

    Subclasses are picklable values, as frozen dataclasses are: they hold what was declared, and no
    connections. Methods mutate nothing.

    Attributes:
        kind: Dagster kind of the source's asset, as "parquet".
        version: Stands for the code of a class in the user's own modules, whose code is part of the
            keys otherwise.
        asset: Key of the Dagster asset that writes the source, as "a/b", if there is one.
        allow_empty: Whether a partition without any rows is accepted.
    """

    kind: ClassVar[str]
    version: ClassVar[str | None] = None
    asset: str | None = None
    allow_empty: bool = False

    # Declaration.

    def validate(  # noqa: B027 (most sources fit any pipeline)
        self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None
    ) -> None:
        """Checks the source against the pipeline that reads it.

        Args:
            location: The pipeline, for messages.
            partitions_def: The pipeline's partitions; None for an unpartitioned one.

        Raises:
            DefinitionError: If they do not fit.
        """

    def describe(self) -> str:
        """A description of the source's Dagster asset."""
        return f"{self.kind} at {self.place}"

    @abstractmethod
    def url_for(self, partition_key: str | None) -> str:
        """The URL or another name of a partition's data, for messages and metadata."""

    @property
    def place(self) -> str:
        """The data of all partitions, as a URL pattern or another name."""
        return self.url_for(None)

    @property
    def urls(self) -> tuple[str, ...]:
        """Local paths or URL patterns of the data, whose content is never part of a stage's key."""
        return ()

    def options_for(self, url: str) -> Mapping[str, Any]:
        """Options of the fsspec file system that reaches a file."""
        return {}

    def schema(self, location: str) -> pa.Schema:
        """The columns as far as they are known without a store, from one file.

        Args:
            location: The pipeline, for messages.

        Raises:
            SourceError: If there is no file, or none that can be read.
            DefinitionError: If a run alone can tell.
        """
        raise DefinitionError(f"{location}: the types of {self.place!r} are known in a run alone")

    # Planning.

    def bind(self, store: Store) -> Source:
        """The source as a run uses it, with what it needs of the pipeline's store."""
        return self

    @property
    def splitting(self) -> str:
        """What decides on the fragments beside the files and the rule: a new value splits anew."""
        return ""

    @abstractmethod
    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """Lists the files of some partitions, in as few requests as there can be.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.

        Returns:
            For each partition its files, each with a version that changes when it does, or the
            error. One partition's error does not affect the others.
        """

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        """The error for a partition without files; None if that is accepted.

        Args:
            partition: The partition's key.
            location: The pipeline, for the message.
        """
        where = "" if partition is None else f" for partition {partition!r}"
        return SourceError(
            f"{location}: no file{where} at {self.url_for(partition)!r}. Check the path, or write "
            "the partition first"
        )

    def required(
        self, listed: Listed, partition: str | None, location: str
    ) -> tuple[FileRecord, ...]:
        """The files of a partition that was listed.

        Args:
            listed: What `list_files` returned for it.
            partition: The partition's key.
            location: The pipeline, for messages.

        Raises:
            SourceError: If it could not be listed, or has no files and needs some.
        """
        if isinstance(listed, SourceError):
            raise listed
        if not listed and (error := self.missing(partition, location)):
            raise error
        return listed

    @abstractmethod
    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Splits the files of a partition into fragments, the same from run to run.

        A fragment, made by `fragment_record`, holds rows of one file, or whole files (see
        `grouping`).
        An added or changed file must leave the fragments of the other files as they are.

        Args:
            files: The files.
            rule: How large a fragment may be.
            location: The pipeline, for messages.
            partition: The partition's key.

        Raises:
            SourceError: If a file cannot be read, or their columns differ.
        """

    # Reading.

    @abstractmethod
    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Reads columns of a fragment, in a worker.

        The worker compares the rows' number with the fragment's, and the files with those that
        were planned.

        Args:
            fragment: The fragment.
            schema: The columns to read, with their types.
            context: Location and DuckDB connection.

        Returns:
            All rows of the fragment, in the order of its spans.

        Raises:
            SourceError: If the files cannot be read.
        """

    def project(
        self,
        fragment: FragmentRecord,
        schema: pa.Schema,
        columns: Sequence[tuple[str, str]],
        where: str | None,
        context: ReadContext,
    ) -> pa.Table | None:
        """Computes SQL over a fragment where it is read, in a worker.

        Args:
            fragment: The fragment.
            schema: The columns that the expressions name, with their types.
            columns: Output columns and their expressions.
            where: The filter, if there is one.
            context: Location and DuckDB connection.

        Returns:
            The rows that the filter keeps, in order; None if the source cannot, in which case the
            worker reads the fragment and computes in memory.

        Raises:
            SourceError: If the files cannot be read.
            SchemaError: If an expression fails for a row.
        """
        return None

    def current(self, file: FileRecord) -> FileRecord:
        """A listed file as it is now.

        Raises:
            FileNotFoundError: If it is gone.
        """
        return listed_file(file.url, self)

    # Tracing.

    def find(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Finds the row with an id, which is in one span at most.

        Args:
            spans: Where to look.
            column: The source's id column.
            id: The id.

        Returns:
            The span, and the row's number in its file, counted from 0; None if it is in none.

        Raises:
            FileNotFoundError: If a file is gone and the row is in none of the others.
            StoreError: If a file cannot be read and the row is in none of the others.
            SourceError: If a file cannot be read.
        """
        for span in spans:
            rows = FragmentRecord(span.url, span.start, span.stop, "", 0)
            ids = self.read(rows, pa.schema([column]), ReadContext("trace")).column(column.name)
            place = pc.index(ids, pa.scalar(id, column.type)).as_py()
            if place >= 0:
                return span, span.start + place
        return None


def fragment_record(
    spans: Sequence[tuple[FileRecord, int, int]], size: int, extra: str = ""
) -> FragmentRecord:
    """A fragment, with the identity that keys what is computed from it.

    Args:
        spans: Files, each with its first row and the row after its last.
        size: Bytes of the rows in memory, as an estimate.
        extra: What else the rows depend on.
    """
    text = "\n".join(f"{file_identity(file)}\n{start}\n{stop}" for file, start, stop in spans)
    identity = hashlib.blake2b(f"{text}{extra}".encode(), digest_size=16).hexdigest()
    if len(spans) == 1:
        ((file, start, stop),) = spans
        return FragmentRecord(file.url, start, stop, identity, size)
    files = tuple(FileSpan(file.url, start, stop) for file, start, stop in spans)
    rows = sum(span.stop - span.start for span in files)
    return FragmentRecord(files[0].url, 0, rows, identity, size, files)


def unreadable(url: str, error: Exception, location: str, fix: str | None = None) -> SourceError:
    """The error for a file that cannot be read.

    Args:
        url: The file.
        error: What its driver or reader raised.
        location: Stage and fragment.
        fix: What to do about it, if the kind of error does not tell.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return SourceError(f"{location}: {url!r} cannot be read: {reason}. {fix or advice(error)}")
