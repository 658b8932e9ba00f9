"""Grouping of small files that stays stable when files are added.

Files are sorted by path. A group ends after a file if the hash of its path is below a threshold, so
a cut depends on that file alone. The threshold is proportional to the file's size: a file of one
hundredth of the target is a cut with probability 1/100, and groups reach the target on average
(content-defined chunking, with files in place of bytes). Between two cuts, files are packed in
order up to the target.

An added, removed or rewritten file therefore changes groups between its two neighbouring cuts only:
its own group, and those packed after it before the next cut. A new file that is a cut itself splits
a group in two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_FILES = 1024
"""Maximum number of files in a group."""
SMALL_SHARE = 1 / 8
"""Maximum share of a fragment's rows and bytes that a small file has."""


@dataclass(frozen=True)
class FileSize:
    """A file to group: its URL, rows, and uncompressed bytes."""

    url: str
    rows: int
    bytes: int


def is_small(file: FileSize, rows: int, size: int) -> bool:
    """Return whether a file is small enough to be grouped.

    Args:
        file: The file.
        rows: Maximum rows of a fragment.
        size: Maximum bytes of a fragment.
    """
    return file.rows <= rows * SMALL_SHARE and file.bytes <= size * SMALL_SHARE


def group(files: Sequence[FileSize], rows: int, size: int) -> Iterator[list[FileSize]]:
    """Group small files.

    Args:
        files: The files, in any order.
        rows: Maximum rows of a group.
        size: Maximum bytes of a group.

    Yields:
        The files of a group, sorted by URL.
    """
    current: list[FileSize] = []
    held_rows = held_bytes = 0
    for file in sorted(files, key=lambda each: each.url):
        is_full = (
            held_rows + file.rows > rows
            or held_bytes + file.bytes > size
            or len(current) == MOST_FILES
        )
        if current and is_full:
            yield current
            current, held_rows, held_bytes = [], 0, 0
        current.append(file)
        held_rows, held_bytes = held_rows + file.rows, held_bytes + file.bytes
        if is_cut(file, rows, size):
            yield current
            current, held_rows, held_bytes = [], 0, 0
    if current:
        yield current


def is_cut(file: FileSize, rows: int, size: int) -> bool:
    """Return whether a group always ends after a file.

    Args:
        file: The file.
        rows: Maximum rows of a group.
        size: Maximum bytes of a group.
    """
    share = max(file.rows / rows, file.bytes / size, 1 / MOST_FILES)
    hashed = hashlib.blake2b(file.url.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") < share * 2**64
