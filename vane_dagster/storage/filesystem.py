"""Folders on local disk or any fsspec file system, written atomically."""

from __future__ import annotations

import errno
import functools
import glob
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, TypeVar

from vane_dagster import _failpoints
from vane_dagster._lazy import fsspec
from vane_dagster._secrets import holds_secret, keep_options, revealed, without_secrets
from vane_dagster.errors import StoreError, described
from vane_dagster.retries import has_status, is_transient_storage_error, with_retries

_S = TypeVar("_S")
_T = TypeVar("_T")
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "azure"),
}
_OBJECT_STORES = {*_EXTRAS}
_PUT_IS_ATOMIC = {*_OBJECT_STORES, "memory"}
"""File systems that write a file as a whole, and if asked only if there is none."""
_EXISTS, _NOT_IMPLEMENTED = 412, 501
"""The HTTP statuses of such a write if there is a file, or if the server has no such writes."""
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
IO_THREADS = 16
"""Threads that read, list or copy files concurrently; they spend their time waiting for storage."""
TEMPORARY = ".writing-"
"""The prefix of the names of files that are being written."""


def in_threads(function: Callable[[_S], _T], items: Iterable[_S]) -> list[_T]:
    """Return the results of a function that waits for storage, called in `IO_THREADS` threads."""
    given = list(items)
    if len(given) <= 1:
        return [function(item) for item in given]
    with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
        return list(threads.map(function, given))


@dataclass(frozen=True)
class FileInfo:
    """A listed file: its size in bytes, and the Unix time of its last change, in seconds."""

    size: int
    modified: float


