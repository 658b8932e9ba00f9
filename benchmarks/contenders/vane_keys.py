"""vane_dagster with `columns=`, so that each row has a key: the default `reuse="rows"`."""

from __future__ import annotations

from benchmarks.contenders import vane
from benchmarks.job import Job, Result

serve = vane.serve


def run(job: Job) -> Result:
    """Materialize one partition per step."""
    return vane.run(job, keyed=True)
