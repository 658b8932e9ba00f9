"""`Source`: the interface between a pipeline and the place its rows come from.

A source lists files, splits them into fragments, and reads fragments. The rest of the package works
with `FileRecord` and `FragmentRecord` and is independent of the format. A new source is one file
with a subclass, and one line in ``vane_dagster/__init__.py``. A class in the user's own code needs
no registration: its code is part of the keys, and is sent to the workers.

| phase | process | methods |
|---|---|---|
| declare | driver | `of_pipeline`, `validate`, `kind`, `describe`, `url_for`, `urls` |
| plan | driver | `bind`, `with_cluster`, `list_files`, `missing`, `split`, `for_workers` |
| execute | worker | `read`, `current` |
| trace | driver | `find`, `current` |
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster._texts import in_partition
from vane_dagster.errors import DefinitionError, SourceError, first_line
from vane_dagster.sources.files import file_identity, listed_file
from vane_dagster.storage.filesystem import advice
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

ROW_ERROR = "__row_error"
"""The column of `ROW_ERROR_TYPE` that `SourceReader.read` adds if some rows cannot be read."""
ROW_ERROR_TYPE = pa.struct([("error", pa.string()), ("message", pa.string())])
"""The class and message of a row's error; null for rows that were read."""
_BATCHES_A_FRAGMENT = 64
_DEFAULT_ROWS = 131_072
_MIN_ROWS = 1_024
_MAX_BYTES = 64 << 20

Connect = Callable[[bool], bool]
"""Connects this process to the run's cluster, once. With True, idle warm workers that hold all of
its CPUs are ended. Returns False if the run computes on this machine without a cluster."""
Listed = Union[tuple[FileRecord, ...], SourceError]
"""The files of a partition, possibly none, in row order; or the error if listing them failed."""


@dataclass(frozen=True)
class FragmentRule:
    """The maximum size of fragments.

    Attributes:
        rows: Maximum rows of a fragment.
        bytes: Maximum uncompressed bytes of a fragment over all columns.
    """

    rows: int
    bytes: int = _MAX_BYTES

    def __str__(self) -> str:
        return f"at most {self.rows:,} rows and {self.bytes / (1 << 20):g} MiB"


def default_rule(batch_sizes: Sequence[int]) -> FragmentRule:
    """Return a rule of about 64 batches per fragment.

    These are enough batches to keep workers busy, and few enough to lose little in a failure.
    """
    if not batch_sizes:
        return FragmentRule(_DEFAULT_ROWS)
    rows = _BATCHES_A_FRAGMENT * (1 << (min(batch_sizes) - 1).bit_length())
    return FragmentRule(max(_MIN_ROWS, min(rows, 1 << 20)))


@dataclass(frozen=True)
class SourceTable:
    """A partition of the source, split into fragments.

    Attributes:
        schema: Schema of the rows.
        fragments: The fragments, in the order of their rows.
        warnings: What the log of the run says about the partition.
    """

    schema: pa.Schema
    fragments: tuple[FragmentRecord, ...]
    warnings: tuple[str, ...] = ()


class SourceReader(ABC):
    """The part of a source that runs in workers: it reads fragments of listed files.

    Attributes:
        reads_contents: Whether `read` opens files that may be replaced. They must not have changed.
    """

    reads_contents: ClassVar[bool] = True

    def options_for(self, url: str) -> Mapping[str, Any]:
        """Return the options of the fsspec file system of a file."""
        return {}

    @abstractmethod
    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Read columns of a fragment, in a worker.

        The worker compares the number of rows with the fragment's, and the files with those that
        were planned.

        A row that cannot be read need not fail the others: it keeps its id, has nulls in the other
        columns, and its error in an additional column `ROW_ERROR`. The stage that reads it
        quarantines it.

        Args:
            fragment: The fragment.
            schema: The columns to read, with their types.
            location: Stage and fragment, for messages.

        Returns:
            All rows of the fragment, in the order of its spans.

        Raises:
            SourceError: If the files cannot be read.
        """

    def current(self, file: FileRecord) -> FileRecord:
        """Return the current record of a listed file.

        Raises:
            FileNotFoundError: If it is gone.
        """
        return listed_file(file.url, self)

    def find(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find the row with an id, which is in at most one span.

        Args:
            spans: The spans to search.
            column: The source's id column.
            id: The id.

        Returns:
            The span, and the row's number in its file, counted from 0; None if no span has the row.

        Raises:
            FileNotFoundError: If a file is gone and the row is in none of the others.
            StoreError: If a file cannot be read and the row is in none of the others.
            SourceError: If a file cannot be read.
        """
        return find_row(self.read, spans, column, id)


