"""Whether this process is a worker.

A module that declares a pipeline beside its functions is imported in workers too. The local files
that it names do not exist there, and classes decorated by `vd.cls` are constructed there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings

_VARIABLE = "VANE_DAGSTER_WORKER"
"""Set in workers. Processes that a worker starts inherit it; they may import the same modules."""


def become_worker() -> None:
    """Mark this process as a worker, and let glibc keep 64 MiB of freed memory.

    By default it returns arrays of a few megabytes to the kernel after each call, and the next call
    pays for new pages. Dagster's notes on beta features are for the process that loads definitions.
    """
    os.environ[_VARIABLE] = "1"
    warnings.filterwarnings("ignore", r".* is currently in (beta|preview)")
    with contextlib.suppress(AttributeError):  # another C library
        for option, size in ((-1, 64 << 20), (-3, 32 << 20)):  # M_TRIM_ and M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size)


def is_worker() -> bool:
    """Return whether this process is a worker, or was started by one."""
    return bool(os.environ.get(_VARIABLE))
