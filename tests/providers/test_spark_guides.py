"""The functions of Spark's guides for Triton and vLLM, with at most two changed lines each.

Those with one tensor and with a language model are those of docs/coming-from/spark.md, where the
changed lines are counted by `tests/examples/test_coming_from.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import vane_dagster as vd
from support.coming_from_data import write_data
from support.data import read_stage
from support.pytriton_programs import pytriton, pytriton_client  # noqa: F401  # fixtures
from support.results import Run, failure
from support.snippets import Snippet, loaded, pipelines, snippets
from support.tiny_answers import greedy
from support.vllm_stages import ENV, needs_vllm

TEXTS = ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page reads, in the current folder."""
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(pytriton_client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTriton's client in the workers."""
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


def triton_server(ports):
    import signal
    import time

    import numpy as np
    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    # Spark's guide imports TaskContext above and prints its partition here: both lines are gone.

    @batch
    def _infer_fn(**inputs):
        sentences = np.squeeze(inputs["text"], -1).tolist()
        decoded = [sentence.decode("utf-8") for sentence in sentences]
        return {"reversed": np.array([[text[::-1]] for text in decoded])}

    workspace_path = f"/tmp/triton_{time.strftime('%m_%d_%M_%S')}"
    config = TritonConfig(http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    with Triton(config=config, workspace=workspace_path) as triton:
        triton.bind(
            model_name="Reverser",
            infer_func=_infer_fn,
            inputs=[Tensor(name="text", dtype=object, shape=(-1,))],
            outputs=[Tensor(name="reversed", dtype=object, shape=(-1,))],
            config=ModelConfig(
                max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)
            ),
            strict=True,
        )

        def _stop_triton(signum, frame):
            print("SERVER: Received SIGTERM. Stopping Triton server.")
            triton.stop()

        signal.signal(signal.SIGTERM, _stop_triton)
        print("SERVER: Serving inference")
        triton.serve()


def triton_fn(model_name, host_to_url):
    import socket

    import numpy as np
    from pytriton.client import ModelClient

    url = host_to_url[socket.gethostname()]
    print(f"Connecting to Triton model {model_name} at {url}.")

    def infer_batch(inputs):
        with ModelClient(url, model_name, inference_timeout_s=240) as client:
            flattened = np.squeeze(inputs, -1).tolist()
            encoded = np.array([[text.encode("utf-8")] for text in flattened], dtype=np.bytes_)
            return np.squeeze(client.infer_batch(encoded)["reversed"], -1)

    return infer_batch


@pytest.fixture
def _workspaces_removed() -> Iterator[None]:
    """Removes what the function below leaves in a folder of its own choice."""
    before = {*Path("/tmp").glob("triton_*_*_*_*")}
    yield
    for folder in {*Path("/tmp").glob("triton_*_*_*_*")} - before:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.usefixtures("client", "_workspaces_removed")
def test_texts_by_triton_without_a_model_path(
    pytriton: str, data: Path, local: vd.LocalCompute, materialize: Run
) -> None:
    triton = vd.TritonServer(triton_server, python=pytriton)
    reviews = vd.Pipeline("reviews", source=vd.parquet("reviews.parquet"), id="id")
    reviews.predict_batch(
        "backwards",
        partial(triton_fn, model_name="Reverser", host_to_url=triton.host_to_http_url),
        input_tensor_shapes=[[1]],
        return_type="string",
        batch_size=2,
        columns=["text"],
    )

    assert materialize(reviews, local).success

    rows = read_stage(data / "store", "reviews", "backwards")
    assert rows["backwards"].to_pylist() == [text[::-1] for text in TEXTS]


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


@needs_vllm
@pytest.mark.usefixtures("vllm_variables")
def test_a_request_without_the_servers_key_is_refused(
    vllm: dict[str, str], data: Path, cluster: vd.LocalCluster, materialize: Run
) -> None:
    checked = {"return np.array([": "response.raise_for_status()\n        return np.array(["}
    unchanged = {"            headers=llm.headers,\n": "", **checked, **vllm}
    with loaded(section("vLLM on the executors"), data, unchanged) as module:
        (pipeline,) = pipelines(module)
        run = materialize(pipeline, vd.RayCompute(cluster=cluster), raises=False)

    assert "401 Client Error: Unauthorized" in failure(run)
