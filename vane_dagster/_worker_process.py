"""Whether this process is a worker.

A module that declares a pipeline beside its functions is imported in workers too. The local files
that it names do not exist there, and classes decorated by `vd.cls` are constructed there.
"""

from __future__ import annotations

import os

_VARIABLE = "VANE_DAGSTER_WORKER"
"""Set in workers. Processes that a worker starts inherit it; they may import the same modules."""


def mark_worker() -> None:
    """Mark this process as a worker."""
    os.environ[_VARIABLE] = "1"


def is_worker() -> bool:
    """Return whether this process is a worker, or was started by one."""
    return bool(os.environ.get(_VARIABLE))
