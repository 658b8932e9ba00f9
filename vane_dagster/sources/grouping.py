"""Division of files into fragments: small files are grouped, and others cut.

Groups stay stable when files are added.

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
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vane_dagster.sources.base import FragmentRule, fragment_record
from vane_dagster.storage.manifest import FileRecord, FragmentRecord

MOST_FILES = 1024
"""Maximum number of files in a group."""
SMALL_SHARE = 1 / 8
"""Maximum share of a fragment's rows and bytes that a small file has."""


@dataclass(frozen=True)
class SizedFile:
    """A file to group or cut.

    Attributes:
        record: The file's record.
        groups: Rows and uncompressed bytes of each of its row groups.
        extra: A text that is included in the fragments' digests.
        detail: The detail of spans of its rows, or a function of their first row and stop.
    """

    record: FileRecord
    groups: Sequence[tuple[int, int]]
    extra: str = ""
    detail: str | Callable[[int, int], str] = ""

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(rows for rows, _ in self.groups)

    @property
    def bytes(self) -> int:
        """The uncompressed bytes of its rows."""
        return sum(size for _, size in self.groups)

    def is_within(self, rule: FragmentRule, share: float) -> bool:
        """Return whether it has some rows, and at most a share of a fragment's rows and bytes."""
        return 0 < self.rows <= rule.rows * share and self.bytes <= rule.bytes * share


def divide(
    files: Sequence[SizedFile], rule: FragmentRule, share: float = SMALL_SHARE
) -> tuple[FragmentRecord, ...]:
    """Divide files into fragments."""
    small = [file for file in files if file.is_within(rule, share)]
    fragments = [
        _fragment([(file, 0, file.rows) for file in members], sum(file.bytes for file in members))
        for members in group(small, rule)
    ]
    for file in files:
        if not file.is_within(rule, share):
            fragments += cut(file, rule)
    # Stable: the rows of a file stay in order.
    return tuple(sorted(fragments, key=lambda fragment: fragment.url) if small else fragments)


def group(files: Sequence[SizedFile], rule: FragmentRule) -> Iterator[list[SizedFile]]:
    """Group small files."""
    current: list[SizedFile] = []
    held_rows = held_bytes = 0
    for file in sorted(files, key=lambda each: each.record.url):
        is_full = (
            held_rows + file.rows > rule.rows
            or held_bytes + file.bytes > rule.bytes
            or len(current) == MOST_FILES
        )
        if current and (is_full or is_cut(current[-1], rule)):
            yield current
            current, held_rows, held_bytes = [], 0, 0
        current.append(file)
        held_rows, held_bytes = held_rows + file.rows, held_bytes + file.bytes
    if current:
        yield current


def is_cut(file: SizedFile, rule: FragmentRule) -> bool:
    """Return whether a group always ends after a file."""
    share = max(file.rows / rule.rows, file.bytes / rule.bytes, 1 / MOST_FILES)
    hashed = hashlib.blake2b(file.record.url.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") < share * 2**64


def cut(file: SizedFile, rule: FragmentRule) -> Iterator[FragmentRecord]:
    """Cut a file into fragments along its row groups, and within row groups that are too large.

    The file's mean row size determines the number of rows of a fragment. Row groups with much
    larger rows are cut by their own bytes, at twice the rule's.
    """
    if not file.rows:
        return
    rows, sizes = zip(*file.groups)
    most = max(1, min(rule.rows, int(rule.bytes / max(1.0, file.bytes / file.rows))))
    edges, above = np.cumsum([0, *rows]), np.cumsum([0, *sizes])
    for start, stop in _ranges(rows, most, sizes, 2 * rule.bytes):
        first, last = np.interp([start, stop], edges, above)
        yield _fragment([(file, int(start), int(stop))], int(last - first))


def _fragment(spans: Sequence[tuple[SizedFile, int, int]], size: int) -> FragmentRecord:
    details = [
        f.detail if isinstance(f.detail, str) else f.detail(start, stop) for f, start, stop in spans
    ]
    extra = "".join(file.extra for file, _, _ in spans)
    places = [(file.record, start, stop) for file, start, stop in spans]
    return fragment_record(places, size, extra, details)


def _ranges(
    groups: Sequence[int], most: int, sizes: Sequence[int], max_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield row ranges of at most `most` rows, cut at row group boundaries if possible.

    A range exceeds `max_bytes` only if rows of a row group differ in size, or one row is larger.
    """
    start = end = held = 0
    for rows, size in zip(groups, sizes):
        if end > start and (end + rows - start > most or held + size > max_bytes):
            yield start, end
            start, held = end, 0
        end, held = end + rows, held + size
        pieces = max(-(-(end - start) // most), min(end - start, -(-held // max_bytes)))
        if pieces > 1:
            edges = [start + (end - start) * i // pieces for i in range(pieces + 1)]
            yield from itertools.pairwise(edges)
            start, held = end, 0
    if end > start:
        yield start, end
