"""All local Ray heads of a user on this machine, their resources, and conflicts between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vane_dagster._home import state_home
from vane_dagster.compute.local_head import Head, HeadFolder
from vane_dagster.compute.processes import command_line
from vane_dagster.errors import ComputeError

_RESOURCES = "--static_resource_list="


@dataclass(frozen=True)
class RunningHead:
    """A running head and the resources that it offers.

    Attributes:
        place: State folder of the head.
        head: Record of the head.
        resources: As Ray counts them: CPU, GPU, memory (bytes) and custom ones.
        gpus: The GPUs that it assigns, as in CUDA_VISIBLE_DEVICES.
    """

    place: HeadFolder
    head: Head
    resources: dict[str, float]
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"Ray head {self.head.name!r} of {self.head.prefix} at {self.head.address}"


def running_heads(home: Path | None = None) -> list[RunningHead]:
    """The running heads of all Python environments on this machine."""
    found = []
    for place in _folders(home):
        try:
            head = place.read()
        except ComputeError:  # not private: another user may have planted it
            continue
        if head is not None and head.alive():
            found.append(RunningHead(place, head, *_claims(head)))
    return sorted(found, key=lambda running: running.head.started_at)


def conflicts(own: Head, running: Sequence[RunningHead]) -> list[str]:
    """Return a warning for each other head that claims CPUs or GPUs of this head."""
    mine = [one for one in running if one.head == own]
    if not mine:
        return []
    cpus = _machine_cpus(running)
    warnings = []
    for other in (one for one in running if one.head != own):
        both = [one.resources.get("CPU", 0) for one in (*mine, other)]
        shared = sorted(set(mine[0].gpus) & set(other.gpus))
        claims = [f"CPUs ({both[0]:g} and {both[1]:g} of {cpus:g})"] * (
            min(both) > 0 and sum(both) > cpus
        )
        claims += [f"GPUs ({', '.join(shared)})"] * bool(shared)
        if claims:
            warnings.append(
                f"Another local cluster claims the same {' and '.join(claims)}: {other}. Models "
                "on both compete for them. Stop it with `vane-dagster cluster stop --address "
                f"{other.head.address}`, or divide the machine with LocalCluster(num_cpus=..., "
                "num_gpus=...) in both environments"
                + (" and a different CUDA_VISIBLE_DEVICES." if shared else ".")
            )
    return warnings


def _folders(home: Path | None) -> list[HeadFolder]:
    """The state folders that hold a record."""
    records = (home or state_home()).glob("*/head.json")
    return [HeadFolder(record.parent) for record in sorted(records)]


def _claims(head: Head) -> tuple[dict[str, float], tuple[str, ...]]:
    """Resources and GPUs that a head offers, from the command line of its raylet."""
    command, environment = command_line(head.raylet_pid)
    texts = [a.removeprefix(_RESOURCES) for a in command if a.startswith(_RESOURCES)]
    items = texts[0].split(",") if texts else []
    resources = {name: float(value) for name, value in zip(items[::2], items[1::2])}
    count = int(resources.get("GPU", 0))
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [gpu.strip() for gpu in visible if gpu.strip()] or [str(i) for i in range(count)]
    return resources, tuple(gpus[:count])


def _machine_cpus(running: Sequence[RunningHead]) -> float:
    """The CPUs of this machine; a head without a limit shows the number that Ray detects."""
    unlimited = [
        one.resources.get("CPU", 0)
        for one in running
        if not any(setting.startswith("--num-cpus=") for setting in one.head.settings)
    ]
    return min([float(os.cpu_count() or 1), *unlimited])
