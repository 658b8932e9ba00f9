"""Folders on local disk or any fsspec file system, written atomically."""

from __future__ import annotations

import errno
import functools
import glob
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_options, revealed, url_parts, with_options, without_secrets
from vane_dagster.errors import StoreError
from vane_dagster.storage.transient_errors import advice, persistently

_T = TypeVar("_T")
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"}
_PUT_IS_ATOMIC = {*_OBJECT_STORES, "memory"}
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
}
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
TEMPORARY = ".writing-"
"""How the names of files begin that are being written."""


@dataclass(frozen=True)
class Stored:
    """A file as it is listed: bytes, and Unix time in seconds of its last change."""

    size: int
    modified: float


@dataclass(frozen=True)
class Location:
    """A folder by its URL, cheap to send to a worker.

    A user and password in the URL are moved to the options.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        url, found = url_parts(self.url)
        if found:
            object.__setattr__(self, "url", url)
            object.__setattr__(self, "storage_options", with_options(found, self.storage_options))

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system, one instance a process (kept by fsspec)."""
        return self._resolved()[0]

    @property
    def path(self) -> str:
        """The folder's path on its file system."""
        return self._resolved()[1].rstrip("/") or "/"

    @property
    def is_local(self) -> bool:
        """Whether it is on a local disk."""
        return "file" in protocols(self.fs)

    def _resolved(self) -> tuple[fsspec.AbstractFileSystem, str]:
        keep_options(self.storage_options)
        options = revealed(self.storage_options)
        protocol = protocol_of(self.url)
        if protocol in _OBJECT_STORES:
            options.setdefault("use_listings_cache", False)  # other processes write there too
        url = os.path.expanduser(self.url) if protocol == "file" else self.url
        try:
            # By hand, as fsspec takes "::" for a chain of file systems, also in a partition's key.
            kind = fsspec.get_filesystem_class(protocol)
            fs = kind(**{**kind._get_kwargs_from_urls(url), **options})
            path = kind._strip_protocol(url)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            driver = f"vane-dagster[{extra}]" if extra else "the fsspec driver for it"
            raise StoreError(
                f"{self.url!r} has no file system: {error}. Install {driver}"
            ) from error
        except ValueError as error:
            raise StoreError(
                f"{self.url!r} has no file system: {error}. Expected a path, or a URL of a file "
                "system that fsspec knows, as s3://bucket/folder"
            ) from error
        return fs, path

    def child(self, *parts: str) -> Location:
        """A folder below this one."""
        return Location(_joined(self.url, *parts), self.storage_options)

    def file(self, name: str) -> str:
        """Path of a file in the folder, on its file system."""
        return f"{self.path}/{name}" if self.path != "/" else f"/{name}"

    def file_url(self, name: str) -> str:
        """URL of a file in the folder."""
        return _joined(self.url, name)

    def names(self) -> dict[str, int]:
        """Names and sizes in bytes of the files directly in the folder; none if it is missing."""
        found = {
            PurePosixPath(e["name"]).name: int(e["size"] or 0)
            for e in self.tried("listed", self._entries)
            if e["type"] == "file"
        }
        return {n: size for n, size in found.items() if n and not n.startswith(TEMPORARY)}

    def walk(self) -> dict[str, int]:
        """Paths relative to the folder, and sizes, of all files below it."""
        return {
            path: stored.size
            for path, stored in self.entries().items()
            if not PurePosixPath(path).name.startswith(TEMPORARY)
        }

    def entries(self) -> dict[str, Stored]:
        """All files below the folder, those being written too, by path relative to it."""
        found = self.tried("listed", self._below)
        start = len(self.path.lstrip("/")) + 1
        return {
            path.lstrip("/")[start:]: Stored(int(info["size"] or 0), modified(info))
            for path, info in found.items()
        }

    def folders(self) -> list[str]:
        """Names of the folders directly in the folder, sorted."""
        entries = self.tried("listed", self._entries)
        names = (PurePosixPath(e["name"]).name for e in entries if e["type"] == "directory")
        return sorted(name for name in names if name)

    def write(self, name: str, data: Any) -> None:
        """Writes a file so that it is seen whole or not at all.

        Raises:
            StoreError: If the file system refuses.
        """
        if self.is_local:
            self.tried("written", lambda: _write_local(self.file(name), data), name)
            return
        pipe = functools.partial(self._place, name, lambda p: self.fs.pipe_file(p, bytes(data)))
        self.tried("written", pipe, name)

    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: If there is none.
            StoreError: If the file system refuses.
        """
        try:
            return bytes(self.tried("read", lambda: self.fs.cat_file(self.file(name)), name))
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise

    def put(self, name: str, path: str) -> None:
        """Writes a file from one on the local disk, so that it is seen whole or not at all.

        Raises:
            StoreError: If the file system refuses.
        """
        self.tried("written", lambda: self._place(name, lambda p: self.fs.put_file(path, p)), name)

    def delete(self, names: list[str]) -> None:
        """Deletes files of the folder; those already gone are passed over."""
        for name in names:
            self.tried("deleted from", functools.partial(self._remove, self.file(name)), name)

    def move(self, name: str, target: Location, new_name: str) -> None:
        """Moves a file to another folder of the same file system, replacing what is there."""
        self.tried("moved from", lambda: self._move(self.file(name), target, new_name), name)

    def copy(self, name: str, target: Location) -> None:
        """Copies a file to another folder of the same file system, as a link where that works.

        Raises:
            StoreError: If the file system refuses.
        """
        self.tried("copied from", lambda: self._copy(name, target), name)

    def tried(self, verb: str, action: Callable[[], _T], name: str = "") -> _T:
        """What an operation on the folder gives, tried again a few times if its error may pass.

        Args:
            verb: What cannot be done where it fails, as "read".
            action: The operation, which may have been done in part before.
            name: The file, for an operation on one.

        Raises:
            StoreError: If the file system refuses, with what can be done about it.
        """
        with self._told(verb):
            return persistently(_failpoints.failing(verb, self.file_url(name), action))

    def _entries(self) -> list[dict[str, Any]]:
        self.fs.invalidate_cache(self.path)
        try:
            return list(self.fs.ls(self.path, detail=True))
        except FileNotFoundError:
            return []

    def _below(self) -> dict[str, dict[str, Any]]:
        self.fs.invalidate_cache(self.path)
        return files_below(self.fs, self.path)

    def _place(self, name: str, write: Callable[[str], None]) -> None:
        """Has a file written under its own name, or under another one first."""
        if _PUT_IS_ATOMIC & set(protocols(self.fs)):
            write(self.file(name))
            return
        temporary = self.file(f"{TEMPORARY}{secrets.token_hex(6)}")
        self.fs.makedirs(self.path, exist_ok=True)
        try:
            write(temporary)
            self.fs.mv(temporary, self.file(name))
        except BaseException:
            with suppress(Exception):  # a collection of garbage finds it later
                self.fs.rm_file(temporary)
            raise

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def _move(self, path: str, target: Location, new_name: str) -> None:
        _failpoints.at_storage("write", target.file_url(new_name))
        if self.is_local:
            os.makedirs(target.path, exist_ok=True)
            os.replace(path, target.file(new_name))
            return
        try:
            self.fs.mv(path, target.file(new_name))
        except FileNotFoundError:
            if new_name not in target.names():  # a former attempt has moved it
                raise

    def _copy(self, name: str, target: Location) -> None:
        _failpoints.at_storage("write", target.file_url(name))
        if self.is_local:
            os.makedirs(target.path, exist_ok=True)
            with suppress(OSError):
                os.link(self.file(name), target.file(name))
            if os.path.exists(target.file(name)):
                return
        target._place(name, lambda path: self.fs.cp_file(self.file(name), path))

    @contextmanager
    def _told(self, verb: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # drivers have exceptions of their own, of many kinds
            raise StoreError(
                f"{self.url!r} cannot be {verb}: {type(error).__name__}: {error}. {advice(error)}"
            ) from without_secrets(error)


def protocol_of(url: str) -> str:
    """The protocol of a URL; "file" for a path."""
    match = _PROTOCOL.match(url)
    return match.group(1) if match else "file"


def modified(info: Mapping[str, Any]) -> float:
    """When a file was last changed, in Unix seconds; infinite where nobody tells."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        if (value := info.get(name)) is None:
            continue
        if isinstance(value, str):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        return value.timestamp() if isinstance(value, datetime) else float(value)
    return math.inf


