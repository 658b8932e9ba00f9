"""Our side of the sections of docs/coming-from/spark.md with servers, Triton and vLLM.

The changed lines of their functions are counted by `tests/examples/test_coming_from.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vane_dagster as vd
from support.coming_from_data import TEXTS, write_data
from support.data import read_stage
from support.pytriton_programs import pytriton, pytriton_client  # noqa: F401  # fixtures
from support.results import Run
from support.snippets import Snippet, loaded, pipelines, snippets
from support.tiny_answers import greedy
from support.vllm_stages import ENV, needs_vllm


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(pytriton_client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytriton_client), *before]))


def section(heading: str) -> Snippet:
    return next(each for each in snippets("spark") if each.heading == heading)


@pytest.mark.usefixtures("client")
def test_a_tensor_by_triton(
    pytriton: str, data: Path, local: vd.LocalCompute, materialize: Run
) -> None:
    replaced = {"/opt/triton/bin/python": pytriton}
    with loaded(section("Triton on the executors"), data, replaced) as module:
        (pipeline,) = pipelines(module)
        assert materialize(pipeline, local).success

    # The weights add the first of the four features to the doubled last.
    rows = read_stage(data / "store", "images", "preds")
    assert rows.to_pydict() == {"id": [1, 2, 3], "preds": [6.0, 18.0, 30.0]}


@pytest.fixture
def vllm(tiny: Path) -> dict[str, str]:
    """What replaces the large model of the page, and its flags on a CPU."""
    flag = '"max_model_len": 192}'
    flags = f"""
    "max_model_len": 192, "dtype": "float32", "enforce_eager": True, "block_size": 32,
    "max_num_seqs": 4, "gpu_memory_utilization": 0.1}},
    replicas=vd.Workers(env_vars={[*ENV, "HF_HUB_OFFLINE"]})"""
    return {'"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(tiny)), flag: flags}


@needs_vllm
@pytest.mark.usefixtures("vllm_variables")
def test_texts_by_vllm(
    vllm: dict[str, str], tiny: Path, data: Path, cluster: vd.LocalCluster, materialize: Run
) -> None:
    with loaded(section("vLLM on the executors"), data, vllm) as module:
        (pipeline,) = pipelines(module)
        assert materialize(pipeline, vd.RayCompute(cluster=cluster)).success

    answers = read_stage(data / "store", "reviews", "answer")["answer"].to_pylist()
    assert [answer.rstrip("\ufffd") for answer in answers] == greedy(tiny, TEXTS, is_chat=False)
