"""Protection of the worker process from user code: its forks and open files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

NO_DESCRIPTORS_STATUS = 89
"""The exit code of a worker in which user code has used up the file descriptors."""
_SPARE_DESCRIPTORS = 8


@contextmanager
def one_process() -> Iterator[None]:
    """End a child process that user code forked in the body, when it leaves the body.

    Only the parent may continue: the child shares its connection and would answer a second time.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)


def check_descriptors() -> None:
    """End this process if too few file descriptors are left to read and write tables.

    The driver then treats the rows like those of any worker that died.
    """
    spare: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            os._exit(NO_DESCRIPTORS_STATUS)
    finally:
        for descriptor in spare:
            os.close(descriptor)
