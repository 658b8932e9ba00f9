"""Warm pools of the session's cluster."""

from __future__ import annotations

from vane_dagster.compute.client import pool_managers


def clear() -> None:
    import ray

    for pool_manager in pool_managers().values():
        for pool in ray.get(pool_manager.pools.remote()):
            if pool["identity"] != "io":
                ray.get(pool_manager.evict.remote(pool["identity"], True))
