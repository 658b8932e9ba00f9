"""The log of a server: files of equal size, the last two of which exist."""

from __future__ import annotations

import contextlib
import os
import threading

from vane_dagster._secrets import masked

_TAIL_BYTES = 2**20


class ServerLog:
    """Writes and reads the log. A position in it is a number of bytes since the first start.

    Attributes:
        end: The position after the last byte.
    """

    def __init__(self, prefix: str, size: int) -> None:
        self._prefix, self._size = prefix, size
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        self.end = 0

    @property
    def path(self) -> str:
        """The path of the newest file."""
        return self._path(max(self._files, default=0))

    def write(self, data: bytes) -> None:
        """Append output. What cannot be written, as on a full disk, is dropped."""
        with self._lock, contextlib.suppress(OSError):
            while data:
                number, start = divmod(self.end, self._size)
                if number not in self._files:
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL  # no file or link of another user
                    self._files[number] = os.open(self._path(number), flags, 0o600)
                    self._remove(number - 2)
                count = os.pwrite(self._files[number], data[: self._size - start], start)
                self.end += count
                data = data[count:]

    def tail(self, lines: int = 50, since: int = 0) -> str:
        """Return the last lines; known secrets in them are masked."""
        data = b""
        with self._lock:
            start = max(since, self.end - _TAIL_BYTES, min(self._files, default=0) * self._size)
            while start + len(data) < self.end:
                number, offset = divmod(start + len(data), self._size)
                file = self._files.get(number)
                found = b"" if file is None else os.pread(file, self._size - offset, offset)
                if not found:
                    break
                data += found
        if start > since:  # the first line may lack the beginning of a secret
            data = data.partition(b"\n")[2]
        return "\n".join(masked(data.decode(errors="replace")).rstrip().splitlines()[-lines:])

    def close(self) -> None:
        """Close the files; nothing can be read after it."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _path(self, number: int) -> str:
        return f"{self._prefix}.{number}.log" if number else f"{self._prefix}.log"

    def _remove(self, number: int) -> None:
        if number in self._files:
            os.close(self._files.pop(number))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
