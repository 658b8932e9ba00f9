"""A run in a process of its own, started from a fork server that has everything imported."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import chaos_pipeline
import dagster as dg
import ray  # noqa: F401  # imported once, by the fork server
from pools_run import ShortLease

import vane_dagster as vd

for _name in ("orchestrate.runner", "execute.ray_backend", "execute.local_backend", "testing"):
    importlib.import_module(f"vane_dagster.{_name}")

RAN, FAILED = 0, 3


def run(options: Mapping[str, Any], env: Mapping[str, str | None], log: str) -> None:
    """Materializes all partitions, or one, and ends the process.

    Args:
        options: Folders, the pipeline's settings, the partition and the cluster.
        env: Environment variables, None for those to remove.
        log: The file that takes all output.
    """
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
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
    docs = chaos_pipeline.make(options["source"], f"{root}/out", options["labels"])
    compute: Any = vd.LocalCompute(num_cpus=2)
    if options["cluster"] is not None:
        compute = ShortLease(cluster=vd.LocalCluster(**options["cluster"]))
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
    return result.success
