"""A run in its own process: ``python chaos_driver.py '{"root": ..., "source": ...}'``.

Its exit status is that of `RAN` or `FAILED`, or 1 after an error outside of the run.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import dagster as dg

import vane_dagster as vd
from support import chaos_pipeline
from support.pools_run import ShortLease

RAN, FAILED = 0, 3
LEASE_SECONDS = 8.0
"""Lease time of a killed run in seconds; long enough that a busy machine ends none by mistake."""
FAILURE = "the step failed:"
"""The text before a run's error in its log."""


def _materialized(options: Mapping[str, Any]) -> bool:
    root = options["root"]
    docs = chaos_pipeline.make(
        options["source"], f"{root}/out", options["labels"], options["former"]
    )
    compute: Any = vd.LocalCompute(num_cpus=2)
    if options["cluster"] is not None:
        cluster = vd.LocalCluster(**options["cluster"])
        compute = ShortLease(cluster=cluster, lease_seconds=LEASE_SECONDS)
    given: dict[str, Any] = {"partition_key": options["partition"]}
    if options["partition"] is None:
        first, *_, last = chaos_pipeline.KEYS
        given = {
            "tags": {
                "dagster/asset_partition_range_start": first,
                "dagster/asset_partition_range_end": last,
            }
        }
    result = dg.materialize(
        [docs.build_assets()],
        resources={"compute": compute, "store": vd.FragmentStore(root=f"{root}/store")},
        raise_on_error=False,
        **given,
    )
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            own = data.user_failure_data and data.user_failure_data.description
            print(FAILURE, own or data.error)
    return result.success


if __name__ == "__main__":
    logging.getLogger().handlers.clear()
    sys.exit(RAN if _materialized(json.loads(sys.argv[1])) else FAILED)
