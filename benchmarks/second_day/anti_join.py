"""What is written by hand: compute the rows that are not among the outputs, and append them.

On Daft's native runner, which is the fastest of those here: it needs no cluster.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import daft  # type: ignore[import-not-found,unused-ignore]  # it may be in another environment

from benchmarks.job import Job, Result
from benchmarks.second_day.daft_ import EXIT_AT_ONCE, model

__all__ = ["EXIT_AT_ONCE", "run"]


def run(
    job: Job, compute: Any = None, answer: Any = None, output: str = "embedding", **constants: str
) -> Result:
    """Anti-join with the outputs; rows without an output are not written, so they come again.

    Args:
        job: The day.
        compute: Computes a batch.
        answer: Adds the output to the rows; by default with the model.
        output: The column of outputs.
        **constants: Columns besides the key that a row is recognized by, the same for all.
    """
    (step,) = job.steps
    start = time.perf_counter()
    daft.set_runner_native()
    rows = daft.read_parquet(f"{step.source}/*.parquet")
    for name, value in constants.items():
        rows = rows.with_column(name, daft.lit(value))
    on, out = ["key", *constants], Path(step.out, "rows")
    if any(out.glob("*.parquet")):
        rows = rows.join(daft.read_parquet(f"{out}/*.parquet").select(*on), on=on, how="anti")
    if answer is None:
        embed = model(compute, use_process=False)(job.quick)
        rows = rows.with_column(output, embed(rows["text"]))
    else:
        rows = answer(rows)
    rows = rows.where(rows[output].not_null()).select("id", *on, output)
    rows.write_parquet(str(out), write_mode="append")
    return Result([time.perf_counter() - start], {"daft": daft.__version__})