@dataclass(frozen=True)
class StoragePath:
    """A folder or a file, identified by its URL. It is cheap to send to a worker.

    Attributes:
        url: A local path or fsspec URL.
        storage_options: Options of the fsspec file system.
        is_read_only: Whether to refuse any change, because others own the folder.
        suffix: What the names of its files end with on disk, and not in `names` and arguments.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_read_only: bool = False
    suffix: str = ""

    def __post_init__(self) -> None:
        if holds_secret(self.url):
            raise StoreError(
                f"{self.url!r} holds a password or a signature; give the URL without it, and "
                "credentials in storage_options"
            )

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system. fsspec keeps one instance per process."""
        return self._resolve()[0]

    @property
    def path(self) -> str:
        """The folder's path on its file system."""
        return self._resolve()[1]

    @property
    def is_local(self) -> bool:
        """Whether it is on a local disk."""
        return "file" in protocols(self.fs)

    @property
    def _is_s3(self) -> bool:
        return "s3" in protocols(self.fs)

    def _resolve(self) -> tuple[fsspec.AbstractFileSystem, str]:
        if self.url.startswith("/") and not self.storage_options:
            return _of_local_path(self.url)
        protocol = protocol_of(self.url)
        keep_options(self.storage_options)
        options = revealed(self.storage_options)
        if protocol in _OBJECT_STORES:
            options.setdefault("use_listings_cache", False)  # other processes write there too
        url = os.path.expanduser(self.url) if protocol == "file" else self.url
        try:
            # By hand: fsspec reads "::" as a chain of file systems, even in a partition's key.
            kind = fsspec.get_filesystem_class(protocol)
            fs = kind(**{**kind._get_kwargs_from_urls(url), **options})
            path = kind._strip_protocol(url)
            if "file" in protocols(fs):  # listings have one slash
                path = re.sub("//+", "/", path)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            driver = f"vane-dagster[{extra}]" if extra else "the fsspec driver for it"
            raise StoreError(
                f"{self.url!r} has no file system: {error}. Install {driver}"
            ) from error
        except ValueError as error:
            raise StoreError(
                f"{self.url!r} has no file system: {error}. Expected a path, or a URL of a file "
                "system that fsspec knows, such as s3://bucket/folder"
            ) from error
        return fs, path.rstrip("/") or "/"

    def options_for(self, url: str) -> Mapping[str, Any]:
        """Return the storage options for a URL with this folder's protocol, else none."""
        return self.storage_options if protocol_of(url) == protocol_of(self.url) else {}

    def child(self, *parts: str) -> StoragePath:
        """Return a folder below this one."""
        return replace(self, url=_joined(self.url, *parts))

    def file(self, name: str) -> str:
        """Return the path of a file in the folder, on its file system."""
        return f"{self.path.rstrip('/')}/{name}{self.suffix}"

    def file_url(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return _joined(self.url, name + self.suffix)

    def names(self) -> dict[str, int]:
        """List names and sizes in bytes of the folder's own files; none if it is missing."""
        files, end = self.listing()[0].items(), self.suffix
        named = {n.removesuffix(end): size for n, size in files if n.endswith(end)}
        return {n: size for n, size in named.items() if n and not n.startswith(TEMPORARY)}

    def walk(self) -> dict[str, int]:
        """List all files below the folder: paths relative to it, and sizes in bytes."""
        return {
            path: stored.size
            for path, stored in self.entries().items()
            if not path.rpartition("/")[2].startswith(TEMPORARY)
        }

    def entries(self) -> dict[str, FileInfo]:
        """List all files below the folder, including unfinished ones, by path relative to it."""
        listed = self.with_storage_errors("listed", self._below)
        start = len(self.path.lstrip("/")) + 1
        return {
            path.lstrip("/")[start:]: FileInfo(int(info["size"] or 0), modified(info))
            for path, info in listed.items()
        }

    def folders(self) -> list[str]:
        """List the names of the folders directly in the folder, sorted."""
        return self.listing()[1]

    def listing(self) -> tuple[dict[str, int], list[str]]:
        """List the folder's own files, unfinished ones too, with sizes in bytes; its folders."""
        entries = self.with_storage_errors("listed", self._entries)
        named = [(PurePosixPath(e["name"]).name, e) for e in entries]
        files = {name: int(e["size"] or 0) for name, e in named if e["type"] == "file"}
        return files, sorted(name for name, e in named if e["type"] == "directory" and name)

    def write(self, name: str, data: Any, synced: bool = True) -> None:
        """Write a file atomically: readers see it whole or not at all.

        Without `synced`, a file on a local disk may be lost if the machine fails, until `sync`.
        """
        if self.is_local:
            write = functools.partial(_write_local, self.file(name), data, synced)
            self.with_storage_errors("written", write, name)
            return
        pipe = functools.partial(self._place, name, lambda p: self.fs.pipe_file(p, bytes(data)))
        self.with_storage_errors("written", pipe, name)

    def sync(self, name: str) -> None:
        """Wait until the disk has a file; one that is gone is ignored. Other stores have it."""
        if self.is_local:
            with suppress(FileNotFoundError):
                self.with_storage_errors("read", lambda: _sync_local(self.file(name)), name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file atomically, unless there is one of that name.

        Of several processes that create a file at once, one writes it. On a file system without a
        means for that, the file of the last one stays: read it again to know.
        """
        return self.with_storage_errors("written", lambda: self._create(name, data), name)

    def read(self, name: str, is_small: bool = False) -> bytes:
        """Read a file's bytes; those of a small one with a single request."""
        # Else s3fs 2026.3 or later asks for the size first, to read large files in pieces.
        in_pieces = self._is_s3 and hasattr(self.fs, "_cat_file_concurrent")
        options = {"max_concurrency": 1} if is_small and in_pieces else {}
        read = functools.partial(self.fs.cat_file, self.file(name), **options)
        return bytes(self.with_storage_errors("read", read, name))

    def put(self, name: str, path: str) -> None:
        """Copy a file from the local disk into the folder, atomically."""
        self.with_storage_errors(
            "written", lambda: self._place(name, lambda p: self.fs.put_file(path, p)), name
        )

    def get(self, name: str, path: str) -> None:
        """Copy a file of the folder to the local disk."""
        self.with_storage_errors("read", lambda: self.fs.get_file(self.file(name), path), name)

    def delete(self, names: list[str]) -> None:
        """Delete files of the folder; those already gone are ignored."""
        for name in names:
            self.with_storage_errors(
                "deleted from", functools.partial(self._remove, self.file(name)), name
            )

    def move(self, name: str, target: StoragePath, new_name: str) -> None:
        """Move a file to another folder of the same file system, and replace any file there."""
        self.with_storage_errors(
            "moved from", lambda: self._move(self.file(name), target, new_name), name
        )

    def with_storage_errors(self, verb: str, action: Callable[[], _T], name: str = "") -> _T:
        """Run an operation on the folder, and retry it a few times after transient errors.

        A missing file that is read is a FileNotFoundError, any other error a StoreError.
        """
        if self.is_read_only and verb not in ("read", "listed"):
            raise StoreError(
                f"{self.file_url(name)!r} cannot be {verb}: a branch only reads its fallback. "
                "Change it with the store that owns it"
            )
        try:
            return with_retries(_failpoints.failing(verb, self.file_url(name), action))
        except StoreError:
            raise
        except Exception as error:  # drivers raise their own exception classes
            if verb == "read" and isinstance(error, FileNotFoundError):
                raise without_secrets(error) from None
            raise StoreError(
                f"{self.url!r} cannot be {verb}: {described(error)}. {advice(error)}"
            ) from without_secrets(error)

    def _entries(self) -> list[dict[str, Any]]:
        self.fs.invalidate_cache(self.path)
        try:
            if self._is_s3:  # whose `ls` of an empty folder lists its parent, too
                listed = fsspec.asyn.sync(self.fs.loop, self.fs._lsdir, self.path)
            else:
                listed = self.fs.ls(self.path, detail=True)
            return [each for each in listed if not is_folder_marker(each)]
        except FileNotFoundError:
            return []

    def _below(self) -> dict[str, dict[str, Any]]:
        self.fs.invalidate_cache(self.path)
        return files_below(self.fs, self.path)

    def _place(self, name: str, write: Callable[[str], None]) -> None:
        """Write a file under its own name if that is atomic, else under a temporary name first."""
        if _PUT_IS_ATOMIC & set(protocols(self.fs)):
            write(self.file(name))
            return
        temporary = self.file(f"{TEMPORARY}{secrets.token_hex(6)}")
        self.fs.makedirs(self.path, exist_ok=True)
        try:
            write(temporary)
            self.fs.mv(temporary, self.file(name))
        except BaseException:
            with suppress(Exception):  # garbage collection removes it later
                self.fs.rm_file(temporary)
            raise

    def _create(self, name: str, data: bytes) -> bool:
        path = self.file(name)
        if self.is_local:
            return _create_local(path, data)
        if _PUT_IS_ATOMIC & set(protocols(self.fs)):
            try:
                self.fs.pipe_file(path, data, mode="create")
                return True
            except Exception as error:  # drivers raise their own exception classes
                if isinstance(error, FileExistsError) or has_status(error, _EXISTS):
                    return False
                if not has_status(error, _NOT_IMPLEMENTED):
                    raise
        if name in self.names():
            return False
        self._place(name, lambda place: self.fs.pipe_file(place, data))
        return True

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def _move(self, path: str, target: StoragePath, new_name: str) -> None:
        _failpoints.at_storage("write", target.file_url(new_name))
        if self.is_local:
            os.makedirs(target.path, exist_ok=True)
            os.replace(path, target.file(new_name))
            return
        try:
            if self._is_s3:  # whose `mv` first looks for folders of these names
                self.fs.cp_file(path, target.file(new_name))
                self.fs.rm_file(path)
            else:
                self.fs.mv(path, target.file(new_name))
        except FileNotFoundError:
            if new_name not in target.names():  # else an earlier attempt has moved it
                raise


def protocol_of(url: str) -> str:
    """Return the protocol of a URL; "file" for a path."""
    match = _PROTOCOL.match(url)
    return match.group(1) if match else "file"


def absolute_url(url: str) -> str:
    """Return the URL of the same place for a process in another folder, or of another user."""
    if not url:  # the folder of the process, otherwise
        raise StoreError("expected a path or a URL, got ''")
    is_relative = protocol_of(url) in ("file", "local") and url.partition("://")[2][:1] != "/"
    return os.path.abspath(StoragePath(url).path) if is_relative else url


def modified(info: Mapping[str, Any]) -> float:
    """Return the Unix time of a file's last change, in seconds; infinity if it is unknown."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        if (value := info.get(name)) is None:
            continue
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        return value.timestamp() if isinstance(value, datetime) else float(value)
    return math.inf


@functools.lru_cache(maxsize=4096)
def _of_local_path(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return what an absolute path resolves to: a plan asks for the same ones again and again."""
    kind = fsspec.get_filesystem_class("file")
    stripped = re.sub("//+", "/", kind._strip_protocol(path))
    return kind(), stripped.rstrip("/") or "/"


def _joined(url: str, *parts: str) -> str:
    return url + "/".join(parts) if url.endswith("/") else "/".join([url, *parts])


def _write_local(path: str, data: Any, synced: bool) -> None:
    with beside(path) as temporary:
        _write_through(temporary, data, synced)
        os.replace(temporary, path)


def _create_local(path: str, data: bytes) -> bool:
    with beside(path) as temporary:
        _write_through(temporary, data, True)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if os.path.exists(path):
                return False
            os.replace(temporary, path)
    return True


def _write_through(path: str, data: Any, synced: bool) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        if synced:
            os.fsync(file.fileno())


def _sync_local(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def beside(path: str) -> Iterator[str]:
    """Yield a temporary path in the folder of a path; a file there is removed in the end."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(6)}")
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def files_below(
    fs: fsspec.AbstractFileSystem, path: str, prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """List every file below a folder, by path; a path to a file lists that file."""
    if "file" in protocols(fs):
        return _local_files(path)
    options = {"prefix": prefix} if prefix and set(protocols(fs)) & _OBJECT_STORES else {}
    try:
        listed: dict[str, dict[str, Any]] = fs.find(path, detail=True, **options)
    except FileNotFoundError:  # the bucket does not exist
        return {}
    # HTTP has no description of a path that is a file.
    described = {name: info or fs.info(name) for name, info in listed.items()}
    return {name: info for name, info in described.items() if not is_folder_marker(info)}


def is_folder_marker(info: Mapping[str, Any]) -> bool:
    """Return whether a file is the empty object by which S3's console, e.g., makes a folder."""
    return info["type"] == "file" and info["name"].endswith("/") and not info.get("size")


def _local_files(path: str) -> dict[str, dict[str, Any]]:
    """List local files as fsspec's `find` does, but raise for folders that cannot be listed.

    FIFOs, sockets and devices are left out: they have no content, and reading one may never end.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        info = _local_info(path)
        return {path: info} if info else {}
    files: dict[str, dict[str, Any]] = {}
    for folder, _, names in os.walk(path, onerror=_unless_missing, followlinks=True):
        for name in names:
            if info := _local_info(os.path.join(folder, name)):
                files[info["name"]] = info
    return files


def _local_info(path: str) -> dict[str, Any] | None:
    """Describe a local file as fsspec does, and to the nanosecond; None if it is not regular."""
    try:
        status = os.stat(path)
    except FileNotFoundError:  # gone since it was listed, or a link to nothing
        return {"name": path, "size": 0, "type": "file"}
    if not stat.S_ISREG(status.st_mode):
        return None
    times = {"mtime": status.st_mtime, "mtime_ns": status.st_mtime_ns}
    return {"name": path, "size": status.st_size, "type": "file", **times}


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    """Return the protocol names of a file system."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def duckdb_path(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return a file's path or URL for DuckDB, escaped because DuckDB expands patterns."""
    return glob.escape(path if "file" in protocols(fs) else fs.unstrip_protocol(path))


def advice(error: Exception) -> str:
    """Say what the user can do about an error of a file system."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk is full: free space, or move the store, and run again; finished work is kept"
        )
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return (
            "Permission is denied: give the user or the credentials of this process read and write "
            "access, or move the store"
        )
    if is_transient_storage_error(error):
        return "It was retried several times; run again when the storage responds"
    return "Check that it exists, that the credentials give access and that there is free space"
