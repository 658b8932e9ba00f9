"""The identity and version of source files."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import xxhash

from vane_dagster._lazy import fsspec
from vane_dagster.errors import SourceError
from vane_dagster.storage.filesystem import StoragePath, modified, protocols
from vane_dagster.storage.manifest import FileRecord, parse_part_name

_DIGESTS = ("ETag", "etag", "generation", "blob_id", "sha")
_TIMES = ("mtime", "LastModified", "created", "last_modified", "Last-Modified", "updated", "modify")

if TYPE_CHECKING:
    from vane_dagster.sources.base import SourceReader


def file_record(fs: fsspec.AbstractFileSystem, info: Mapping[str, Any]) -> FileRecord:
    """Convert a file system's description of a file to a record.

    The version changes when the file does. The version of a part is in its name, no matter which
    run wrote it last.
    """
    name = info["name"]
    url = fs.unstrip_protocol(name)
    try:
        url.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the name of the file {name!r} is not UTF-8; rename the file") from None
    if part := parse_part_name(name.rpartition("/")[2]):
        return FileRecord(url, int(info["size"]), part[1], part[1])
    version = _first_of(_DIGESTS, info)
    if version is None and "file" in protocols(fs):
        version = info.get("mtime_ns") or os.stat(name).st_mtime_ns
    elif version is None and (version := _first_of(_TIMES, info)) is None:
        info = fs.info(name)  # listings of some file systems, such as HTTP, have only names
        version = _first_of((*_DIGESTS, *_TIMES), info)
    if version is None or info.get("size") is None:
        raise SourceError(
            f"{url!r} has no ETag, modification time or size on its file system, so a changed file "
            "would not be detected. Copy the files to a local disk or an object store"
        )
    if isinstance(version, datetime):  # listings of some file systems have seconds
        version = version.timestamp()
    changed = modified(info)
    return FileRecord(
        url,
        int(info["size"]),
        str(version).strip('"'),
        modified=changed if math.isfinite(changed) else None,
    )


def _first_of(names: Sequence[str], info: Mapping[str, Any]) -> Any:
    return next((value for name in names if (value := info.get(name))), None)


def listed_file(url: str, source: SourceReader) -> FileRecord:
    """Return the current record of a source file."""
    file = StoragePath(url, source.options_for(url))
    file.fs.invalidate_cache()
    return file_record(file.fs, file.fs.info(file.path))


def file_version(file: FileRecord) -> str:
    """Return the size and version of a file; for a part, the digest of its rows alone.

    The footer of a part may be rewritten with the same rows.
    """
    is_part = parse_part_name(file.url.rpartition("/")[2]) is not None
    return file.version if is_part else f"{file.size}\n{file.version}"


def file_identity(file: FileRecord) -> str:
    """Return a digest of a file's URL and version, as 32 hex digits. It excludes the content."""
    text = f"{file.url}\n{file_version(file)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_version(files: Iterable[FileRecord]) -> str:
    """Return a digest of a partition's files and versions: its data version in Dagster."""
    identities = "\n".join(file_identity(file) for file in files)
    return hashlib.blake2b(identities.encode(), digest_size=8).hexdigest()


def content_hash(file: FileRecord, source: SourceReader) -> str | None:
    """Hash the bytes of a local file."""
    path = StoragePath(file.url, source.options_for(file.url)).path

    def is_listed() -> bool:
        now = os.stat(path)
        return (now.st_size, str(now.st_mtime_ns)) == (file.size, file.version)

    try:
        if not is_listed():
            return None
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
        return digest if is_listed() else None
    except FileNotFoundError:
        return None


def reconcile(
    files: Sequence[FileRecord], known: Iterable[FileRecord], source: SourceReader
) -> tuple[FileRecord, ...]:
    """Keep the identity of files that were touched but not changed.

    A local file with the recorded size but another time is read once. It keeps the recorded version
    if its content is the same.
    """
    recorded = {file.url: file for file in known}

    def kept(file: FileRecord) -> FileRecord:
        old = recorded.get(file.url)
        if old is None or old.content is None or not file.url.startswith("file:"):
            return file
        if old.version == file.version and old.size == file.size:
            return replace(file, content=old.content)
        if old.size == file.size and content_hash(file, source) == old.content:
            return replace(old, modified=file.modified)
        return file

    return tuple(kept(file) for file in files)
