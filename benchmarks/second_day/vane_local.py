"""vane_dagster with subprocesses of the run in place of a cluster."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.job import Job, Result
from benchmarks.second_day import vane


def run(job: Job) -> Result:
    """Materialize all partitions."""
    return vane.run(replace(job, workload="local"))