def _joined(url: str, *parts: str) -> str:
    return url + "/".join(parts) if url.endswith("/") else "/".join([url, *parts])


def _write_local(path: str, data: Any) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(6)}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def files_below(
    fs: fsspec.AbstractFileSystem, path: str, prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """Every file below a folder, or the file that is there, by path; none if there is neither.

    Args:
        fs: The file system.
        path: The folder.
        prefix: How the paths below it begin that are wanted. Where the file system cannot select
            by it, others come too.

    Raises:
        OSError: If a folder cannot be listed; it is not passed over. Also, with ELOOP, if a link
            leads back to a folder that holds it.
    """
    if "file" in protocols(fs):
        return _local_files(path)
    options = {"prefix": prefix} if prefix and set(protocols(fs)) & _OBJECT_STORES else {}
    try:
        found: dict[str, dict[str, Any]] = fs.find(path, detail=True, **options)
    except FileNotFoundError:  # of a bucket
        return {}
    return found


def _local_files(path: str) -> dict[str, dict[str, Any]]:
    """As fsspec's `find`, which passes over folders that it cannot list."""
    if os.path.isfile(path):
        return {path: _local_info(path)}
    found = {}
    above: dict[str, dict[tuple[int, int], str]] = {path: {}}  # of each folder, those it lies in
    for folder, folders, names in os.walk(path, onerror=_unless_missing, followlinks=True):
        outer = above.pop(folder)
        try:
            stat = os.stat(folder)
        except FileNotFoundError:  # gone since it was listed
            folders.clear()
            continue
        if same := outer.get((stat.st_dev, stat.st_ino)):
            raise OSError(
                errno.ELOOP,
                f"the link {folder!r} leads back to the folder {same!r} that holds it, so that the "
                "listing would have no end",
            )
        inner = {**outer, (stat.st_dev, stat.st_ino): folder}
        above.update((os.path.join(folder, name), inner) for name in folders)
        for name in names:
            found[os.path.join(folder, name)] = _local_info(os.path.join(folder, name))
    return found


def _local_info(path: str) -> dict[str, Any]:
    try:
        stat = os.stat(path)
    except FileNotFoundError:  # gone since it was listed, or a link to nothing
        return {"name": path, "size": 0, "type": "file"}
    return {"name": path, "size": stat.st_size, "type": "file", "mtime": stat.st_mtime}


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    """The names that a file system goes by."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def duckdb_path(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """A file as DuckDB is told it, which expands patterns."""
    return glob.escape(path if "file" in protocols(fs) else fs.unstrip_protocol(path))
