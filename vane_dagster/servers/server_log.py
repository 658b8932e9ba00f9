"""The log of a server: a file, the one before it, and its last bytes in memory."""

from __future__ import annotations

import contextlib
import os
import threading

from vane_dagster._secrets import masked

_TAIL_BYTES = 2**20


class ServerLog:
    """Writes the log, and reads its end.

    Attributes:
        path: The path of the file. The one before it has the suffix ``.1``.
        end: Number of bytes written since the first start.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.end = 0
        self._size = self._left = size
        self._file: int | None = None
        self._last = b""
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append output. On a full disk it is dropped."""
        with self._lock:
            self.end += len(data)
            self._last = (self._last + data)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError):
                if self._left <= 0 and self._file is not None:
                    os.close(self._file)
                    self._file = None
                    os.replace(self.path, f"{self.path}.1")
                if self._file is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # no file or link of another user
                    self._file = os.open(self.path, flags, 0o600)
                    self._left = self._size
                self._left -= os.write(self._file, data)

    def tail(self, lines: int = 50, since: int = 0) -> str:
        """Return the last lines since a number of bytes; known secrets in them are masked."""
        with self._lock:
            start = max(since, self.end - len(self._last))
            data = self._last[len(self._last) - (self.end - start) :]
        if start > since:  # the first line may lack the beginning of a secret
            data = data.partition(b"\n")[2]
        return "\n".join(masked(data.decode(errors="replace")).rstrip().splitlines()[-lines:])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