class Source(SourceReader):
    """The place a pipeline's rows come from.

    Subclasses are picklable values, such as frozen dataclasses: they hold the declaration, and no
    connections. Methods do not mutate anything.

    Attributes:
        kind: Dagster kind of the source's asset, such as "parquet".
        version: Replaces the code of a class in the user's own modules in the keys.
        asset: Key of the Dagster asset that writes the source, such as "a/b"; None for none.
        allow_empty: Whether a partition without any rows is accepted.
        default_id: The id column if a pipeline names none; None if it has to.
        names_files: Whether stages may open the files of its rows, through `File`.
    """

    kind: ClassVar[str]
    version: ClassVar[str | None] = None
    default_id: ClassVar[str | None] = None
    names_files: ClassVar[bool] = False
    asset: str | None = None
    allow_empty: bool = False

    # Declaration.

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        """Check the source against the pipeline that reads it.

        Args:
            location: The pipeline, for messages.
            partitions_def: The pipeline's partitions; None for an unpartitioned one.

        Raises:
            DefinitionError: If they do not fit.
        """

    def of_pipeline(self, name: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> Source:
        """Return the source as a pipeline reads it, if that depends on the pipeline."""
        return self

    def describe(self) -> str:
        """Return a description of the source's Dagster asset."""
        return f"{self.kind}: {self.place}"

    @abstractmethod
    def url_for(self, partition_key: str | None) -> str:
        """Return the URL or another name of a partition's data, for messages and metadata."""

    @property
    def place(self) -> str:
        """The data of all partitions, as a URL pattern or another name."""
        return self.url_for(None)

    @property
    def urls(self) -> tuple[str, ...]:
        """Local paths or URL patterns of the data. Its content is never part of a stage's key."""
        return ()

    @property
    def _fixed_columns(self) -> Sequence[str]:
        """The columns that do not depend on what its files hold."""
        return ()

    _types_note: ClassVar[str] = ""
    """Where types that are not declared come from and how to change them, for messages."""

    def schema(self, location: str) -> pa.Schema:
        """Return the columns as far as they are known without a store, from one file.

        Args:
            location: The pipeline, for messages.

        Raises:
            SourceError: If there is no file, or none that can be read.
            DefinitionError: If they are known only in a run.
        """
        raise DefinitionError(f"{location}: the types of {self.place!r} are known only in a run")

    # Planning.

    def bind(self, store: Store) -> Source:
        """Return the source as a run uses it, bound to the pipeline's store if it needs one."""
        return self

    def with_cluster(self, connect: Connect) -> Source:
        """Return the source as a run uses it, with a way to the run's cluster if it needs one.

        Args:
            connect: Connects to the run's cluster. It may be called in any thread.
        """
        return self

    @property
    def splitting(self) -> str:
        """A text that identifies how files are split and read. A new value splits all files again.

        An option that changes rows is part of it, and of the `extra` of `fragment_record`.
        """
        return ""

    @abstractmethod
    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the files of some partitions, in as few requests as possible.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.

        Returns:
            For each partition its files, each with a version that changes when the file does, or
            the error. The error of one partition does not affect the others.
        """

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        """Return the error for a partition without files; None if it is accepted all the same.

        It is not called with `allow_empty`.

        Args:
            partition: The partition's key.
            location: The pipeline, for the message.
        """
        return SourceError(
            f"{location}: no file at {self.url_for(partition)!r}{in_partition(partition)}. Check "
            "the path, or write the partition first"
        )

    def required(
        self, listed: Listed, partition: str | None, location: str
    ) -> tuple[FileRecord, ...]:
        """Return the files of a partition that was listed, or raise its error.

        Args:
            listed: The result of `list_files` for it.
            partition: The partition's key.
            location: The pipeline, for messages.

        Raises:
            SourceError: If it could not be listed, or has no files and needs some.
        """
        if isinstance(listed, SourceError):
            raise listed
        if not (listed or self.allow_empty) and (error := self.missing(partition, location)):
            raise error
        return listed

    def _rows_by_key(self) -> Mapping[str | None, int]:
        """Return the rows of each value that is a partition's key, or could be one, if known."""
        return {}

    @abstractmethod
    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Split the files of a partition into fragments, the same in every run.

        A fragment, made by `fragment_record`, holds rows of one file, or whole files (see
        `grouping`). An added or changed file must not change the fragments of the other files.

        Args:
            files: The files.
            rule: The maximum size of a fragment.
            location: The pipeline, for messages.
            partition: The partition's key.

        Raises:
            SourceError: If a file cannot be read, or columns have no common type; see `schemas`.
        """

    def for_workers(self) -> SourceReader:
        """Return the object that is sent to workers, to read fragments: the source itself.

        A source of this package whose listing needs code that workers do not have returns another.
        """
        return self


def find_row(
    read: Callable[[FragmentRecord, pa.Schema, str], pa.Table],
    spans: Sequence[FileSpan],
    column: pa.Field,
    id: Any,
) -> tuple[FileSpan, int] | None:
    """Find a row by reading the id column; see `SourceReader.find`."""
    for span in spans:
        rows = FragmentRecord(span.url, span.start, span.stop, "", 0, detail=span.detail)
        ids = read(rows, pa.schema([column]), "trace").column(column.name)
        place = pc.index(ids, pa.scalar(id, column.type)).as_py()
        if place >= 0:
            return span, span.start + place
    return None


def fragment_record(
    spans: Sequence[tuple[FileRecord, int, int]],
    size: int,
    extra: str = "",
    details: Sequence[str] = (),
) -> FragmentRecord:
    """Make the record of a fragment, with the identity that is part of its fragment keys.

    Args:
        spans: Files, each with its first row and the row after its last.
        size: Estimated bytes of the rows in memory.
        extra: Anything else that the rows depend on.
        details: What the source needs to read each span, in its own terms; see `FileSpan`. It
            follows from the files' versions and the rows, and is not part of the identity.
    """
    detail = details or [""] * len(spans)
    text = "\n".join(f"{file_identity(file)}\n{start}\n{stop}" for file, start, stop in spans)
    identity = hashlib.blake2b(f"{text}{extra}".encode(), digest_size=16).hexdigest()
    if len(spans) == 1:
        ((file, start, stop),) = spans
        return FragmentRecord(file.url, start, stop, identity, size, detail=detail[0])
    files = tuple(
        FileSpan(file.url, start, stop, own) for (file, start, stop), own in zip(spans, detail)
    )
    rows = sum(span.stop - span.start for span in files)
    return FragmentRecord(files[0].url, 0, rows, identity, size, files)


def unreadable(url: str, error: Exception, location: str, fix: str | None = None) -> SourceError:
    """Return the error for a file that cannot be read."""
    return SourceError(
        f"{location}: {url!r} cannot be read: {first_line(error)}. {fix or advice(error)}"
    )
