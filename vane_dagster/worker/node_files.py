"""Files that the processes of a node make once and share: under a lock, by a name of their content.

An entry is ``<folder>/<name>``, a folder; files beside it are ``<name>.<suffix>``. Processes that
use one mark the time, and may hold a shared lock by which others know that it must stay. What
nobody has used for some time is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from vane_dagster._private_folder import new_temporary_folder, temporary_root, worker_folder
from vane_dagster.errors import StoreError

UNUSED_SECONDS = 86_400.0
"""Seconds that an entry is kept after the last process that used it has started to."""
_DERIVED_SECONDS = 3600.0
"""A run searches an index within minutes; others may have as many as there are partitions."""

_USED, _LOCK, _PARTIAL, _CLEANED = ".used", ".lock", ".partial", ".cleaned"
_CLEAN_SECONDS = 60.0
"""Seconds between two searches for what can be deleted: there may be very many entries."""
_MOST_SECONDS = 1.0
"""Seconds for which a search deletes. A task waits for it; the next search deletes the rest."""
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
    with _locked(_lock(folder, name)) as is_locked:
        entry = find()
        if entry is None:
            if is_locked:
                _remove_partial(folder, name)
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


class DerivedFiles(Generic[T]):
    """Mapped files that are made of others once on a node. They are deleted an hour after a use."""

    def __init__(self, kind: str, read: Callable[[Path], T], most: int) -> None:
        self._kind, self._read, self._most = kind, read, most
        self.opened: OrderedDict[Path, T] = OrderedDict()

    def open(self, identity: object, build: Callable[[Path], None], folder: Path | None) -> T:
        """Open an entry, and make it first if the node has none."""
        entries = folder or worker_folder(self._kind)
        place = entries / hashlib.sha256(json.dumps(identity).encode()).hexdigest()

        def find() -> T | None:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return self._read(place)
            return None

        def make() -> T:
            with new_entry(entries, place.name) as partial:
                build(partial)
            return self._read(place)

        if place not in self.opened:
            # A mapped file that another process deletes can still be read, so no lock is held.
            self.opened[place] = shared_entry(
                entries, place.name, find, make, hold=False, unused_seconds=_DERIVED_SECONDS
            )
            if len(self.opened) > self._most:
                self.opened.popitem(last=False)
        self.opened.move_to_end(place)
        return self.opened[place]


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise a StoreError if a folder's disk has less free space than needed."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise StoreError(
            f"{what} needs {needed:,} bytes in {str(folder)!r} of this node, where "
            f"{free:,} are free. Make room, or set TMPDIR of the workers (now "
            f"{str(temporary_root())!r}) to a folder of a larger disk"
        )


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock; yield whether it is held.

    It is not if another process has it, and `wait` is not set, or on a file system without locks.
    """
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
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
        with contextlib.suppress(OSError):  # a file system without locks
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
    names = {path.name.rpartition("-")[0] for path in (folder / _PARTIAL).glob("*-*")}
    for used in folder.glob(f"*{_USED}"):
        with contextlib.suppress(FileNotFoundError):
            if used.stat().st_mtime < oldest:
                names.add(used.stem)
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > _MOST_SECONDS:
            return
        with contextlib.suppress(OSError), _locked(_lock(folder, name), wait=False) as own:
            if own:
                _remove_partial(folder, name)
                _remove_if_unused(folder, name, oldest)


def _remove_partial(folder: Path, name: str) -> None:
    """Delete what killed processes have left of an entry. Its lock must be held."""
    for path in (folder / _PARTIAL).glob(f"{name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_unused(folder: Path, name: str, oldest: float) -> None:
    used = folder / f"{name}{_USED}"
    if used.stat().st_mtime < oldest:
        with _locked(used, wait=False) as unused:
            if unused:
                shutil.rmtree(folder / name, ignore_errors=True)
                for path in folder.glob(f"{name}.*"):
                    path.unlink()
