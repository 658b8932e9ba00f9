"""End the workers of `LocalCompute`, and remove their tables, after their driver was killed.

A worker ends by itself when its driver is gone, unless code holds the interpreter lock. So a small
process reads the current process groups from a pipe, and kills those left when the pipe ends. This
file is run as a script and uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys


class Guard:
    """The side of the responsible process."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Register a process group to be killed when this process is gone."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Unregister a process group. Call this before its id may be reused."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """End the guard process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; workers still end by themselves
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _watch(folder: str) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1])
