"""A run in its own process, started from a fork server that has imported everything."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import dagster as dg
import ray  # noqa: F401  # imported once, by the fork server

import vane_dagster as vd
from support import chaos_pipeline
from support.pools_run import ShortLease

for _name in ("orchestration.run", "compute.ray_backend", "compute.local_backend", "testing"):
    importlib.import_module(f"vane_dagster.{_name}")

RAN, FAILED = 0, 3
LEASE_SECONDS = 8.0
"""Lease time of a killed run in seconds; long enough that a busy machine ends none by mistake."""
FAILURE = "the step failed:"
"""The text before a run's error in its log."""


def run(options: Mapping[str, Any], env: Mapping[str, str], log: str) -> None:
    """Materialize all partitions, or one, and end the process.

    Args:
        options: Folders, the pipeline's settings, the partition and the cluster.
        env: Environment variables.
        log: The file that receives all output.
    """
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    os.environ.update(env)
    try:
        status = RAN if _materialized(options) else FAILED
    except BaseException:
        traceback.print_exc()
        status = FAILED + 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
