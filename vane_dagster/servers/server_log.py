"""The log of a server, which its guard writes: files of equal size, the last two of which exist."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vane_dagster._secrets import masked
from vane_dagster.servers.guard import log_file

_TAIL_BYTES = 2**16


class ServerLog:
    """Reads the log. A position in it is a number of bytes since the server was first started.

    Args:
        prefix: Prefix of the paths of its files.
        size: Bytes of a file.
    """

    def __init__(self, prefix: str, size: int) -> None:
        self.prefix, self._size = prefix, size

    @property
    def path(self) -> str:
        """The path of the newest file."""
        return log_file(self.prefix, max(self._numbers(), default=0))

    def end(self) -> int:
        """Return the position after the last byte."""
        number = max(self._numbers(), default=0)
        try:
            return number * self._size + os.stat(log_file(self.prefix, number)).st_size
        except FileNotFoundError:
            return number * self._size

    def read(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Read a part of the log; known secrets in it are masked.

        Args:
            offset: Position of its first byte; a negative one counts from the end. If the files
                there were deleted, the part starts with the oldest file.
            limit: The largest number of bytes to read. A part that reaches it ends with a line.

        Returns:
            The bytes, and the position after them.
        """
        numbers = self._numbers()
        if offset < 0:
            offset += self.end()
        offset = max(offset, 0, min(numbers, default=0) * self._size)
        data = b""
        while len(data) < limit:
            number, start = divmod(offset + len(data), self._size)
            found = self._read_file(number, start, limit - len(data))
            if not found:
                break
            data += found
        if len(data) == limit and b"\n" in data:  # a secret is not divided
            data = data[: data.rindex(b"\n") + 1]
        return masked(data.decode(errors="replace")).encode(), offset + len(data)

    def tail(self, since: int = 0, lines: int = 50) -> str:
        """Return the last lines.

        Args:
            since: Position before which nothing is read.
            lines: The largest number of lines.
        """
        data, _ = self.read(max(since, self.end() - _TAIL_BYTES), _TAIL_BYTES)
        return "\n".join(data.decode().rstrip().splitlines()[-lines:])

    def _read_file(self, number: int, start: int, limit: int) -> bytes:
        """Read from one file; nothing if it does not exist or another user has replaced it."""
        with contextlib.suppress(OSError):
            file = os.open(log_file(self.prefix, number), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_uid == os.geteuid():
                    return os.pread(file, min(limit, self._size - start), start)
            finally:
                os.close(file)
        return b""

    def _numbers(self) -> list[int]:
        """Return the numbers of the files that exist."""
        folder, name = os.path.split(self.prefix)
        found = [0] if os.path.exists(log_file(self.prefix, 0)) else []
        for path in Path(folder).glob(f"{name}.*.log"):
            number = path.name[len(name) + 1 : -len(".log")]
            if number.isdigit():
                found.append(int(number))
        return found
