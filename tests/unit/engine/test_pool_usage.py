"""What a run's pools did, counted for one partition each."""

from __future__ import annotations

from vane_dagster.engine.pool_usage import PoolUsage
from vane_dagster.events import PoolLoads, ServerReplica, ServerUse
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import LoadReport


def ready(warm: bool, seconds: float) -> LoadReport:
    return LoadReport(warm, seconds, 1, "cpu", "node")


def test_loads_are_counted_once():
    usage = PoolUsage()
    usage.worker_ready("m", ready(False, 2.0))
    usage.worker_ready("m", ready(True, 2.0))
    assert usage.take_loads("m") == PoolLoads(loads=1, load_seconds=2.0, warm=1)
    assert usage.take_loads("m") == PoolLoads()


def test_the_servers_of_a_stage_are_added_up():
    usage = PoolUsage()
    usage.worker_ready("a", ready(False, 2.0))
    usage.worker_ready("b", ready(False, 3.0))
    usage.worker_ready("b", ready(True, 3.0))
    spec = PoolSpec("a", "server one", (1, 1), server="one")
    up = ServerStatus("ready", Endpoint("http://n:1", node="n"))
    usage.server_changed(spec, {"w1": up, "w2": ServerStatus("restarting", None)}, 0)
    assert usage.take_servers(["a", "b"]) == ServerUse(
        starts=2,
        start_seconds=5.0,
        warm_hits=1,
        replicas=(
            ServerReplica("one", "http://n:1", "n", "ready"),
            ServerReplica("one", "", "", "restarting"),
        ),
    )
    again = usage.take_servers(["a", "b"])
    assert (again.starts, again.warm_hits, len(again.replicas)) == (0, 0, 2)
