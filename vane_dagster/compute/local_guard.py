"""Ends the workers of a `LocalCompute` run whose driver was killed, and removes their tables.

A worker ends by itself when its driver is gone, unless code holds the interpreter lock. So a small
process reads from a pipe to the driver which process groups there are, and when the pipe ends it
kills those that are left. This file is run as it is and imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys


class Guard:
    """The driver's side.

    Args:
        folder: Removed when the driver is gone.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Has a process group killed when the driver is gone."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a process group back. To be called before its id may be used again."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Ends the process."""
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
