"""Digests of values and files that are the same in every process."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A file written more recently than this can change again without a new time stamp.
_CLOCK_GRAIN_NS = 100_000_000


def combine(tag: str, *parts: str | bytes) -> str:
    """Hash a tag and parts, each with its length, so that different lists never collide."""
    state = hashlib.sha256()
    for part in (tag, *parts):
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()


def digest(*values: object) -> str:
    """Hash strings and numbers for fragment keys; returns 40 hex digits."""
    state = hashlib.blake2b(digest_size=20)
    for value in values:
        text = str(value).encode()
        state.update(f"{len(text)}:".encode() + text)
    return state.hexdigest()


class FileCache(Generic[T]):
    """Cache of values computed from files, until the size, a time stamp or the inode changes."""

    def __init__(self, compute: Callable[[str], T]) -> None:
        self._compute = compute
        self._held: dict[str, tuple[tuple[int, ...], T]] = {}

    def get(self, path: str) -> T:
        """Return the value for the file's current content."""
        stat = os.stat(path)
        signature = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        held = self._held.get(path)
        if held is not None and held[0] == signature:
            return held[1]
        changed = max(stat.st_mtime_ns, stat.st_ctime_ns)
        settled = time.time_ns() - changed > _CLOCK_GRAIN_NS
        value = self._compute(path)
        if settled:
            self._held[path] = (signature, value)
        return value
