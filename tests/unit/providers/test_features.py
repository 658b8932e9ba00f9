"""Adapters, reasoning and options of vLLM: what is refused at declaration, and what is keyed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.prompts import Reversed, docs
from vane_dagster.planning.definition import (
    components,
    definition_digest,
    pool_identity,
    row_definition,
)
from vane_dagster.providers.vllm import VllmProvider, _check_audio
from vane_dagster.providers.vllm_engine import _engine_arguments, visible_gpus

LORA = {"engine_kwargs": {"enable_lora": True}}
PARSER = {"reasoning_parser": "qwen3"}
REASONING = "has no reasoning here, only text.*: reasoning is returned by"
ADAPTER = ': an adapter is for provider="vllm" with engine_kwargs='


class Able(Reversed):
    @classmethod
    def features(cls, options: Any) -> set[str]:
        return {"adapter", "reasoning"}


def write_adapter(folder: Path, weights: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


def ask(pipeline: vd.Pipeline, name: str = "asked", **given: Any) -> vd.Stage:
    own = {"provider": Able, "sampling_params": {"temperature": 0}, "model": "m"}
    return pipeline.prompt(name, "{text}", **grouped({**own, **given}))


@pytest.mark.parametrize(
    ("provider", "model", "is_taken"),
    [
        (Reversed, vd.Model("m"), False),
        (Able, vd.Model("m"), True),
        ("transformers", vd.Model("m"), False),
        ("vllm", vd.Model("m"), False),
        ("vllm", vd.Model("m", options={"engine_kwargs": PARSER}), True),
        ("openai", vd.Model("m"), True),
        ("anthropic", vd.Model("m"), True),
        (None, vd.Model(vd.VLLMServer("m")), False),
        (None, vd.Model(vd.VLLMServer("m", PARSER)), True),
        (None, vd.Model(vd.Server(["sglang", "{port}"], model="m")), True),
    ],
)
def test_reasoning_that_a_provider_does_not_return_is_refused(provider, model, is_taken, tmp_path):
    given = {"provider": provider, "model": replace(model, include_reasoning=True)}
    if not is_taken:
        with pytest.raises(vd.errors.DefinitionError, match=REASONING):
            docs(tmp_path).prompt("asked", "{text}", **given)
        return
    stage = docs(tmp_path).prompt("asked", "{text}", **given)
    assert stage.spec.schema.names == ["asked", "asked_reasoning", "asked_usage"]


@pytest.mark.parametrize("provider", [Reversed, "openai", "transformers", "vllm"])
def test_adapters_that_a_provider_does_not_take_are_refused(provider, tmp_path):
    model = vd.Model("m", adapter=write_adapter(tmp_path / "a"))
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(ADAPTER)):
        docs(tmp_path).prompt("asked", "{text}", provider=provider, model=model)
    with_lora = replace(model, options=LORA)
    docs(tmp_path).prompt("asked", "{text}", provider="vllm", model=with_lora)
    spread = {**LORA["engine_kwargs"], "distributed_executor_backend": "ray"}
    on_ray = replace(model, options={"engine_kwargs": spread})
    with pytest.raises(vd.errors.DefinitionError, match="not with Ray's executor"):
        docs(tmp_path).prompt("asked", "{text}", provider="vllm", model=on_ray, gpus=2)


def test_folders_that_are_no_adapters_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        with pytest.raises(vd.errors.DefinitionError, match=f"{name}/adapter_config.json"):
            ask(docs(tmp_path), adapter=tmp_path / name)
        ask(docs(tmp_path), adapter=tmp_path / name, deps=["adapters"])
    with pytest.raises(vd.errors.DefinitionError, match=r"no folder in .* has adapter_config.json"):
        ask(docs(tmp_path), adapter=tmp_path / "empty" / "{text}")
    with pytest.raises(vd.errors.DefinitionError, match=r"^vd.Model: adapter is 7; expected the"):
        vd.Model("m", adapter=7)
    with pytest.raises(vd.errors.DefinitionError, match="'adapter' is for prompts"):
        docs(tmp_path).embed("e", "text", provider=Able, model=vd.Model("m", adapter="a"))


def test_the_content_of_an_adapter_counts_where_it_is_named(tmp_path):
    """In the definition of a stage; for a column, in row keys."""
    root = tmp_path / "adapters"
    for name in "ab":
        write_adapter(root / name)
    rows = pa.schema({"id": pa.int64(), "text": pa.string(), "own": pa.string()})
    adapters = {"plain": None, "a": root / "a", "b": root / "b", "own": f"{root}/{{own}}/"}

    def identities() -> tuple[list[dict[str, Any]], Any]:
        pipeline = docs(tmp_path, own=["a", "b", None, "c"])
        found: list[dict[str, Any]] = [{}, {}, {}]
        for name, adapter in adapters.items():
            spec = ask(pipeline, name, adapter=adapter).spec
            parts = components(pipeline, spec)
            found[0][name] = definition_digest(parts)
            found[1][name] = row_definition(pipeline, spec, rows, parts)
            found[2][name] = pool_identity(pipeline, spec)
        return found, spec.row_versions(spec.local_files())["own"]

    def changed(before: Any, now: Any) -> list[set[str]]:
        return [{n for n in adapters if one[n] != other[n]} for one, other in zip(before, now)]

    first, versions = identities()
    assert all(len({*each.values()}) == len(adapters) for each in first[:2])
    assert len({*first[2].values()}) == 1, "they share an engine"

    write_adapter(root / "a", "edited")
    edited, after = identities()
    assert changed(first, edited) == [{"a", "own"}, {"a"}, set()]
    assert after["b"] == versions["b"]
    assert after["a"] != versions["a"]

    write_adapter(root / "c")
    added, known = identities()
    assert changed(edited, added) == [{"own"}, set(), set()]
    assert {**after, "c": known["c"]} == known


def test_include_reasoning_counts_in_keys(tmp_path):
    pipeline = docs(tmp_path)
    stages = [ask(pipeline, name, include_reasoning=name == "b") for name in "ab"]
    made = [{c.name: c.digest for c in components(pipeline, each.spec)} for each in stages]
    differs = {name for name in made[0] if made[0][name] != made[1][name]}
    assert differs == {"include_reasoning", "output_column"}


pytestmark = pytest.mark.usefixtures("vllm_variables")


# Without an engine


def test_a_missing_vllm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'vane-dagster\[vllm\]'"):
        VllmProvider("m")


def test_audio_needs_soundfile(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ImportError, match="pip install soundfile"):
        _check_audio()


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 0), ("", 0), ("-1", 0), ("3", 1), ("0,2", 2), ("GPU-a,GPU-b", 2)]
)
def test_a_model_is_spread_over_the_gpus_that_its_worker_holds(visible, count, monkeypatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == count


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ({}, 4),
        ({"pipeline_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 1}, 1),
    ],
)
def test_gpus_are_divided_among_the_stages_of_a_pipeline(engine, size, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    given = _engine_arguments("m", None, None, engine)
    assert given["tensor_parallel_size"] == size
    assert given["distributed_executor_backend"] == "mp", "not Ray's, which reserves GPUs again"


def declared(gpus: float, **engine: object) -> int:
    docs = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    model = vd.Model("m", options={"engine_kwargs": engine})
    return docs.prompt("asked", "{text}", provider="vllm", model=model, gpus=gpus).spec.ranks


def test_an_engine_on_ray_has_a_rank_for_each_gpu():
    ray = {"distributed_executor_backend": "ray"}
    assert declared(4) == declared(0, pipeline_parallel_size=2) == 1, "all on one node"
    assert declared(16, **ray) == declared(16, pipeline_parallel_size=2, **ray) == 16
    for gpus, engine, size in ((1, {}, 1), (0.5, {}, 0), (3, {"pipeline_parallel_size": 2}, 2)):
        with pytest.raises(vd.errors.DefinitionError, match=rf"gpus={gpus} .* {size} ranks on Ray"):
            declared(gpus, **engine, **ray)
