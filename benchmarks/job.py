"""The harness's request to a contender's process, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One folder of Parquet files to read and one empty folder to write to."""

    name: str
    source: str
    out: str


@dataclass(frozen=True)
class Job:
    """The steps that one process runs, in order.

    Args:
        contender: Full name of the module that runs the contender.
        workload: Key of the workload.
        quick: Whether the sizes are those of the smoke test.
        steps: The steps to run.
        marks: Folder in which every constructed UDF leaves one file.
        temp: A short folder of this job's own, for sockets and state.
        service: The values that the contender's `serve` passed to the harness.
    """

    contender: str
    workload: str
    quick: bool
    steps: Sequence[Step]
    marks: str
    temp: str
    service: Mapping[str, str] = field(default_factory=dict)

    def dump(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Job:
        """Read a job that `dump` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        return Job(**{**values, "steps": tuple(Step(**step) for step in values["steps"])})


@dataclass(frozen=True)
class Result:
    """The measurements of a process.

    Args:
        seconds: Wall time of each step.
        versions: Package versions in the process.
        outputs: For each step, a glob of its output Parquet files; the step's out folder if empty.
        notes: Other numbers, by name, kept in the JSON.
    """

    seconds: Sequence[float]
    versions: Mapping[str, str]
    outputs: Sequence[str] = ()
    notes: Mapping[str, float] = field(default_factory=dict)
