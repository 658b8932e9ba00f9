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


def refused(sandbox: DefsFolderSandbox, path: Path) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # Dagster's own, with file and line
        loaded(sandbox, path)
    errors, found = [], raised.value
    while found is not None:
        errors.append(str(found))
        found = found.__cause__
    return "\n".join(errors)


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
    assert {job.name for job in definitions.jobs} == {"docs_plan"}


def test_yaml_has_what_differs_between_deployments(sandbox, monkeypatch):
    monkeypatch.setenv("LAKE", "s3://lake")
    monkeypatch.setenv("MINUTES", "30")
    path = scaffolded(
        sandbox,
        compute={
            "cluster": {"idle_minutes": "{{ env.MINUTES }}", "num_gpus": 2},
            "prices": {"gpu_hour": 2.5},
        },
        store={"root": "{{ env('LAKE') }}/.vane"},
        translation={"group_name": "search", "tags": {"stage": "{{ stage.name }}"}},
        op={"backfill_policy": {"type": "multi_run"}, "pool": "gpu", "tags": {"team": "nlp"}},
        overrides={
            "sentiment": {
                "gpus": 0.5,
                "concurrency": [1, 4],
                "memory": None,
                "env_vars": ["HF_TOKEN"],
            }
        },
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
    assert stage.workers.memory == 0


@pytest.mark.parametrize(
    ("folder", "name"), [("my-docs", "my_docs"), ("2docs", "pipeline_2docs"), ("class", None)]
)
def test_any_folder_has_a_pipeline_with_a_name_of_python(sandbox, folder, name):
    definitions = loaded(sandbox, scaffolded(sandbox, folder))
    assert spec_of(definitions, f"{name or 'pipeline_class'}/sentiment")


PROMPT = """
import vane_dagster as vd

docs = vd.Pipeline("docs", source=vd.table([{"id": 1, "text": "a"}]), id="id")
docs.prompt("short", "{text}", provider="openai", model="gpt-5-mini")
"""


def test_workers_share_the_limits_of_a_model_whoever_sets_their_number(sandbox):
    path = scaffolded(sandbox, overrides={"short": {"concurrency": [1, 4]}})
    (path.parent / "shared.py").write_text(PROMPT)
    file = path / "defs.yaml"
    file.write_text(file.read_text().replace(".pipeline.docs", "..shared.docs"))
    loaded(sandbox, path)
    assert PIPELINES["docs"]["short"].spec.udf.kwargs["workers"] == 4
    text = re.sub(r"concurrency:\s+- 1\s+- 4", "concurrency: auto", file.read_text())
    file.write_text(text)
    assert 'overrides: concurrency="auto" cannot divide the limits' in refused(sandbox, path)


def test_overrides_name_the_field_that_is_wrong(sandbox):
    path = scaffolded(sandbox, overrides={"sentiment": {"concurrency": -1}})
    assert "overrides: concurrency is -1" in refused(sandbox, path)


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
        ({"pipeline": ".pipeline.nothing"}, "docs.pipeline has no 'nothing'\n"),
        ({"pipeline": ".pipeline.dosc"}, "docs.pipeline has no 'dosc'. Did you mean 'docs'?"),
        ({"pipeline": ".pipeline.ROWS"}, "'.pipeline.ROWS' is list; expected a vd.Pipeline"),
        ({"pipeline": "docs"}, "expected a module and the name of a pipeline in it"),
        ({"overrides": {"sentimant": {"gpus": 1}}}, "has no stage 'sentimant'; it has '"),
        (
            {"overrides": {"sentiment": {"gpu": 1}}},
            r"overrides\S*\.gpu at \S*/defs.yaml:3",
        ),
        ({"overrides": {"sentiment": {"gpus": -1}}}, "stage 'docs/sentiment': overrides: "),
        ({"compute": {"clusters": {}}}, "compute.*clusters"),
        ({"store": "lake/x"}, "'lake/x' is str; expected the arguments of FragmentStore"),
        ({"compute": "{{ env('HOME') }}"}, "is str; expected the arguments of RayCompute"),
        ({"op": {"name": "step"}}, "op has 'name'; expected backfill_policy, pool or tags"),
        ({"translation": {"deps": ["raw"]}}, r"its asset has deps=.*'raw'.*expected .*'source'"),
        ({"translation": {"code_version": "2"}}, "code_version='2'; expected"),
        ({"translation": {"key": "other"}}, r"its asset has key=.*'other'.*expected .*'sentiment'"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(sandbox, attributes, expected):
    path = scaffolded(sandbox, **attributes)
    assert re.search(expected, refused(sandbox, path), re.DOTALL)
