"""Runs over an application of Ray Serve, in an environment that has it; prints what came of them.

``python -m support.serve_runs FOLDER``
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import dagster as dg

import vane_dagster as vd
from support.data import read_stage, write_source
from vane_dagster.compute.client import pool_managers

ROWS = 20


def ask(text: str, app: Any) -> dict[str, Any]:
    """Ask the application for one row."""
    body = json.dumps({"text": text}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{app.url}/shout", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    """Run twice, kill the worker that deployed the application, run again, and stop it."""
    import ray
    from ray import serve

    folder = Path(sys.argv[1])
    write_source(folder / "src", {"id": range(ROWS), "text": [f"row {n}" for n in range(ROWS)]})
    application = vd.ServeApplication("support.serve_app:app", name="shouter")
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(folder / "src")), id="id")
    pipeline.map(
        "shouted", ask, servers={"app": application}, schema={"text": "VARCHAR", "pid": "BIGINT"}
    )
    found: dict[str, Any] = {"successes": [], "pids": [], "applications": []}

    def run() -> None:
        done = dg.materialize(
            [pipeline.build_assets()],
            resources={
                "compute": vd.RayCompute(cluster=vd.LocalCluster(num_cpus=2)),
                "store": vd.FragmentStore(root=str(folder / "store")),
            },
            run_config={"ops": {"docs_pipeline": {"config": {"force": True}}}},
            raise_on_error=False,
        )
        found["successes"].append(done.success)
        rows = read_stage(folder / "store", "docs", "shouted")
        found["texts"] = sorted(rows["text"].to_pylist())
        found["pids"].append(sorted(set(rows["pid"].to_pylist())))
        found["applications"].append(sorted(serve.status().applications))

    run()
    from support.serve_app import app

    serve.run(app, name="of another", route_prefix="/other")
    run()
    (manager,) = pool_managers().values()
    (pool,) = [each for each in ray.get(manager.pools.remote()) if each["server"]]
    os.kill(pool["workers"][0]["pid"], signal.SIGKILL)
    run()
    ray.get(manager.evict.remote(pool["identity"], True))
    for _ in range(60):
        left = sorted(serve.status().applications)
        if left == ["of another"]:
            break
        import time

        time.sleep(0.5)
    found["left"] = left
    print(json.dumps(found))


if __name__ == "__main__":
    main()
