"""All local Ray heads of a user on this machine."""

from __future__ import annotations

from pathlib import Path

from vane_dagster._dataclass import dataclass
from vane_dagster._home import state_home
from vane_dagster.compute.local_head import Head, HeadFolder
from vane_dagster.compute.processes import command_line
from vane_dagster.errors import ComputeError

_RESOURCES = "--static_resource_list="


@dataclass(frozen=True)
class RunningHead:
    """A running head, its state folder, and the resources that it offers, under Ray's names."""

    place: HeadFolder
    head: Head
    resources: dict[str, float]

    def __str__(self) -> str:
        return f"Ray head {self.head.name!r} of {self.head.prefix} at {self.head.address}"


def running_heads(home: Path | None = None) -> list[RunningHead]:
    """The running heads of all Python environments on this machine."""
    found = []
    for record in sorted((home or state_home()).glob("*/head.json")):
        place = HeadFolder(record.parent)
        try:
            head = place.read()
        except ComputeError:  # not private: another user may have planted it
            continue
        if head is not None and head.alive():
            found.append(RunningHead(place, head, _resources(head)))
    return sorted(found, key=lambda running: running.head.started_at)


def _resources(head: Head) -> dict[str, float]:
    """Resources that a head offers, from the command line of its raylet."""
    command = command_line(head.raylet_pid)
    texts = [a.removeprefix(_RESOURCES) for a in command if a.startswith(_RESOURCES)]
    items = texts[0].split(",") if texts else []
    return {name: float(value) for name, value in zip(items[::2], items[1::2])}
