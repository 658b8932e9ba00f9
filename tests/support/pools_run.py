"""A run in its own process: ``python pools_run.py '{"root": ..., "models": ...}'``.

The models come from the module ``models`` in the folder `models`. Prints one line of JSON: the
metadata of each stage in each partition.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import ray
from dagster_ray import Lifecycle, LocalRay

import vane_dagster as vd
from vane_dagster.compute.ray_backend import RayBackend

sys.path.append(str(Path(__file__).resolve().parents[1]))  # it is executed by its path
from support.arguments import grouped
from support.results import entries

SCHEMA = {"id": "BIGINT", "out": "BIGINT", "pid": "BIGINT"}
KEYS = list("abcdefgh")


class ShortLease(vd.RayCompute):
    lease_seconds: float = 3.0

    def backend(self) -> RayBackend:
        super().backend()
        return RayBackend(self.idle_timeout, self.lease_seconds)


def pipeline(options: dict[str, Any]) -> vd.Pipeline:
    """Declare stages in a row, each of a class of ``models``, given by (class, options)."""
    import models

    made = vd.Pipeline(
        options.get("name", "docs"),
        source=vd.parquet(options["root"] + "/src/{partition_key}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(KEYS),
        **options.get("pipeline", {}),
    )
    above: Any = made
    for name, settings in options["stages"].items():
        given = {"batch_size": 5, "concurrency": 1, "columns": ["id"], **settings}
        model = getattr(models, given.pop("model"))
        above = above.map_batches(name, model, schema=SCHEMA, **grouped(given))
    return made


class HeadRay(LocalRay):
    head: str

    @property
    def ray_address(self) -> str:
        return self.head


def compute(options: dict[str, Any]) -> vd.RayCompute | vd.LocalCompute:
    if options.get("local"):
        return vd.LocalCompute()
    kind: type[vd.RayCompute] = ShortLease if options.get("short_lease") else vd.RayCompute
    if "cluster" in options:
        return kind(cluster=vd.LocalCluster(**options["cluster"]))
    if "kuberay" in options:
        from support.kuberay import resource

        return kind(cluster=resource(**options["kuberay"]))
    if "resource" in options:
        lifecycle = Lifecycle(cleanup="never", connect=options.get("connect", True))
        return kind(cluster=HeadRay(head=options["resource"], lifecycle=lifecycle))
    return kind(address=options["address"], ray_init_options=options.get("ray_init_options", {}))


def main(options: dict[str, Any]) -> None:
    sys.path.insert(0, options["models"])
    docs, where = pipeline(options), compute(options)
    found = []
    resources = {"compute": where, "store": vd.FragmentStore(root=options["root"] + "/store")}
    for key in options["partitions"]:
        try:
            result = dg.materialize([docs.build_assets()], resources=resources, partition_key=key)
        except Exception:
            print("connected:", ray.is_initialized())
            raise
        for event in result.get_asset_materialization_events():
            values = entries(event.materialization.metadata)
            plain = {k: v for k, v in values.items() if isinstance(v, (int, float, str))}
            found.append({"stage": event.asset_key.path[-1], "partition": key, **plain})
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
