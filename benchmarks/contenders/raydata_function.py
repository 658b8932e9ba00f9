"""Ray Data with a function, which runs in tasks that it fuses with reading and writing."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.contenders import raydata
from benchmarks.job import Job, Result

serve = raydata.serve


def run(job: Job) -> Result:
    """Read, map and write each step."""
    return raydata.run(job, _add)


def _add(batch: pa.Table) -> pa.Table:
    return batch.append_column("y", pc.add(batch["f0"], batch["f1"]))
