"""The provider "vllm" before it has an engine."""

from __future__ import annotations

import sys

import pytest

import vane_dagster as vd
from vane_dagster.providers.vllm import VllmProvider, _check_audio
from vane_dagster.providers.vllm_engine import _engine_arguments, reserved_gpus

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
    ("visible", "count"), [(None, 1), ("", 1), ("-1", 1), ("3", 1), ("0,2", 2), ("GPU-a,GPU-b", 2)]
)
def test_a_model_is_spread_over_the_gpus_that_its_worker_holds(visible, count, monkeypatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert reserved_gpus() == count


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
