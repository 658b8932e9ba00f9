"""Files that the processes of a node create once, under a lock, and share by content.

An entry is the folder ``<folder>/<name>``; files beside it are ``<name>.<suffix>``. A process that
uses an entry records the time, and may hold a shared lock that prevents its deletion. Entries that
have not been used for some time are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from vane_dagster._private_folder import new_temporary_folder

UNUSED_SECONDS = 86_400.0
"""Seconds that an entry is kept after the last process that used it has started to."""

_USED, _LOCK, _PARTIAL, _CLEANED = ".used", ".lock", ".partial", ".cleaned"
_CLEAN_SECONDS = 60.0
"""Seconds between two searches for what can be deleted: there may be very many entries."""
_in_use: dict[Path, int] = {}
"""The descriptors that hold this process's locks; they are closed when it ends."""

T = TypeVar("T")


def shared_entry(
    folder: Path,
    name: str,
    find: Callable[[], T | None],
    make: Callable[[], T],
    *,
    hold: bool,
    unused_seconds: float = UNUSED_SECONDS,
) -> T:
    """Return an entry, and make it first if there is none. Others who want it wait meanwhile."""
    with _locked(_lock(folder, name)):
        entry = find()
        if entry is None:
            _remove((folder / _PARTIAL).glob(f"{name}-*"))
            _remove_unused(folder, unused_seconds)
            entry = make()
        _mark_used(folder / f"{name}{_USED}", hold)
    return entry


@contextlib.contextmanager
def new_entry(folder: Path, name: str) -> Iterator[Path]:
    """Create a temporary folder, whose folder ``new`` becomes the entry at the end."""
    parent = folder / _PARTIAL  # a folder of its own, because there may be very many entries
    parent.mkdir(mode=0o700, exist_ok=True)
    partial = new_temporary_folder(f"{name}-", parent)
    try:
        (partial / "new").mkdir()
        yield partial
        if os.path.lexists(folder / name):
            (folder / name).rename(partial / "old")
        (partial / "new").rename(folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock; yield False if another process has it and `wait` is not set."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _mark_used(path: Path, hold: bool) -> None:
    """Record that an entry is used now; hold a shared lock until this process ends if asked to."""
    if not hold:
        path.touch(0o600)
        return
    if path not in _in_use:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _in_use[path] = descriptor
    os.utime(_in_use[path])


def _lock(folder: Path, name: str) -> Path:
    """Return the lock of an entry. Few entries share it, so that locks need not be deleted."""
    return folder / f"{name[:2]}{_LOCK}"


def _remove_unused(folder: Path, unused_seconds: float) -> None:
    """Delete what killed processes have left, and entries that nobody used for some time."""
    cleaned, now = folder / _CLEANED, time.time()
    with contextlib.suppress(FileNotFoundError):
        if now - cleaned.stat().st_mtime < _CLEAN_SECONDS:
            return
    cleaned.touch(0o600)
    oldest = now - unused_seconds
    # Each folder is listed once: it may have very many entries, and others may wait meanwhile.
    partial, files = _by_entry(folder / _PARTIAL, "-"), _by_entry(folder, ".")
    for name in {*partial, *files}:
        used = folder / f"{name}{_USED}"
        with contextlib.suppress(OSError):
            if name in partial or used.stat().st_mtime < oldest:
                with _locked(_lock(folder, name), wait=False) as own:
                    if own:
                        _remove(partial[name])
                        _remove_if_unused(used, oldest, files[name])


def _by_entry(folder: Path, mark: str) -> Mapping[str, Sequence[Path]]:
    """Return the paths in a folder by the names of their entries, which end at a mark."""
    paths = defaultdict[str, list[Path]](list)
    for path in folder.glob("*"):
        paths[path.name.rpartition(mark)[0] or path.name].append(path)
    return paths


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_unused(used: Path, oldest: float, paths: Iterable[Path]) -> None:
    if used.stat().st_mtime < oldest:
        with _locked(used, wait=False) as unused:
            if unused:
                _remove(paths)
                for path in paths:
                    path.unlink(missing_ok=True)
