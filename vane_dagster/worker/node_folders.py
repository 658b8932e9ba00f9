"""Folders that a node's worker processes share: each is made once, by whoever needs it first.

A folder is named by the digest of its content. Processes that use one hold a shared lock on a file
beside it, by which others know that it must stay. What nobody uses is deleted after a day.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vane_dagster._private_folder import new_temporary_folder

UNUSED_SECONDS = 86_400.0
"""Seconds that a folder is kept after the last process that used it has started to."""

_USED, _LOCK, _PARTIAL = ".used", ".lock", ".partial-"
_in_use: dict[Path, int] = {}
"""The descriptors that hold this process's locks; they are closed when it ends."""


@contextlib.contextmanager
def making(parent: Path, digest: str) -> Iterator[Path]:
    """Hold the lock of a folder while it is verified or made, and keep it until the process ends.

    Args:
        parent: The parent of all such folders.
        digest: The folder's name.

    Yields:
        The folder, which may not exist yet; `replacing` puts it there.
    """
    with _locked(parent / f"{digest}{_LOCK}") as is_locked:
        if is_locked and not (parent / digest).exists():
            _remove_partial(parent, digest)
        yield parent / digest
        _keep(parent / f"{digest}{_USED}")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces another one when it is complete.

    What nobody uses is removed first, to make room.
    """
    _remove_unused(folder.parent)
    partial = new_temporary_folder(f"{folder.name}{_PARTIAL}", folder.parent)
    try:
        (partial / "new").mkdir()
        yield partial / "new"
        if os.path.lexists(folder):
            folder.rename(partial / "old")
        (partial / "new").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _keep(path: Path) -> None:
    """Hold a shared lock until this process ends."""
    if path not in _in_use:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        _in_use[path] = descriptor
    os.utime(_in_use[path])


def _remove_unused(parent: Path) -> None:
    """Delete what killed processes have left, and folders that nobody used for some time."""
    oldest = time.time() - UNUSED_SECONDS
    for lock in parent.glob(f"*{_LOCK}"):
        digest = lock.name.removesuffix(_LOCK)
        with contextlib.suppress(OSError), _locked(lock, wait=False) as own:
            if own:
                _remove_partial(parent, digest)
                _remove_if_unused(parent, digest, oldest)


def _remove_partial(parent: Path, digest: str) -> None:
    """Delete what killed processes have left of a folder. Its lock must be held."""
    for partial in parent.glob(f"{digest}{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _remove_if_unused(parent: Path, digest: str, oldest: float) -> None:
    used = parent / f"{digest}{_USED}"
    if used.stat().st_mtime < oldest:
        with _locked(used, wait=False) as unused:
            if unused:
                shutil.rmtree(parent / digest, ignore_errors=True)
                for beside in parent.glob(f"{digest}.*"):
                    if beside.name not in (f"{digest}{_LOCK}", used.name):
                        beside.unlink(missing_ok=True)
                used.unlink()
