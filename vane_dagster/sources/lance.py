"""`LanceSource`: the rows of a Lance table at a version."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster import _failpoints
from vane_dagster._arguments import check_installed
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import FragmentRule
from vane_dagster.sources.grouping import SizedFile, cut
from vane_dagster.sources.lake_source import (
    Detail,
    FolderSource,
    LakeTable,
    digest,
    folder_arguments,
    lake_arguments,
)
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.lance_table import open_table
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.types.casts import cast_table

_BLOBS = "all_binary"
"""Lance's name for reading blobs as their bytes, and not as descriptions of them."""


class LanceTable(LakeTable):
    """A table at one version."""

    def __init__(self, source: Any, location: str, table: Any, name: str) -> None:
        super().__init__(source, location, table, name)
        self._url = name
        require_columns(self._owner, source.columns or (), table.schema.names, SourceError)
        wanted = None if source.columns is None else list(source.columns)
        read = table.scanner(columns=wanted, blob_handling=_BLOBS)
        self.schema = plain_schema(read.projected_schema)
        # A column's id is never another one's, unlike its name.
        self._columns = {each.name(): _ids(each) for each in table.lance_schema.fields()}

    def list_units(self, where: str | None) -> Iterable[tuple[FileRecord, tuple[int, Detail]]]:
        """Return the fragments with rows that pass a filter, in the table's order."""
        fragments = {each.fragment_id: each.metadata for each in self._table.get_fragments()}
        if where is None:
            counts = {id: metadata.num_rows for id, metadata in fragments.items()}
        else:
            counts = self._passing(where)
        # Names in other texts than names of columns do no harm: they add to what rows depend on.
        tested = (where or "").lower()
        used = {
            name: ids
            for name, ids in self._columns.items()
            if name in self.schema.names or name.lower() in tested
        }
        fields = {id for ids in used.values() for id in ids}
        kinds = [[each.name, str(each.type)] for each in self.schema]
        for id, metadata in fragments.items():
            if rows := counts.get(id):
                files = [each for each in metadata.files if fields.intersection(each.fields)]
                version = digest([_state(metadata, files), kinds, used, where])
                url = _data_url(self._url, metadata)
                size = sum(each.file_size_bytes or 0 for each in files)
                detail = {"table": self._url, "version": self._table.version, "fragment": id}
                yield FileRecord(url, size, version), (rows, {**detail, "filter": where})

    def cut(
        self, record: FileRecord, unit: tuple[int, Detail], rule: FragmentRule
    ) -> Iterable[FragmentRecord]:
        """Cut the rows of a fragment evenly."""
        rows, detail = unit
        fragment = self._table.get_fragment(detail["fragment"])
        share = rows / max(1, fragment.metadata.physical_rows)
        size = max(int(record.size * share), self._blob_bytes(fragment, detail["filter"]))
        return cut(SizedFile(record, [(rows, size)], detail=json.dumps(detail)), rule)

    def _passing(self, where: str) -> dict[int, int]:
        """Return the number of rows that pass a filter, by the fragment's id, in one scan."""
        scanner = self._table.scanner(columns=[], filter=where, with_row_address=True)
        passing: Counter[int] = Counter()
        for batch in scanner.to_batches():
            ids, counts = np.unique(batch.column("_rowaddr").to_numpy() >> 32, return_counts=True)
            passing.update(dict(zip(ids.tolist(), counts.tolist())))
        return passing

    def _blob_bytes(self, fragment: Any, where: str | None) -> int:
        """Return the bytes of blobs, which may be in files beside the fragment's."""
        described = self._table.scanner(columns=self.schema.names).projected_schema
        blobs = [
            each.name
            for each in described
            if pa.types.is_struct(each.type)
            and not pa.types.is_struct(self.schema.field(each.name).type)
        ]
        if not blobs:
            return 0
        rows = fragment.to_table(columns=blobs, filter=where)
        sizes = [pc.sum(pc.struct_field(rows.column(name), "size")).as_py() for name in blobs]
        return sum(size or 0 for size in sizes)


