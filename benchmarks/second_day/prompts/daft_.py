"""Daft's `prompt` with its checkpoints, which need its Ray runner."""

from __future__ import annotations

from typing import Any

from benchmarks.job import Job, Result
from benchmarks.second_day import daft_
from benchmarks.second_day.daft_ import EXIT_AT_ONCE, serve
from benchmarks.second_day.prompts.anti_join_version import answered

__all__ = ["EXIT_AT_ONCE", "run", "serve"]


def run(job: Job) -> Result:
    """Ask for the rows whose keys are not in the checkpoints."""

    def answer(rows: Any) -> Any:
        return rows.with_column("answer", answered(rows))

    return daft_.run(job, answer, "answer")
