"""What a backfill's runs start of the servers that they share."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support import server_runs
from support.forked import Program
from support.pool_models import ray_compute  # noqa: F401  # a fixture

COUNTS = ("server_starts", "server_warm_hits", "server_restarts")


def test_runs_of_other_processes_share_one_start(tmp_path, ray_compute):
    script = Path(server_runs.__file__).with_name("server_definitions.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"SERVER_RUNS": str(tmp_path), "PYTHONPATH": str(script.parents[1])}
    found = []
    for keys in ("a", "bcd"):  # the first alone, then three at the same time
        processes = [Program([str(script), key], environment, tmp_path) for key in keys]
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    sums = [
        {name: sum(stage.get(name, 0) for stage in stages.values()) for name in COUNTS}
        for stages in found
    ]
    assert [run["server_starts"] for run in sums] == [1, 0, 0, 0]
    assert [run["server_warm_hits"] for run in sums] == [0, 1, 1, 1]
    assert sum(run["server_restarts"] for run in sums) == 0
    assert len((tmp_path / "starts").read_text().split()) == 1
