"""What a worker's processes hold in memory for themselves."""

from __future__ import annotations

from typing import Any

from vane_dagster.pipeline.upkeep import Upkeep


def own_memory() -> int:
    """Bytes that this process and those that it has started hold in memory.

    Without mapped files and shared memory, where the system tells them apart: weights may be the
    first, tables from other workers are the second, and neither is a leak.
    """
    import psutil

    this = psutil.Process()
    return sum(_own(process) for process in (this, *this.children(recursive=True)))


def _own(process: Any) -> int:
    import psutil

    try:
        found = process.memory_info()
    except psutil.Error:  # it has ended
        return 0
    return int(found.rss - getattr(found, "shared", 0))


def spent(upkeep: Upkeep, batches: int) -> str:
    """Why a worker is to be replaced by a fresh one; empty if it is not.

    Args:
        upkeep: What its stage asks for.
        batches: Calls that it has answered.
    """
    if upkeep.max_batches is not None and batches >= upkeep.max_batches:
        return f"has answered {batches} calls, max_batches_per_actor={upkeep.max_batches}"
    if upkeep.max_rss is not None and (held := own_memory()) > upkeep.max_rss:
        return f"holds {in_gib(held)} of memory, max_rss={in_gib(upkeep.max_rss)}"
    return ""


def in_gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
