"""A partition's source files and their identities, by listings."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import fsspec

from vane_dagster.commit.location import Location, protocols
from vane_dagster.commit.manifest import FileRecord
from vane_dagster.declare.source import ParquetSource
from vane_dagster.errors import SourceError


def list_files(
    source: ParquetSource, partition: str | None, culprit: str
) -> tuple[FileRecord, ...]:
    """The source files of a partition, sorted by URL.

    Raises:
        SourceError: If there are none, or the listing fails.
    """
    url = source.url_for(partition, escape=glob.escape)
    location = Location(url, source.storage_options)
    fs, path = location.fs, location.path
    try:
        fs.invalidate_cache()
        found = _expand(fs, path)
    except Exception as error:  # drivers have exceptions of their own, of many kinds
        raise SourceError(
            f"{culprit}: source {url!r} cannot be listed: {type(error).__name__}: {error}. Check "
            "the URL and the credentials"
        ) from error
    if not found:
        where = "" if partition is None else f" for partition {partition!r}"
        raise SourceError(
            f"{culprit}: no Parquet file{where} at {url!r}; expected a file, a folder that holds "
            "*.parquet, or a glob that matches some. Check the path, or write the partition first"
        )
    return tuple(sorted((_record(fs, info) for info in found), key=lambda record: record.url))


def _expand(fs: fsspec.AbstractFileSystem, path: str) -> list[dict[str, Any]]:
    if glob.has_magic(path):
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
        found = fs.glob(path, detail=True).items()
        matched = [info for name, info in found if not _is_hidden(name[len(fixed) :])]
    else:
        try:
            matched = [fs.info(path)]
        except FileNotFoundError:
            return []
    files = [info for info in matched if info["type"] == "file"]
    for folder in (info for info in matched if info["type"] == "directory"):
        below = fs.find(folder["name"], detail=True)
        base = len(folder["name"].rstrip("/")) + 1
        files += [info for name, info in below.items() if _is_data(name[base:])]
    return list({info["name"]: info for info in files}.values())


def _is_data(relative: str) -> bool:
    return relative.endswith(".parquet") and not _is_hidden(relative)


def _is_hidden(relative: str) -> bool:
    """Whether a path goes through a name as `.x` or `_x`, which readers of Parquet pass over."""
    return any(part[:1] in (".", "_") for part in PurePosixPath(relative).parts)


def _record(fs: fsspec.AbstractFileSystem, info: dict[str, Any]) -> FileRecord:
    version = info.get("ETag") or info.get("etag") or info.get("generation")
    name = info["name"]
    if version is None and "file" in protocols(fs):
        version = os.stat(name).st_mtime_ns
    elif version is None:
        version = info.get("mtime") or info.get("LastModified") or info.get("created")
    return FileRecord(fs.unstrip_protocol(name), int(info["size"]), str(version).strip('"'))


def listed_file(url: str, source: ParquetSource) -> FileRecord:
    """A source file as it is now.

    Raises:
        FileNotFoundError: If it is gone.
    """
    location = Location(url, source.storage_options)
    location.fs.invalidate_cache()
    return _record(location.fs, location.fs.info(location.path))


def file_identity(file: FileRecord) -> str:
    """Digest of which file it is, in which version; 32 hex digits. Its content stays out of it."""
    text = f"{file.url}\n{file.size}\n{file.version}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def content_hash(file: FileRecord, source: ParquetSource) -> str | None:
    """Digest of a local file's bytes; None if it is not the recorded version any more."""
    state = hashlib.sha256()
    location = Location(file.url, source.storage_options)
    try:
        with open(location.path, "rb") as stream:
            while piece := stream.read(8 << 20):
                state.update(piece)
            after = os.stat(location.path)
    except FileNotFoundError:
        return None
    same = (after.st_size, str(after.st_mtime_ns)) == (file.size, file.version)
    return state.hexdigest() if same else None


def reconcile(
    files: Sequence[FileRecord], known: Iterable[FileRecord], source: ParquetSource
) -> tuple[FileRecord, ...]:
    """Keeps the identity of files that were touched and not changed.

    A local file whose size is as recorded and whose time is not is read once, and keeps the
    recorded version where its content is the same.
    """
    recorded = {file.url: file for file in known}

    def kept(file: FileRecord) -> FileRecord:
        old = recorded.get(file.url)
        if old is None or old.content is None or not file.url.startswith("file:"):
            return file
        if old.version == file.version and old.size == file.size:
            return replace(file, content=old.content)
        if old.size == file.size and content_hash(file, source) == old.content:
            return old
        return file

    return tuple(kept(file) for file in files)
