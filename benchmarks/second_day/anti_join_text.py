"""The anti-join by id and text: changed rows are computed again, beside their old versions."""

from __future__ import annotations

from benchmarks.job import Job, Result
from benchmarks.second_day import anti_join

EXIT_AT_ONCE = anti_join.EXIT_AT_ONCE


def run(job: Job) -> Result:
    """Anti-join with the outputs."""
    return anti_join.run(job, on=("id", "text"))
