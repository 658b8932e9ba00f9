"""Local files of arguments in the store, by content, where workers get them from.

``<root>/~files/<sha256>`` is the content of one file. ``<root>/~files/<digest>.json`` is the record
of a file or folder: its name, and the contents that it consists of. Each run that needs a file
writes its record again, so the record's age tells garbage collection when it was last needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import StoreError
from vane_dagster.storage.codec import parse_file
from vane_dagster.storage.filesystem import StoragePath, in_threads

FILES = "~files"
"""The folder below the store's root; no pipeline has such a name."""
RECORD = ".json"
"""The suffix of records."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredFile:
    """A file or folder as its record describes it.

    Attributes:
        name: Its name.
        files: The digest and size in bytes of each file, by its name in the folder; the only file
            of a file is named "".
    """

    name: str
    files: Mapping[str, tuple[str, int]]


def shipped_files(root: StoragePath) -> StoragePath:
    """Return the folder of shipped files in a store."""
    return root.child(FILES)


def parse_record(data: bytes, url: str) -> StoredFile:
    """Parse a record."""

    def parse(record: Any) -> StoredFile:
        files = {str(name): (str(d), int(size)) for name, (d, size) in record["files"].items()}
        return StoredFile(str(record["name"]), files)

    stored = parse_file(data, url, parse)
    places = [stored.name, *(part for name in stored.files if name for part in name.split("/"))]
    if any(place in ("", ".", "..") or "/" in place for place in places):
        raise StoreError(f"{url!r} names a file outside of its folder. Delete it")
    if not all(_SHA256.fullmatch(digest) for digest, _ in stored.files.values()):
        raise StoreError(f"{url!r} names a content by something other than a sha256. Delete it")
    return stored


def contents_of(data: bytes, url: str) -> set[str]:
    """Return the digests of the contents that a record names; see `parse_record`."""
    return {digest for digest, _ in parse_record(data, url).files.values()}


def mark_needed(root: StoragePath, digest: str, data: bytes) -> None:
    """Write a record, which keeps its contents from garbage collection for some time."""
    shipped_files(root).write(digest + RECORD, data)


def missing_contents(root: StoragePath, contents: Mapping[str, int]) -> list[str]:
    """Return the digests of contents that the store does not have with the expected size."""
    present = shipped_files(root).names()
    return [digest for digest, size in contents.items() if present.get(digest) != size]


def upload(root: StoragePath, paths: Mapping[str, str]) -> None:
    """Copy files into a store."""
    folder = shipped_files(root)
    in_threads(lambda item: folder.put(*item), paths.items())


def discard(root: StoragePath, digests: Sequence[str]) -> None:
    """Delete contents that do not have the digest of their names."""
    shipped_files(root).delete(list(digests))
