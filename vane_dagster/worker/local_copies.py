"""Copies of the users' local files on a node: each content is copied once, and verified.

A copy is ``<worker's folder>/<digest of its record>/content/<name>``. Processes that use one hold a
shared lock, by which others know that it must stay. What nobody uses is deleted after a day.

User code can write to a copy, whatever its mode is if it is root. So the state of each file is
recorded when its content was verified: one that has changed is verified again before the next use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vane_dagster._private_folder import new_temporary_folder, temporary_root, worker_folder
from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.storage.shipped_files import (
    RECORD,
    StoredFile,
    discard,
    parse_record,
    shipped_files,
)

KIND = "files"
"""The kind of the worker's private folder."""
UNUSED_SECONDS = 86_400.0
"""Seconds that a copy is kept after the last process that used it has started to."""

_BLOCK = 1 << 20
_CONTENT, _RECORD = "content", "record.json"
_USED, _LOCK, _PARTIAL, _VERIFIED = ".used", ".lock", ".partial-", ".verified.json"
_CLOCK_SECONDS = 0.1
"""Longer than the resolution of a file's times, which would hide a write right after the copy."""
_in_use: dict[Path, int] = {}
"""The descriptors that hold this process's locks; they are closed when it ends."""


def local_copy(digest: str, root: Location, folder: Path | None = None) -> str:
    """Return the path of a node's copy of a file or folder, and copy it first if it has none.

    Args:
        digest: The sha256 of its record.
        root: The root of the store that has it.
        folder: The folder of all copies. Default: the worker's private folder.

    Raises:
        StoreError: If the store does not have it, or the node has no room for it.
    """
    copies = folder or worker_folder(KIND)
    copy = copies / digest
    with _locked(copies / f"{digest}{_LOCK}") as is_locked:
        stored = _intact(copy)
        if stored is None:
            if is_locked:
                _remove_partial(copies, digest)
            _remove_unused(copies)
            stored = _download(digest, root, copies)
        _keep(copies / f"{digest}{_USED}")
    return str(copy / _CONTENT / stored.name)


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


def _intact(copy: Path) -> StoredFile | None:
    """Return what a copy consists of; None if a file is missing, or has another content.

    A file whose state is the recorded one is not read.
    """
    try:
        data = (copy / _RECORD).read_bytes()
        if hashlib.sha256(data).hexdigest() != copy.name:
            return None
        stored = parse_record(data, str(copy))
        paths = _paths(stored, copy / _CONTENT)
        states = {str(path): _state(path) for path in paths}
        verified = _verified_states(copy)
        changed = [path for path in paths if states[str(path)] != verified.get(str(path))]
        for path in changed:
            digest, _ = paths[path]
            if not stat.S_ISREG(path.lstat().st_mode) or _sha256(path) != digest:
                return None
        if changed:
            _record_verified(copy, states)
    except (OSError, StoreError):
        return None
    return stored


def _state(path: Path) -> list[int]:
    """Return what any write or replacement of a file changes. No program can set its ctime."""
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _verified_states(copy: Path) -> dict[str, list[int]]:
    """Return the states of a copy's files when they were last verified; empty if unknown."""
    try:
        states = json.loads(copy.with_name(copy.name + _VERIFIED).read_bytes())
    except (OSError, ValueError):
        return {}
    return states if isinstance(states, dict) else {}


def _record_verified(copy: Path, states: dict[str, list[int]]) -> None:
    place = copy.with_name(copy.name + _VERIFIED)
    fresh = place.with_name(f"{place.name}.{os.getpid()}")
    fresh.write_text(json.dumps(states))
    fresh.replace(place)


def _sha256(path: Path) -> str:
    actual = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            actual.update(block)
    return actual.hexdigest()


def _paths(stored: StoredFile, folder: Path) -> dict[Path, tuple[str, int]]:
    return {folder / stored.name / name: content for name, content in stored.files.items()}


def _download(digest: str, root: Location, copies: Path) -> StoredFile:
    source = shipped_files(root)
    url = source.file_url(digest + RECORD)
    try:
        data = source.read(digest + RECORD)
    except FileNotFoundError as error:
        raise _gone(url) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(f"{url!r} does not have the content of its name. Run again to replace it")
    stored = parse_record(data, url)
    if (free := shutil.disk_usage(copies).free) < stored.size:
        raise StoreError(
            f"{stored.name!r} needs {stored.size:,} bytes in {str(copies)!r} of this node, where "
            f"{free:,} are free. Make room, or set TMPDIR of the workers (now "
            f"{str(temporary_root())!r}) to a folder of a larger disk"
        )
    partial = new_temporary_folder(f"{digest}{_PARTIAL}", copies)
    try:
        wanted = _paths(stored, partial / "new" / _CONTENT)
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            list(threads.map(lambda item: _fetch(root, item[1], item[0]), wanted.items()))
        (partial / "new" / _RECORD).write_bytes(data)
        if os.path.lexists(copies / digest):
            (copies / digest).rename(partial / "old")
        (partial / "new").rename(copies / digest)
        time.sleep(_CLOCK_SECONDS)
        paths = _paths(stored, copies / digest / _CONTENT)
        _record_verified(copies / digest, {str(path): _state(path) for path in paths})
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return stored


def _fetch(root: Location, content: tuple[str, int], path: Path) -> None:
    """Copy a content, given by its digest and size, from the store, and verify it."""
    (digest, size), source = content, shipped_files(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.get(digest, str(path))
    except FileNotFoundError as error:
        raise _gone(source.file_url(digest)) from error
    if (actual := _sha256(path)) != digest:
        with contextlib.suppress(StoreError):
            discard(root, [digest])
        raise StoreError(
            f"{source.file_url(digest)!r} holds {path.stat().st_size:,} bytes with the sha256 "
            f"{actual}, expected {size:,} bytes with that of its name: it is damaged, "
            "and was deleted. Run again, so that it is copied again"
        )
    path.chmod(0o400)


def _gone(url: str) -> StoreError:
    return StoreError(
        f"{url!r} is gone: garbage collection or someone else has deleted it since the run began. "
        "Run again, so that the file is copied into the store again"
    )


def _remove_unused(copies: Path) -> None:
    """Delete what killed processes have left, and copies that nobody used for some time."""
    oldest = time.time() - UNUSED_SECONDS
    for lock in copies.glob(f"*{_LOCK}"):
        digest = lock.name.removesuffix(_LOCK)
        with contextlib.suppress(OSError), _locked(lock, wait=False) as own:
            if own:
                _remove_partial(copies, digest)
                _remove_if_unused(copies, digest, oldest)


def _remove_partial(copies: Path, digest: str) -> None:
    """Delete what killed processes have left of a copy. Its lock must be held."""
    for partial in copies.glob(f"{digest}{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _remove_if_unused(copies: Path, digest: str, oldest: float) -> None:
    used = copies / f"{digest}{_USED}"
    if used.stat().st_mtime < oldest:
        with _locked(used, wait=False) as unused:
            if unused:
                shutil.rmtree(copies / digest, ignore_errors=True)
                (copies / f"{digest}{_VERIFIED}").unlink(missing_ok=True)
                used.unlink()
