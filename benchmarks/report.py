"""Tables of the measured seconds."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.workloads import Workload

LABELS = {
    "bare": "bare loop",
    "raydata": "Ray Data",
    "raydata_function": "Ray Data, as a function",
    "daft": "Daft",
    "vane": "vane_dagster",
    "vane_keys": "vane_dagster, row keys",
    "vane_local": "vane_dagster, `LocalCompute`",
    "anti_join": "anti-join by content (Daft)",
    "anti_join_version": "anti-join by content and version (Daft)",
}
FOOTNOTES = {
    "a": (
        "Each partition in a process of its own, except for the bare loop: two living processes "
        "that are fed partition after partition. A step is timed inside its process, from after "
        "the framework's import to its last file, so that connecting, and loading where a "
        "contender loads again, count. rows/s: all partitions but the first. total: from the "
        "start of the first process to the end of the last, all imports and loads; a cluster that "
        "outlives the runs is started before."
    ),
    "b": (
        "Seconds of the second pass in the same process; the first, with every start and load, "
        "does not count. Efficiency: the ideal {ideal:.2f} s (sleep / workers) over that."
    ),
    "c": (
        "Passes counted: {warm} (their median), after a first one in the same process that does "
        "not count, from reading the first file to having written the last. Values repeat, so that "
        "Parquet's encoder is fast and hides little."
    ),
}
GENERAL = (
    "Every pass reads Parquet and writes Parquet, and every output was compared with an "
    "independent calculation. Numbers are medians of {repeats} interleaved repeats, in brackets "
    "the lowest and the highest; a ratio is the median of the repeats' own ratios."
)


@dataclass(frozen=True)
class Measurement:
    """One contender in one workload in one repeat.

    Args:
        contender: Key of `LABELS`.
        repeat: Number of the repeat.
        process_seconds: Wall seconds of each of its processes.
        seconds: Seconds of each step.
        loads: Number of constructed UDFs.
        versions: Package versions in its processes.
        notes: Other numbers, by name.
        error: The error, if any.
        serving: Seconds in which its cluster started.
    """

    contender: str
    repeat: int
    process_seconds: Sequence[float] = ()
    seconds: Sequence[float] = ()
    loads: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[Mapping[str, float]] = ()
    error: str = ""
    serving: float = 0.0

    @property
    def total(self) -> float:
        """Wall seconds of all its processes."""
        return sum(self.process_seconds)

    def rate(self, work: Workload) -> float:
        """Rows per second of the steps that count: all but the first."""
        counted = self.seconds[1:]
        if work.process_per_step:
            return work.step_rows * len(counted) / sum(counted)
        return work.step_rows / median(counted)


def table(work: Workload, measurements: Sequence[Measurement]) -> str:
    """Return a workload's Markdown table with its footnote.

    Args:
        work: The workload.
        measurements: The measurements of all contenders and repeats.
    """
    head = ["contender", "rows/s", "ratio to bare", "to Ray Data", "to Daft"] + {
        "a": ["total s", "model loads"],
        "b": ["seconds", "efficiency"],
        "c": ["seconds"],
    }[work.key]
    lines = [f"### ({work.key}) {work.title}", "", row(head), row(["---"] * len(head))]
    contenders = list(dict.fromkeys(measured.contender for measured in measurements))
    for contender in contenders:
        own = [measured for measured in measurements if measured.contender == contender]
        error = next((measured.error for measured in own if measured.error), "")
        cells = [f"failed: {error}"] if error else _cells(work, own, measurements)
        lines.append(row([LABELS[contender], *cells, *[""] * (len(head) - 1 - len(cells))]))
    note = FOOTNOTES[work.key].format(ideal=work.ideal_seconds, warm=work.passes - 1)
    return "\n".join([*lines, "", note])


def _cells(
    work: Workload, own: Sequence[Measurement], everyone: Sequence[Measurement]
) -> list[str]:
    rates = [measured.rate(work) for measured in own]
    ratios = [_ratio(work, own, everyone, base) for base in ("bare", "raydata", "daft")]
    cells = [spread(rates, ",.0f"), *ratios]
    seconds = [work.step_rows / rate for rate in rates]
    if work.key == "a":
        loads = sorted({measured.loads for measured in own})
        totals = [measured.total for measured in own]
        return [*cells, spread(totals, ".1f"), "-".join(str(load) for load in loads)]
    cells.append(spread(seconds, ".2f"))
    if work.key == "b":
        cells.append(f"{work.ideal_seconds / median(seconds):.3f}")
    return cells


def _ratio(
    work: Workload, own: Sequence[Measurement], everyone: Sequence[Measurement], base: str
) -> str:
    """Return the median of the repeats' ratios to a contender, which may be missing."""
    rates = {
        measured.repeat: measured.rate(work)
        for measured in everyone
        if measured.contender == base and not measured.error
    }
    ratios = [
        measured.rate(work) / rates[measured.repeat] for measured in own if measured.repeat in rates
    ]
    return f"{median(ratios):.2f}" if ratios else "-"


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the lowest and the highest in brackets.

    Args:
        values: The numbers.
        form: Their format.
    """
    middle = format(median(values), form)
    if len(values) == 1:
        return middle
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def machine() -> dict[str, str]:
    """Describe this machine, without its name or its paths."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        memory = float("nan")
    return {
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "cpu": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def figures(store: Any, pipeline: str, stage: str, partition: str | None = None) -> dict[str, Any]:
    """Return the figures of the run that committed a stage's partition, by its manifest."""
    manifest = store.open().in_force(pipeline, stage, partition)
    assert manifest is not None
    return dict(manifest.figures)


def machine_line(found: Mapping[str, str], measurements: Sequence[Measurement]) -> str:
    """Describe the machine and the versions in one line.

    Args:
        found: The description from `machine`.
        measurements: Measurements with package versions.
    """
    versions = {
        measured.contender: ", ".join(
            f"{name} {value}" for name, value in measured.versions.items()
        )
        for measured in measurements
        if measured.versions
    }
    packages = "; ".join(f"{LABELS[key]}: {value}" for key, value in versions.items())
    return (
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, {found['system']}, "
        f"Python {found['python']}. {packages}."
    )
