"""Content digests of the local files and folders that arguments name.

Sizes and times are compared first. The digest of a file's content is cached, in memory and for
large files in a private folder of the user, until its size, a time stamp or the inode changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from vane_dagster._home import STORE_MARK, state_home
from vane_dagster._private_folder import private_folder, temporary_root
from vane_dagster.errors import CodeIdentityError, VaneError
from vane_dagster.fingerprint.hashing import FileCache, Signature, combine

MAX_FILES = 100_000
MAX_BYTES = 256 << 30
"""The most files and bytes of one argument; larger arguments need `version=`."""

_MAX_PATH_LENGTH = 4096
_READERS = 8
_MIN_CACHED_BYTES = 1 << 20
_WHOLE = ("/", "/tmp", "/var/tmp", "/dev/shm", sys.prefix, sys.base_prefix)
_TAGS = {"CACHEDIR.TAG", STORE_MARK}
_SKIPPED = (".", "models--", "datasets--", "__pycache__", "lost+found")
_WILD = re.compile(r"[*?\[{]")


@dataclass(frozen=True)
class LocalFiles:
    """Reads the content that local paths name, except folders that runs or code edits change.

    Attributes:
        data: Paths or URL patterns of the pipeline's source and targets. For a folder that contains
            one or lies in one, only the path counts.
        code: Files of the definitions' code. For a folder that contains one, only the path counts.
        read: Whether content counts. If `version=` replaces it, paths count as plain strings, and
            objects without an identity count by their type.
    """

    data: Sequence[str] = ()
    code: Sequence[str] = ()
    read: bool = True

    def content(self, text: str | os.PathLike[str], where: str) -> str | None:
        """Return the digest of the file or folder that a string names; None if no content counts.

        A `Path` always names one. A string does if it contains a separator, starts with ``~`` or
        ``file://``, or has a suffix.
        """
        path = _named(text) if self.read else None
        if path is None:
            return None
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # missing, too long for a name, or not accessible
            return None
        try:
            if stat.S_ISREG(mode):
                return combine("file", *file_digests([path], text, where))
            if not stat.S_ISDIR(mode) or not os.access(path, os.R_OK | os.X_OK):
                return None
            folder = os.path.realpath(path)
            if self._is_apart(folder):
                return None
            return self._folder(folder, text, where)
        except (OSError, UnicodeError) as error:
            raise CodeIdentityError(
                f"{where}: {os.fspath(text)!r} names a file or folder that cannot be read "
                f"({error}), so its content cannot be part of the identity. Make it readable, or "
                f"give `version=`."
            ) from error

    def places(self, text: str, beside: str | None) -> list[str]:
        """The paths that a literal in code may name: as given, and beside the code's file."""
        if not self.read or _named(text) is None:
            return []
        joined = os.path.join(os.path.dirname(beside or ""), text)
        return [text] if text.startswith(("~", "file:")) else list(dict.fromkeys((text, joined)))

    def _folder(self, folder: str, text: str | os.PathLike[str], where: str) -> str:
        listed = list(islice(walk_files(folder), MAX_FILES + 1))
        digests = file_digests([path for _, path in listed], text, where)
        parts = zip((name for name, _ in listed), digests)
        return combine("folder", *chain.from_iterable(parts))

    def _is_apart(self, folder: str) -> bool:
        """Return whether runs, code edits or others change a folder; if so, only its path counts.

        A folder is apart if it contains the machine's or user's as a whole, or our own state, or if
        it is in a store.
        """
        state = _own_state()
        inside = [*_WHOLE, os.path.expanduser("~"), os.getcwd(), str(temporary_root())]
        inside += [*state, *self.code]
        around = ["/proc", "/sys", *state]
        above = (folder, *map(str, Path(folder).parents))
        around += [each for each in above if os.path.exists(os.path.join(each, STORE_MARK))]
        for pattern in self.data:
            root, *rest = _WILD.split(_plain(pattern) or "", maxsplit=1)
            if fixed := os.path.dirname(root) if rest else root:
                inside.append(fixed)
                around += [] if rest else [fixed]
        is_above = any(_contains(folder, os.path.realpath(path)) for path in inside)
        return is_above or any(_contains(os.path.realpath(path), folder) for path in around)


