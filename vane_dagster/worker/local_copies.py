"""Copies of the users' local files on a node: each content is copied once, and verified.

A copy is ``<worker's folder>/<digest of its record>/content/<name>``. Processes that use it hold a
shared lock, which prevents its deletion. Copies that have not been used for a day are deleted.

User code may write to a copy; as root it may do so whatever the mode is. Therefore each file gets a
fixed modification time, and a copy with a file of another time or size is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from vane_dagster._private_folder import worker_folder
from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.shipped_files import (
    RECORD,
    StoredFile,
    discard,
    parse_record,
    shipped_files,
)
from vane_dagster.worker.node_files import new_entry, shared_entry

KIND = "files"
"""The kind of the worker's private folder."""

_CONTENT, _RECORD = "content", "record.json"
_WRITTEN = 1_000_000_000.0
"""The time of modification that a verified file gets, in seconds since 1970."""


def local_copy(digest: str, root: StoragePath) -> str:
    """Return the path of a node's copy of a file or folder, and copy it first if it has none."""
    copies = worker_folder(KIND)
    copy = copies / digest
    stored = shared_entry(
        copies, digest, lambda: _intact(copy), lambda: _download(digest, root, copies), hold=True
    )
    return str(copy / _CONTENT / stored.name)


def _intact(copy: Path) -> StoredFile | None:
    """Return what a copy consists of; None if a file is missing, or was written to."""
    try:
        stored = parse_record((copy / _RECORD).read_bytes(), str(copy))
        for path, (_, size) in _paths(stored, copy / _CONTENT).items():
            status = path.lstat()
            if (status.st_size, status.st_mtime) != (size, _WRITTEN):
                return None
    except (OSError, ValueError, StoreError):
        return None
    return stored


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _paths(stored: StoredFile, folder: Path) -> dict[Path, tuple[str, int]]:
    return {folder / stored.name / name: content for name, content in stored.files.items()}


def _download(digest: str, root: StoragePath, copies: Path) -> StoredFile:
    source = shipped_files(root)
    url = source.file_url(digest + RECORD)
    try:
        data = source.read(digest + RECORD)
    except FileNotFoundError as error:
        raise _gone(url) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(
            f"the content of {url!r} does not match the digest in its name. Run again to replace it"
        )
    stored = parse_record(data, url)
    with new_entry(copies, digest) as partial:
        wanted = _paths(stored, partial / "new" / _CONTENT)
        in_threads(lambda item: _fetch(root, item[1], item[0]), wanted.items())
        (partial / "new" / _RECORD).write_bytes(data)
    return stored


def _fetch(root: StoragePath, content: tuple[str, int], path: Path) -> None:
    """Copy a content, given by its digest and size, from the store, and verify it."""
    digest, source = content[0], shipped_files(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.get(digest, str(path))
    except FileNotFoundError as error:
        raise _gone(source.file_url(digest)) from error
    if (actual := _sha256(path)) != digest:
        with contextlib.suppress(StoreError):
            discard(root, [digest])
        raise StoreError(
            f"{source.file_url(digest)!r} has the sha256 {actual}, expected that of its name: it "
            "is damaged and was deleted. Run again to copy it again"
        )
    path.chmod(0o400)
    os.utime(path, (_WRITTEN, _WRITTEN))


def _gone(url: str) -> StoreError:
    return StoreError(
        f"{url!r} is gone: it was deleted after the run began, by garbage collection or by hand. "
        "Run again to copy the file into the store again"
    )
