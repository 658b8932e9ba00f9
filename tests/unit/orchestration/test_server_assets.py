"""Servers as assets: their specs, and which stages depend on them."""

from __future__ import annotations

from dataclasses import asdict

import dagster as dg
import pytest

import vane_dagster as vd
from vane_dagster.compute.pool_state import PoolInfo
from vane_dagster.events import ServerReplica
from vane_dagster.orchestration.metadata import servers_table
from vane_dagster.orchestration.server_assets import evaluation
from vane_dagster.worker.protocol import WorkerInfo

KEY = dg.AssetKey(["servers", "llm"])


def ask(text: str, llm) -> str:
    return llm.url + text


def declared(tmp_path) -> tuple[vd.Server, vd.Pipeline]:
    llm = vd.Server(
        ["serve", "--port", "{port}", "--api-key", "sk-planted-secret"],
        name="llm",
        model="m",
        replicas=(1, 3),
        gpus=0.5,
    )
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id")
    answers = pipeline.map("answers", ask, servers={"llm": llm})
    answers.project("kept", ["answers"])
    return llm, pipeline


def test_a_server_is_an_external_asset_with_a_check(tmp_path):
    llm, _ = declared(tmp_path)
    spec, check = vd.server_assets([llm, llm])
    assert isinstance(spec, dg.AssetSpec)
    assert isinstance(check, dg.AssetChecksDefinition)
    assert (spec.key, spec.group_name, spec.kinds) == (KEY, "servers", {"server"})
    assert spec.metadata["replicas"] == "1 to 3"
    assert spec.metadata["reserves"] == {"GPU": 0.5}
    assert spec.metadata["command"] == "serve --port '{port}' --api-key ***"
    assert [each.key for each in check.check_specs] == [dg.AssetCheckKey(KEY, "healthy")]
    graph = dg.Definitions([spec, check], resources={"compute": vd.LocalCompute()})
    node = graph.resolve_asset_graph().get(KEY)
    assert node.is_external
    assert not node.is_materializable


def test_stages_depend_on_servers_that_are_assets(tmp_path):
    llm, pipeline = declared(tmp_path)
    other = vd.Server(["serve", "{port}"], name="other")

    def depending(*servers: vd.Server) -> set[str]:
        specs = pipeline.build_assets(servers=servers).specs
        return {
            spec.key.path[-1]
            for spec in specs
            if any(d.asset_key.path[0] == "servers" for d in spec.deps)
        }

    assert depending() == set()
    assert depending(other) == set()
    assert depending(llm, other) == {"answers"}


def test_what_is_refused(tmp_path):
    llm, pipeline = declared(tmp_path)
    again = vd.Server(["serve", "{port}"], name="llm")
    with pytest.raises(vd.DefinitionError, match="several servers are named 'llm'"):
        vd.server_assets([llm, again])
    with pytest.raises(vd.DefinitionError, match="expected servers"):
        vd.server_assets([pipeline])  # type: ignore[list-item]
    with pytest.raises(vd.DefinitionError, match="expected a list of servers"):
        vd.server_assets(llm)  # type: ignore[arg-type]  # no list
    with pytest.raises(vd.DefinitionError, match=r"'docs': build_assets: servers is \{'llm': vd"):
        pipeline.build_assets(servers={"llm": llm})  # type: ignore[arg-type]  # no list
    with pytest.raises(vd.DefinitionError, match="build_assets: servers has AssetSpec"):
        pipeline.build_assets(servers=vd.server_assets([llm]))  # type: ignore[arg-type]  # no servers


def serving(n: int) -> vd.TritonServer:
    def serve(ports) -> int:
        return n

    return vd.TritonServer(serve)


@pytest.mark.parametrize(
    "servers",
    [
        [vd.Server(["serve", "{port}"], name=name, env_vars={"N": name}) for name in names]
        for names in (("a-b", "a_b"), ("a.b", "a-b"))
    ]
    + [[vd.Server(["serve", "{port}"], name="a", env_vars={"N": n}) for n in ("1", "2")]],
)
def test_servers_whose_checks_dagster_would_mix_up_are_refused(servers):
    with pytest.raises(vd.DefinitionError, match="several servers are named 'a"):
        vd.server_assets(servers)


def test_servers_that_only_code_tells_apart_are_no_single_asset():
    with pytest.raises(vd.DefinitionError, match="two servers are named 'serve' and differ only"):
        vd.server_assets([serving(1), serving(2)])


def evaluated(*states: str, reason: str = "") -> dg.AssetCheckResult:
    workers: list[WorkerInfo] = [
        {
            "name": f"w{i}",
            "state": "starting" if state == "starting" else "ready",
            "node": "gpu-7",
            "server": {"state": state, "reason": reason, "restarts": 2, "in_flight": None},
        }
        for i, state in enumerate(states)
    ]
    pool: PoolInfo = {
        "identity": "abc",
        "label": "server llm",
        "server": "llm",
        "bundle": {},
        "leases": ["run"],
        "idle_seconds": 0.0,
        "workers": workers,
    }
    return evaluation([pool])


@pytest.mark.parametrize("state", ["failed", "restarting"])
def test_a_server_that_has_ended_fails_with_its_reason(state):
    found = evaluated(state, reason="exited with code 3. Last lines of its log:\nno GPU")
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert found.description == (
        f"Replica w0 on gpu-7 is {state}: exited with code 3. Last lines of its log:\nno GPU"
    )
    assert (found.metadata["restarts"].value, found.metadata["leases"].value) == (2, 1)


def test_a_server_that_starts_passes():
    found = evaluated("starting", "starting")
    assert found.passed
    assert found.description == "0 replicas answer, 2 still starting."


def test_only_the_first_of_many_replicas_are_shown():
    many = [ServerReplica("llm", f"http://n{i}:1", f"n{i}", "ready") for i in range(12)]
    shown = servers_table([asdict(one) for one in many])
    assert shown.count("http://") == 10
    assert shown.endswith("and 2 more replicas")
