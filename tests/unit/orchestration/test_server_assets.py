"""Servers as assets: their specs, and which stages depend on them."""

from __future__ import annotations

import dagster as dg
import pytest

import vane_dagster as vd

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
