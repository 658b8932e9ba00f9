"""Which file a source file is, and in which version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec

from vane_dagster.storage.filesystem import Location, protocols
from vane_dagster.storage.manifest import FileRecord, parse_part_name

if TYPE_CHECKING:
    from vane_dagster.sources.base import Source


def file_record(fs: fsspec.AbstractFileSystem, info: Mapping[str, Any]) -> FileRecord:
    """A file as its file system describes it, with a version that changes when it does.

    That of a part stands in its name, whoever wrote it last.
    """
    name = info["name"]
    url, size = fs.unstrip_protocol(name), int(info["size"])
    if part := parse_part_name(PurePosixPath(name).name):
        return FileRecord(url, size, part[1], part[1])
    version = info.get("ETag") or info.get("etag") or info.get("generation")
    if version is None and "file" in protocols(fs):
        version = os.stat(name).st_mtime_ns
    elif version is None:
        version = info.get("mtime") or info.get("LastModified") or info.get("created")
    return FileRecord(url, size, str(version).strip('"'))


def listed_file(url: str, source: Source) -> FileRecord:
    """A source file as it is now.

    Raises:
        FileNotFoundError: If it is gone.
    """
    location = Location(url, source.options_for(url))
    location.fs.invalidate_cache()
    return file_record(location.fs, location.fs.info(location.path))


def file_version(file: FileRecord) -> str:
    """Size and version of a file; of a part, whose footer may be written anew, its rows alone."""
    is_part = parse_part_name(file.url.rpartition("/")[2]) is not None
    return file.version if is_part else f"{file.size}\n{file.version}"


def file_identity(file: FileRecord) -> str:
    """Digest of which file it is, in which version; 32 hex digits. Its content stays out of it."""
    text = f"{file.url}\n{file_version(file)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_version(files: Iterable[FileRecord]) -> str:
    """Digest of which files a partition has, in which versions; its data version in Dagster."""
    identities = "\n".join(file_identity(file) for file in files)
    return hashlib.blake2b(identities.encode(), digest_size=8).hexdigest()


def content_hash(file: FileRecord, source: Source) -> str | None:
    """Digest of a local file's bytes; None if it is not the recorded version any more."""
    state = hashlib.sha256()
    location = Location(file.url, source.options_for(file.url))
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
    files: Sequence[FileRecord], known: Iterable[FileRecord], source: Source
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
