"""Python byte streams that DuckDB reads like files."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import fsspec

_PROTOCOL = "vane-stream"
_numbers = itertools.count()
_lock = threading.Lock()


@dataclass
class _Stream:
    """A stream that DuckDB may read.

    Attributes:
        blocks: Starts the stream anew.
        size: Its bytes.
        error: The error of a read, which DuckDB would replace by its own.
    """

    blocks: Callable[[], Iterator[bytes]]
    size: int
    error: Exception | None = None


_streams: dict[str, _Stream] = {}


@contextmanager
def as_file(
    connection: duckdb.DuckDBPyConnection, blocks: Callable[[], Iterator[bytes]], size: int
) -> Iterator[str]:
    """Give DuckDB a stream as a file.

    Args:
        connection: The connection that reads it.
        blocks: Starts the stream anew.
        size: Its bytes.

    Yields:
        The URL for DuckDB. An error of the stream is raised in place of DuckDB's.
    """
    with _lock:
        if not connection.filesystem_is_registered(_PROTOCOL):
            connection.register_filesystem(_StreamFiles())
    url = f"{_PROTOCOL}://{next(_numbers)}"
    stream = _streams[url] = _Stream(blocks, size)
    try:
        yield url
    except duckdb.Error:
        if stream.error is not None:
            raise stream.error from None
        raise
    finally:
        del _streams[url]


class _StreamFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of the streams that are open now."""

    protocol = _PROTOCOL
    cachable = False

    def glob(self, path: str, **options: Any) -> list[str]:
        return [path]

    def exists(self, path: str, **options: Any) -> bool:
        return path in _streams

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        url = path if "://" in path else f"{_PROTOCOL}://{path}"
        return {"name": url, "size": _streams[url].size, "type": "file"}

    def open(self, path: str, mode: str = "rb", **options: Any) -> io.RawIOBase:
        return _StreamFile(_streams[path])


class _StreamFile(io.RawIOBase):
    """A stream that starts anew when DuckDB seeks backwards."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream
        self._start()

    def _start(self) -> None:
        self._blocks = self._stream.blocks()
        self._rest = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        found: list[memoryview] = []
        wanted = size if size >= 0 else 1 << 62
        while wanted:
            if not self._rest:
                block = self._next()
                if block is None:
                    break
                self._rest = memoryview(block)
                continue
            piece, self._rest = self._rest[:wanted], self._rest[wanted:]
            found.append(piece)
            wanted -= len(piece)
            self._at += len(piece)
        return b"".join(found)

    def _next(self) -> bytes | None:
        try:
            return next(self._blocks, None)
        except Exception as error:  # drivers raise their own exception classes
            self._stream.error = error
            raise

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        target = position + (self._at if whence == io.SEEK_CUR else 0)
        if target < self._at:
            self._start()
        while self._at < target and self.read(min(target - self._at, 1 << 20)):
            pass
        return self._at
