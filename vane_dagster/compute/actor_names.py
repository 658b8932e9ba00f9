"""Names of the pool manager and its workers on a Ray cluster."""

from __future__ import annotations

import hashlib
import json
import sys

from vane_dagster.worker.code_digest import protocol

NAMESPACE = "vane_dagster"
_PREFIX = "keeper-"  # Frozen: clusters hold actors of older versions, which `pools` must find.


def pool_manager_name() -> str:
    """Name of the pool manager for this version of vane_dagster, Ray and Python, and this job.

    The name includes the runtime environment of the job, because all workers inherit it.
    """
    import ray

    given = {k: v for k, v in dict(ray.get_runtime_context().runtime_env).items() if v}
    env = json.dumps(given, sort_keys=True, default=str)
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    versions = f"{protocol()}-ray{ray.__version__}-{python}"
    return f"{_PREFIX}{versions}-{hashlib.blake2b(env.encode(), digest_size=4).hexdigest()}"


def is_pool_manager(name: str) -> bool:
    """Whether an actor name is that of a pool manager."""
    return name.startswith(_PREFIX)


def actor_names() -> list[str]:
    """Names of pool managers and workers of all versions on the cluster."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
