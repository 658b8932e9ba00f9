"""The watcher of a local Ray head: a small process that stops an idle head."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from vane_dagster.compute.local_head import Head, HeadFolder
from vane_dagster.compute.processes import drivers

CHECK_SECONDS = 30.0


def watch(folder: str) -> None:
    """Run until the head has been stopped, by this process or another."""
    place = HeadFolder(Path(folder))
    head = place.read()
    while head is not None and head.alive():
        time.sleep(pause(place))
        try:
            if place.read() != head:
                return
            if stop_if_idle(place, head):
                print(f"stopped the head at {time.strftime('%F %T')}: no driver was connected")
                return
        except Exception:  # a failed check must end neither the watch nor the head
            traceback.print_exc()


def pause(place: HeadFolder) -> float:
    """Seconds until the next check."""
    idle_minutes = place.use().idle_minutes
    return CHECK_SECONDS if idle_minutes is None else min(CHECK_SECONDS, idle_minutes * 6)


def stop_if_idle(place: HeadFolder, head: Head) -> bool:
    """Stop the head if no driver was connected for its `idle_minutes`."""

    def is_idle() -> bool:
        if drivers(place.mark, head.address):
            place.touch(time.time())
        stops_at = place.use().stops_at()
        return stops_at is not None and time.time() >= stops_at and place.read() == head

    return place.stop_if(is_idle)
