"""Digests of values and files that are the same in every process."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A file written more recently than this can change again without a new time stamp.
_CLOCK_GRAIN_NS = 2_000_000_000


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


Signature = tuple[int, ...]


class FileCache(Generic[T]):
    """Cache of values computed from files, until the size, a time stamp or the inode changes."""

    def __init__(
        self,
        compute: Callable[[str], T],
        load: Callable[[str, Signature], T | None] = lambda path, signature: None,
        store: Callable[[str, Signature, T], None] = lambda path, signature, value: None,
    ) -> None:
        self._compute, self._load, self._store = compute, load, store
        self._held: dict[str, tuple[Signature, T]] = {}

    def get(self, path: str) -> T:
        """Return the value for the file's current content."""
        signature, changed = _signature(path)
        held = self._held.get(path)
        if held is not None and held[0] == signature:
            return held[1]
        value = self._load(path, signature)
        if value is None:
            is_settled = time.time_ns() - changed > _CLOCK_GRAIN_NS
            value = self._compute(path)
            if not is_settled or _signature(path)[0] != signature:
                return value
            self._store(path, signature, value)
        self._held[path] = (signature, value)
        return value


def _signature(path: str) -> tuple[Signature, int]:
    """Return the status of a file, and when it was changed."""
    state = os.stat(path)
    times = (state.st_mtime_ns, state.st_ctime_ns)
    return (state.st_size, *times, state.st_ino, state.st_dev), max(times)
