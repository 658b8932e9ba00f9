"""`PipelineComponent`: a pipeline from a ``defs.yaml`` as `dg scaffold defs` writes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox

import vane_dagster as vd
from vane_dagster.orchestration.assets import PIPELINES

# Dagster's own, as it loads components.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*is currently in beta"),
]


@pytest.fixture
def sandbox():
    with create_defs_folder_sandbox() as made:
        yield made


def scaffolded(sandbox: DefsFolderSandbox, name: str = "docs", **attributes: Any) -> Path:
    """A component as it is scaffolded, with some attributes changed."""
    path = sandbox.scaffold_component(vd.PipelineComponent, name)
    file = path / "defs.yaml"
    made = yaml.safe_load(file.read_text())
    made["attributes"] |= attributes
    file.write_text(yaml.safe_dump(made))
    return path


def loaded(sandbox: DefsFolderSandbox, path: Path) -> dg.Definitions:
    with sandbox.load_component_and_build_defs(path) as (component, definitions):
        assert isinstance(component, vd.PipelineComponent)
        return definitions


def spec_of(definitions: dg.Definitions, key: str) -> dg.AssetSpec:
    return (
        definitions.resolve_asset_graph()
        .get(dg.AssetKey.from_user_string(key))
        .assets_def.get_asset_spec(dg.AssetKey.from_user_string(key))
    )


def test_a_scaffolded_component_has_assets_jobs_and_resources(sandbox):
    definitions = loaded(sandbox, scaffolded(sandbox))
    definitions.get_repository_def().load_all_definitions()
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert keys == {"docs/sentiment", "docs/source"}
    assert isinstance(definitions.resources["compute"], vd.RayCompute)
    assert isinstance(definitions.resources["store"], vd.FragmentStore)
    assert {job.name for job in definitions.jobs} == {"docs_plan", "docs_preview"}
    reference = spec_of(definitions, "docs/sentiment").metadata["dagster/code_references"]
    line, _ = reference.code_references  # the other is defs.yaml
    assert Path(line.file_path).name == "pipeline.py"
    assert (
        "docs.map_batches(" in Path(line.file_path).read_text().splitlines()[line.line_number - 1]
    )


def test_yaml_has_what_differs_between_deployments(sandbox, monkeypatch):
    monkeypatch.setenv("LAKE", "s3://lake")
    path = scaffolded(
        sandbox,
        compute={"cluster": {"idle_minutes": 30, "num_gpus": 2}, "prices": {"gpu_hour": 2.5}},
        store={"root": "{{ env.LAKE }}/.vane"},
        translation={"group_name": "search", "tags": {"stage": "{{ stage.name }}"}},
        op={"backfill_policy": {"type": "multi_run"}, "pool": "gpu", "tags": {"team": "nlp"}},
        overrides={"sentiment": {"gpus": 0.5, "concurrency": [1, 4], "env_vars": ["HF_TOKEN"]}},
    )
    plain = loaded(sandbox, scaffolded(sandbox, "other"))
    definitions = loaded(sandbox, path)
    compute, store = definitions.resources["compute"], definitions.resources["store"]
    assert (compute.cluster.idle_minutes, compute.cluster.num_gpus) == (30, 2)
    assert compute.prices == {"gpu_hour": 2.5}
    assert store.root == "s3://lake/.vane"
    spec = spec_of(definitions, "docs/sentiment")
    assert (spec.group_name, spec.tags["stage"]) == ("search", "sentiment")
    assert spec.code_version == spec_of(plain, "other/sentiment").code_version
    assets = definitions.resolve_asset_graph().get(spec.key).assets_def
    assert assets.backfill_policy == dg.BackfillPolicy.multi_run()
    assert (assets.op.pool, assets.op.tags["team"]) == ("gpu", "nlp")
    stage = PIPELINES["docs"]["sentiment"].spec
    assert (stage.gpus, stage.workers.count, stage.workers.env_vars) == (0.5, (1, 4), ("HF_TOKEN",))


def test_components_with_equal_resources_share_them(sandbox):
    scaffolded(sandbox, "first", store={"root": "store"})
    scaffolded(sandbox, "second", store={"root": "store"})
    with sandbox.build_all_defs() as definitions:
        assert definitions.resources["store"].root == "store"


def test_a_component_without_resources_takes_those_of_the_project(sandbox):
    path = scaffolded(sandbox)
    file = path / "defs.yaml"
    file.write_text(
        "type: vane_dagster.PipelineComponent\nattributes: {pipeline: .pipeline.docs}\n"
    )
    assert loaded(sandbox, path).resources == {}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"pipeline": ".pipeline.nothing"}, "'.pipeline.nothing' is NoneType; expected a vd.Pipe"),
        ({"pipeline": "docs"}, "expected a module and the name of a pipeline in it"),
        ({"overrides": {"sentimant": {"gpus": 1}}}, "overrides has 'sentimant'; its stages are"),
        (
            {"overrides": {"sentiment": {"gpu": 1}}},
            r"overrides\S*\.gpu at \S*/defs.yaml:3",
        ),
        ({"overrides": {"sentiment": {"gpus": -1}}}, "stage 'docs/sentiment': overrides: "),
        ({"compute": {"clusters": {}}}, "compute.*clusters"),
        ({"translation": {"key": "other"}}, "expected docs/sentiment, by which the store keeps"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(sandbox, attributes, expected):
    path = scaffolded(sandbox, **attributes)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # Dagster's own, with file and line
        loaded(sandbox, path)
    errors, found = [], raised.value
    while found is not None:
        errors.append(str(found))
        found = found.__cause__
    assert re.search(expected, "\n".join(errors), re.DOTALL), errors
