"""All local Ray heads of a user on this machine."""

from __future__ import annotations

import contextlib

from vane_dagster._home import state_home
from vane_dagster.compute.local_head import Head, HeadFolder
from vane_dagster.errors import ComputeError


def running_heads() -> list[tuple[HeadFolder, Head]]:
    """The running heads of all Python environments on this machine, the oldest first."""
    heads = []
    for record in state_home().glob("*/head.json"):
        place = HeadFolder(record.parent)
        with contextlib.suppress(ComputeError):  # not private: another user may have planted it
            if (head := place.find()) is not None:
                heads.append((place, head))
    return sorted(heads, key=lambda each: each[1].started_at)
