"""Materializes packages of the documentation, one Dagster run each; prints a JSON line for each.

Run as ``python -m definitions.run PARTITION...`` with ``DAGSTER_HOME`` set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import dagster as dg

from definitions.code_location import defs
from definitions.docs import docs, job


def materialize(partition: str, instance: dg.DagsterInstance) -> dict[str, Any]:
    """Run one partition.

    Returns:
        Its success, seconds, and the numbers in the metadata of each stage.
    """
    started = time.perf_counter()
    result = defs.resolve_job_def(job.name).execute_in_process(
        partition_key=partition, instance=instance, raise_on_error=False
    )
    stages = {}
    for event in result.get_asset_materialization_events():
        made = event.materialization
        if made.asset_key.path[0] == docs.name:
            values = {name: entry.value for name, entry in made.metadata.items()}
            stages[made.asset_key.path[-1]] = {
                name: value for name, value in values.items() if isinstance(value, (int, float))
            }
    return {
        "partition": partition,
        "success": result.success,
        "seconds": time.perf_counter() - started,
        "stages": stages,
    }


def main(partitions: Sequence[str]) -> int:
    """Materializes partitions one after another; the exit code says whether all succeeded."""
    succeeded = True
    with _reports() as reports, dg.DagsterInstance.get() as instance:
        for partition in partitions:
            outcome = materialize(partition, instance)
            succeeded = succeeded and outcome["success"]
            print(json.dumps(outcome), file=reports, flush=True)
    return 0 if succeeded else 1


def _reports() -> TextIO:
    """Reserve standard output for reports: what libraries print goes to standard error."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return reports


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
