"""Servers as assets of real runs: their health checks, staleness, and what a backfill starts."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

import vane_dagster as vd
from support import server_runs
from support.forked import Program
from support.pool_models import ray_compute, until  # noqa: F401  # fixtures
from support.results import metadata
from support.server_runs import asking, echo
from vane_dagster.compute.client import ask_worker

KEY = dg.AssetKey(["servers", "llm"])
COUNTS = ("server_starts", "server_warm_hits", "server_restarts")


class World:
    """A pipeline that asks a server, with the instance that its runs go to."""

    def __init__(self, folder: Path, compute: Any, instance: dg.DagsterInstance, server: vd.Server):
        self.compute, self.instance, self.server = compute, instance, server
        self.pipeline = asking(folder / "src", server)
        self.resources = {
            "compute": compute,
            "store": vd.FragmentStore(root=str(folder / "store")),
        }
        self.assets = self._assets([server])

    def _assets(self, servers: list[vd.Server]) -> list[Any]:
        return [*vd.server_assets(servers), self.pipeline.build_assets(servers=servers)]

    def forget_server(self) -> None:
        """Declare the pipeline without the server as an asset."""
        self.assets = self._assets([])

    def remember_server(self) -> None:
        self.assets = self._assets([self.server])

    def run(self, selection: dg.AssetSelection | None = None) -> dg.ExecuteInProcessResult:
        return dg.materialize(
            self.assets,
            selection=selection or [self.pipeline["answers"].key],
            resources=self.resources,
            instance=self.instance,
            raise_on_error=False,
        )

    def check(self) -> dg.AssetCheckEvaluation:
        result = self.run(dg.AssetSelection.checks_for_assets(KEY))
        (found,) = result.get_asset_check_evaluations()
        return found

    def stale(self) -> str:
        graph = dg.Definitions(self.assets, resources=self.resources).resolve_asset_graph()
        context = LoadingContextForTest(self.instance)
        resolver = CachingStaleStatusResolver(self.instance, graph, context)
        return resolver.get_status(self.pipeline["answers"].key).value

    def workers(self) -> list[Any]:
        (pool,) = [pool for pool in self.compute.pools() if pool["server"]]
        return pool["workers"]

    def worker(self) -> Any:
        (worker,) = self.workers()
        return worker

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.workers()]


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


def test_the_check_asks_warm_replicas_and_starts_none(tmp_path, ray_compute, instance):
    world = World(tmp_path, ray_compute, instance, echo("llm", liveness_timeout_s=3600))
    before = world.check()
    assert (before.passed, before.metadata["replicas"].value) == (True, 0)
    assert before.description.startswith("Not started")
    assert [pool for pool in ray_compute.pools() if pool["server"]] == []

    assert world.run().success
    assert world.stale() == "FRESH"
    after = world.check()
    assert (after.passed, after.description) == (True, "1 replica answers.")
    assert world.worker()["server"]["url"] in after.metadata["servers"].value
    assert world.stale() == "FRESH", "a check is no new version of the server"

    endpoint = ask_worker(world.worker()["name"], "server_endpoint")
    body = {"messages": [{"role": "user", "content": "hang"}]}
    request = urllib.request.Request(
        f"{endpoint['url']}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {endpoint['api_key']}"},
    )
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=1)
    hung = world.check()
    assert not hung.passed
    assert "is ready: it does not answer: " in hung.description
    assert "Last lines of its log:\nthe server starts on port" in hung.description
    assert endpoint["api_key"] not in hung.description


def test_lost_replicas_fail_the_check(tmp_path, ray_compute, instance):
    world = World(tmp_path, ray_compute, instance, echo("llm", replicas=2))
    assert world.run().success
    for lost, severity in ((1, dg.AssetCheckSeverity.WARN), (2, dg.AssetCheckSeverity.ERROR)):
        os.kill(next(each["pid"] for each in world.workers() if each["state"] != "dead"), 9)
        until(lambda: world.states().count("dead") == lost, "the worker is dead", 20)  # noqa: B023
        found = world.check()
        assert (found.passed, found.severity) == (False, severity)
        assert found.description.count("is dead: its worker is dead") == lost


def test_a_server_that_becomes_an_asset_costs_no_work(tmp_path, ray_compute, instance):
    world = World(tmp_path, ray_compute, instance, echo("llm"))
    world.forget_server()
    assert world.run().success
    assert world.stale() == "FRESH"
    started = world.worker()["name"]
    world.remember_server()
    assert world.stale() == "STALE", "Dagster says that it has a new dependency"
    again = world.run()
    assert metadata(again, "answers")["fragments_computed"] == 0
    assert world.stale() == "FRESH"
    assert world.worker()["name"] == started
    world.forget_server()
    assert world.run().success
    assert world.stale() == "FRESH"


def test_a_check_with_local_compute_passes(tmp_path, local, instance):
    world = World(tmp_path, local, instance, echo("llm"))
    assert world.run().success
    assert world.check().passed


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


@pytest.mark.filterwarnings("ignore:Parameter `include_sources`")
def test_checks_are_requested_on_a_schedule(instance):
    server = vd.Server(["serve", "{port}"], name="llm")
    condition = dg.AutomationCondition.cron_tick_passed("*/10 * * * *")
    checked = vd.server_assets([server], automation_condition=condition)
    defs = dg.Definitions(checked, resources={"compute": vd.LocalCompute()})
    requested, cursor = [], None
    for minute in (5, 11, 15, 21):
        now = datetime.datetime(2026, 1, 1, 0, minute)
        found = dg.evaluate_automation_conditions(
            defs, instance, cursor=cursor, evaluation_time=now
        )
        requested.append(found.total_requested)
        cursor = found.cursor
    assert requested == [0, 1, 0, 1]
