"""What the store holds of another asset, as a pipeline's source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Union

import pyarrow as pa

from vane_dagster.errors import SourceError
from vane_dagster.pipeline.source import ParquetSource, Source, StoredSource
from vane_dagster.planning.source_files import file_record
from vane_dagster.storage.manifest import FileRecord, Manifest
from vane_dagster.storage.reader import find, options_for, places
from vane_dagster.storage.store import Store

_READERS = 16

Listed = Union[tuple[FileRecord, ...], SourceError]
"""The files of a partition, sorted by URL and perhaps none, or why they cannot be listed. What the
store holds is in the order of its rows."""


def list_stored(
    source: StoredSource, partitions: Sequence[str | None], culprit: str, store: Store
) -> dict[str | None, Listed]:
    """The files that the manifests in force name, of some partitions.

    Raises:
        StoreError: If the manifests cannot be listed or read.
    """
    path = source.asset.split("/")
    groups: dict[str | None, list[Manifest]]
    if list(partitions) == [None]:
        manifests = find(store, path, None)
        groups = {None: list(manifests.values())} if manifests else {}
    else:
        groups = {key: [found] for key, found in find(store, path, partitions).items()}

    def listed(partition: str | None) -> Listed:
        if partition not in groups:
            return SourceError(
                f"{culprit}: asset {source.asset!r} was never materialized into "
                f"{store.root.url!r}{_where(partition)}; materialize it first, with this store"
            )
        try:
            return tuple(file for m in groups[partition] for file in _files(store, m))
        except Exception as error:  # drivers have exceptions of their own, of many kinds
            return SourceError(
                f"{culprit}: the files of asset {source.asset!r}{_where(partition)} cannot be "
                f"listed: {type(error).__name__}: {error}. Materialize it again"
            )

    with ThreadPoolExecutor(max_workers=_READERS) as threads:
        return dict(zip(partitions, threads.map(listed, partitions)))


def read_as(source: Source, store: Store, listed: Iterable[Listed]) -> ParquetSource:
    """The source as its files are read: with the options that reach them.

    Args:
        source: As it was declared.
        store: Where rows of other assets are.
        listed: Its files.
    """
    if isinstance(source, ParquetSource):
        return source
    urls = (file.url for files in listed if not isinstance(files, SourceError) for file in files)
    url = next(urls, store.root.url)
    return ParquetSource(
        source.url_for(None), source.asset, source.allow_empty, options_for(store, url)
    )


def stored_schema(source: Source, store: Store, partition: str | None) -> pa.Schema:
    """The columns of a partition that the store holds without any file.

    Raises:
        SourceError: If it is gone.
    """
    assert isinstance(source, StoredSource), "another source has a file at least"
    path = source.asset.split("/")
    found = find(store, path, None if partition is None else [partition])
    if not found:
        raise SourceError(f"asset {source.asset!r}{_where(partition)} is gone from the store")
    return next(iter(found.values())).schema


def _files(store: Store, manifest: Manifest) -> Sequence[FileRecord]:
    folder, names = places(store, manifest)
    fs = folder.fs
    parts: Mapping[str, FileRecord] = {
        part.name: FileRecord(
            fs.unstrip_protocol(folder.file(part.name)), part.bytes, part.digest, part.digest
        )
        for part in manifest.parts
    }
    if all(name in parts for name in names):
        return [parts[name] for name in names]
    fs.invalidate_cache()
    return [file_record(fs, fs.info(folder.file(name))) for name in names]


def _where(partition: str | None) -> str:
    return "" if partition is None else f" in partition {partition!r}"