def file_digests(
    paths: Sequence[str | None], text: str | os.PathLike[str], where: str
) -> Sequence[str]:
    """Return the sha256 of each file's content; an empty text for what is not a file."""
    size = sum(os.stat(path).st_size for path in paths if path)
    if size > MAX_BYTES or len(paths) > MAX_FILES:
        raise CodeIdentityError(
            f"{where}: {os.fspath(text)!r} names {size:,} bytes in {len(paths):,} files or more. "
            f"At most {MAX_BYTES:,} bytes in {MAX_FILES:,} files are read to become part of the "
            f"identity. Name the files or the subfolder that are used, or give the stage "
            f"`vd.Reuse(version=...)` and raise it when they change."
        )
    with ThreadPoolExecutor(max_workers=_READERS) as threads:
        return list(threads.map(lambda path: _digests.get(path) if path else "", paths))


def _named(text: str | os.PathLike[str]) -> str | None:
    """Return the local path that a string names by its form; it may not exist."""
    given = os.fspath(text)
    if not 0 < len(given) <= _MAX_PATH_LENGTH or "\n" in given or "\0" in given:
        return None
    if not isinstance(text, str):
        return given
    if given.startswith("file:"):
        parts = urllib.parse.urlsplit(given)
        local = parts.netloc in ("", "localhost")
        return urllib.parse.unquote(parts.path) if local and parts.path else None
    if "://" in given:
        return None
    if given.startswith("~"):
        return os.path.expanduser(given)
    # A bare word names a file or folder only by chance.
    is_path = "/" in given or os.sep in given or ("." in given and given.strip("."))
    return given if is_path else None


def walk_files(root: str) -> Iterator[tuple[str, str | None]]:
    """Yield the files of a folder by relative name and path; anything else without a path.

    Hidden files and folders, compiled code, tagged caches and stores are skipped. A folder that
    several links point to is entered once.
    """
    entered = {_inode(os.stat(root)): "."}
    waiting = [("", root)]
    while waiting:
        above, folder = waiting.pop()
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        if any(entry.name in _TAGS for entry in listed):
            continue
        folders = []
        for entry in listed:
            if entry.name.startswith(_SKIPPED):
                continue
            name = f"{above}{entry.name}"
            try:
                state = entry.stat()
            except OSError as error:
                if not entry.is_symlink():
                    raise
                yield f"{name} -> {type(error).__name__}", None  # a broken link
                continue
            if stat.S_ISREG(state.st_mode):
                yield name, entry.path
            elif stat.S_ISDIR(state.st_mode):
                inode = _inode(os.stat(entry.path))
                if inode in entered:
                    yield f"{name} -> {entered[inode]}", None
                else:
                    entered[inode] = name
                    folders.append((f"{name}/", entry.path))
        waiting += reversed(folders)


def _inode(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


def _own_state() -> list[str]:
    with contextlib.suppress(VaneError):
        return [str(state_home())]
    return []


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _plain(url: str) -> str | None:
    """Return the absolute path of a local URL or path; None if it is remote."""
    path = url.removeprefix("file://")
    return None if "://" in path else os.path.abspath(os.path.expanduser(path))


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(path: str, signature: Signature) -> str | None:
    """Return the digest of a large file that another process stored, if it is unchanged."""
    try:
        if signature[0] < _MIN_CACHED_BYTES or not _cache_folder().is_dir():
            return None
        stored = _record(path, signature).read_text()
    except (OSError, VaneError, ValueError):
        return None
    return stored if len(stored) == 64 else None


def _store(path: str, signature: Signature, digest: str) -> None:
    """Store the digest of a large file. Errors of writing to the cache are ignored."""
    if signature[0] < _MIN_CACHED_BYTES:
        return
    with contextlib.suppress(OSError, VaneError, UnicodeError):
        place = _record(path, signature)
        written = place.with_suffix(f".{secrets.token_hex(8)}")
        written.touch(mode=0o600, exist_ok=False)
        written.write_text(digest)
        os.replace(written, place)


def _cache_folder() -> Path:
    return state_home() / "file-digests"


def _record(path: str, signature: Signature) -> Path:
    """Return the file with the digest of a file in one state."""
    name = combine("file", os.fsencode(os.path.realpath(path)), *map(str, signature))
    return Path(private_folder(_cache_folder()), name[:40])


_digests = FileCache(_read, _load, _store)
