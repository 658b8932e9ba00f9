"""Warm pools of the session's cluster."""

from __future__ import annotations

from vane_dagster.compute.client import keepers


def clear() -> None:
    import ray

    for keeper in keepers().values():
        for pool in ray.get(keeper.pools.remote()):
            if pool["identity"] != "io":
                ray.get(keeper.evict.remote(pool["identity"], True))
