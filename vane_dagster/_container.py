"""The CPUs and the memory that this process may use, which a container limits."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUP = "/sys/fs/cgroup"
"""The limits of a container of Docker or Kubernetes, by version 2 of Linux's control groups."""


def usable_cpus() -> int:
    """The CPUs of this process's affinity, within the container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, Path(_CGROUP, "cpu.max").read_text().split())
        cpus = min(cpus, max(1, math.ceil(quota / period)))
    return cpus


def usable_memory() -> int:
    """The bytes of the machine's memory, within the container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(Path(_CGROUP, "memory.max").read_text()))
    return memory