@dataclass(frozen=True)
class LanceSource(FolderSource):
    """The rows of a Lance table.

    A unit is a fragment with its deletions, so a commit that adds fragments computes only those.
    """

    kind: ClassVar[str] = "lance"
    cleanup: ClassVar[str] = "cleanup_old_versions"
    table_type: ClassVar[type[LakeTable]] = LanceTable

    def load(self, url: str) -> Any:
        version = cast("int | str | None", self.table_version)
        return open_table(StoragePath(url, self.storage_options), version)

    def read_rows(
        self, span: FileSpan, detail: Detail, schema: pa.Schema, location: str
    ) -> pa.Table:
        """Read live rows that pass the filter; blobs are read as their bytes."""

        def read() -> pa.Table:
            table = open_table(
                StoragePath(detail["table"], self.storage_options), detail["version"]
            )
            fragment = None if table is None else table.get_fragment(detail["fragment"])
            # A table that was written anew has the same versions and fragments, in other files.
            if fragment is None or _data_url(detail["table"], fragment.metadata) != span.url:
                raise FileNotFoundError(f"version {detail['version']} of {detail['table']}")
            scanner = fragment.scanner(
                columns=schema.names,
                filter=detail["filter"],
                offset=span.start,
                limit=span.stop - span.start,
                blob_handling=_BLOBS,
            )
            return cast_table(scanner.to_table(), schema)

        return with_retries(_failpoints.failing("read", span.url, read))


@known_keywords("vd.lance")
def lance(
    url: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LanceSource:
    """Declare a Lance table as a pipeline's source. It requires ``vane-dagster[lance]``.

    Deleted rows are left out. Blobs are read as their bytes.

    A fragment of the table is computed again if its data files or its deletion file change. So a
    commit that adds fragments computes these, deleted or updated rows recompute their fragments,
    and a compaction recomputes the fragments that it has rewritten. Do not clean up a version while
    a run uses it: the remaining fragments would fail. To list a partition, the filter's columns are
    scanned, which is fast with a scalar index.

    Args:
        url: The table, a local path or ``s3://``. ``{partition_key}`` is replaced by the
            partition's key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start:%Y/%m}`` and ``{partition_end}`` by the bounds of a time window.
        version: The number of a version, or a tag. By default each run reads the version that is
            the latest when it is planned, and computes only the fragments that are new or changed.
        filter: An SQL filter that Lance evaluates, such as ``"day = '{partition_key}'"``. The rows
            that pass it are the partition. A partitioned pipeline needs the key here, or in the
            URL. Bounds are timestamps or dates: ``"time >= timestamp '{partition_start}'"``.
        columns: The columns to read; all by default. A change of other columns computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.
        storage_options: Options of the fsspec file system. For S3, the options that Lance's own
            driver supports are passed to it: ``key``, ``secret``, ``token``, ``anon``,
            ``endpoint_url``, and ``endpoint_url`` and ``region_name`` of ``client_kwargs``.

    Raises:
        DefinitionError: If an argument has another form, or pylance is not installed.
    """
    where = "vd.lance"
    check_installed(where, "lance", "lance")
    if not isinstance(version, (int, str)) and version is not None:
        raise DefinitionError(
            f"{where}: version is a {type(version).__name__}; expected the number of a version, "
            "or a tag"
        )
    place = folder_arguments(where, url, version, storage_options)
    return LanceSource(**place, **lake_arguments(where, filter, columns, asset, allow_empty))


def _state(metadata: Any, files: Sequence[Any]) -> str:
    """Return a digest of some data files of a fragment and its deletions."""
    parts = [[str(each.path), list(each.fields), each.base_id] for each in files]
    deletions = metadata.deletion_file
    return digest([parts, metadata.physical_rows, deletions and deletions.asdict()])


def _ids(column: Any) -> list[int]:
    """Return the ids of a column and of the fields in it."""
    return [column.id(), *(id for child in column.children() for id in _ids(child))]


def _data_url(url: str, metadata: Any) -> str:
    """Return the URL of a fragment's first data file."""
    return f"{url.rstrip('/')}/data/{metadata.files[0].path}"
