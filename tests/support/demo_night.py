"""A tick of the demo's schedule at a simulated time, its argument: ``2026-01-02T01:00``.

Its run requests are executed in this process, in the instance of ``DAGSTER_HOME``. Prints one line
of JSON: the reason for a skipped tick, or the partition and the metadata of each stage.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from definitions.code_location import defs

SCHEDULE = "daily_questions_schedule"


def tick(now: datetime, instance: dg.DagsterInstance) -> dict[str, Any]:
    """Evaluate the schedule as the daemon does, and execute its run requests."""
    schedule = defs.resolve_schedule_def(SCHEDULE)
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=now,
        repository_def=defs.get_repository_def(),
    ) as context:
        evaluated = schedule.evaluate_tick(context)
    if not evaluated.run_requests:
        return {"skipped": evaluated.skip_message}
    (request,) = evaluated.run_requests
    result = defs.resolve_job_def(schedule.job_name).execute_in_process(
        partition_key=request.partition_key,
        run_config=request.run_config,
        tags=request.tags,
        instance=instance,
    )
    stages = {
        event.asset_key.path[-1]: {
            name: value.value
            for name, value in event.materialization.metadata.items()
            if isinstance(value.value, (int, float, str))
        }
        for event in result.get_asset_materialization_events()
    }
    return {"run_key": request.run_key, "partition": request.partition_key, "stages": stages}


def main() -> None:
    at = datetime.fromisoformat(sys.argv[1]).replace(tzinfo=UTC)
    with dg.DagsterInstance.get() as opened:
        print(json.dumps(tick(at, opened)))
