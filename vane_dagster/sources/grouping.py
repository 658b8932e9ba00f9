"""Groups of small files, which an added file does not move.

Files are sorted by path. A group ends after a file whose path hashes below a threshold, so a cut
depends on that file alone. The threshold is proportional to the file's size: a file that is one
hundredth of the target is a cut with probability 1/100, and groups reach the target on average
(content-defined chunking, with files in place of bytes). Between two cuts, files are packed in
order up to the target.

So an added, removed or rewritten file changes groups between its two neighbouring cuts only: its
own group, and those packed after it before the next cut. A new file that is a cut itself splits a
group in two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_FILES = 1024
"""Files of a group, at most."""
SMALL_SHARE = 1 / 8
"""Share of a fragment's rows and bytes up to which a file is small."""


@dataclass(frozen=True)
class FileSize:
    """A file to group: its URL, rows, and uncompressed bytes."""

    url: str
    rows: int
    bytes: int


def is_small(file: FileSize, rows: int, size: int) -> bool:
    """Whether a file is small enough to be grouped.

    Args:
        file: The file.
        rows: Rows of a fragment, at most.
        size: Bytes of a fragment, at most.
    """
    return file.rows <= rows * SMALL_SHARE and file.bytes <= size * SMALL_SHARE


def group(files: Sequence[FileSize], rows: int, size: int) -> Iterator[list[FileSize]]:
    """Groups small files.

    Args:
        files: The files, in any order.
        rows: Rows of a group, at most.
        size: Bytes of a group, at most.

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
    """Whether a group always ends after a file.

    Args:
        file: The file.
        rows: Rows of a group, at most.
        size: Bytes of a group, at most.
    """
    share = max(file.rows / rows, file.bytes / size, 1 / MOST_FILES)
    hashed = hashlib.blake2b(file.url.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") < share * 2**64
