"""vLLM as a server that the pool manager starts, keeps warm and supervises.

The tests share one server: it stays up between their runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import vane_dagster as vd
from support.results import Run, failure
from support.tiny_answers import greedy, vectors
from support.vllm_stages import ENGINE, ENV, TEXTS, docs, engine, needs_vllm, read

pytestmark = [needs_vllm, pytest.mark.usefixtures("vllm_variables")]

SEED = 17
"""A flag by which this file's server is told from those that other tests have left warm."""


@pytest.fixture
def llm(tiny: Path) -> vd.VLLMServer:
    return vd.VLLMServer(
        tiny,
        flags={
            "served_model_name": "tiny",
            "gpu_memory_utilization": 0.1,
            "enable_prompt_tokens_details": True,
            "enable_prefix_caching": False,
            "seed": SEED,
            **ENGINE,
        },
        replicas=vd.Workers(env_vars=[*ENV, "HF_HUB_OFFLINE"]),
    )


@pytest.fixture
def ray(cluster: vd.LocalCluster) -> vd.RayCompute:
    return vd.RayCompute(cluster=cluster)


def running(tiny: Path) -> list[psutil.Process]:
    """The processes of vLLM's API server with a model."""
    found = psutil.process_iter(["cmdline"])
    return [
        each
        for each in found
        if "vllm.entrypoints.openai.api_server" in (each.info["cmdline"] or ())
        and str(tiny) in each.info["cmdline"]
        and f"--seed {SEED}" in " ".join(each.info["cmdline"])
    ]


def ask(pipeline: vd.Pipeline, llm: vd.VLLMServer, name: str = "asked") -> vd.Stage:
    sampling = {"temperature": 0, "max_tokens": 8}
    return pipeline.prompt(
        name, "{text}", sampling_params=sampling, include_columns=["text"], model=llm
    )


def completed(text: str, llm: Any) -> str:
    """Ask a server with a client of one's own."""
    import requests

    body = {"model": llm.model, "prompt": text, "temperature": 0, "max_tokens": 8}
    response = requests.post(f"{llm.url}/v1/completions", json=body, headers=llm.headers)
    response.raise_for_status()
    found: str = response.json()["choices"][0]["text"]
    return found


def texts(tmp_path: Path, stage: str, column: str) -> list[str]:
    return [text.rstrip("\ufffd") for text in read(tmp_path, stage)[column].to_pylist()]


def test_two_stages_and_two_runs_share_a_server(
    llm: vd.VLLMServer, tiny: Path, tmp_path: Path, ray: vd.RayCompute, materialize: Run
) -> None:
    pipeline = docs(tmp_path)
    ask(pipeline, llm).map(
        "continued", completed, fn_kwargs={"llm": llm}, schema={"continued": "VARCHAR"}
    )

    assert materialize(pipeline, ray, select=["asked"]).success
    (first,) = running(tiny)
    assert materialize(pipeline, ray, select=["continued"]).success
    assert running(tiny) == [first]  # by process id and the time of its start

    assert texts(tmp_path, "asked", "asked") == greedy(tiny, TEXTS)
    assert texts(tmp_path, "continued", "continued") == greedy(tiny, TEXTS, is_chat=False)
    command = first.cmdline()
    assert {"--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"} <= {
        *command
    }
    assert first.environ()["VLLM_API_KEY"] not in " ".join(command)


def test_its_key_is_required_and_masked(
    llm: vd.VLLMServer, tiny: Path, tmp_path: Path, ray: vd.RayCompute, materialize: Run
) -> None:
    def tells(text: str, llm: Any) -> str:
        import requests

        answer = requests.post(f"{llm.url}/v1/completions", json={"model": llm.model})
        raise ValueError(f"{answer.status_code} without the key {llm.api_key}")

    pipeline = docs(tmp_path, TEXTS[:1])
    pipeline.map("told", tells, fn_kwargs={"llm": llm}, schema={"told": "VARCHAR"})

    message = failure(materialize(pipeline, ray, raises=False))

    (server,) = running(tiny)
    assert "401 without the key" in message
    assert server.environ()["VLLM_API_KEY"] not in message


def test_rows_survive_a_crash_of_its_engine(
    llm: vd.VLLMServer, tiny: Path, tmp_path: Path, ray: vd.RayCompute, materialize: Run
) -> None:
    many = [f"{text} {n}" for n in range(20) for text in TEXTS]
    pipeline = docs(tmp_path, many)
    ask(pipeline, llm)
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for server in running(tiny):
                if in_flight(server):
                    (core,) = (each for each in engine(server.pid) if "Core" in each.name())
                    core.kill()
                    killed.append(core.pid)
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    assert materialize(pipeline, ray).success
    killer.join()

    assert killed
    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [*range(len(many))]
    assert texts(tmp_path, "asked", "asked") == greedy(tiny, many)
    (server,) = running(tiny)
    assert killed[0] not in {each.pid for each in engine(server.pid)}


def test_a_column_is_embedded_by_a_server_of_its_own_flags(
    tiny: Path, tmp_path: Path, ray: vd.RayCompute, materialize: Run
) -> None:
    flags = {name: value for name, value in ENGINE.items() if name != "structured_outputs_config"}
    flags |= {"runner": "pooling", "convert": "embed", "gpu_memory_utilization": 0.1}
    embedder = vd.VLLMServer(tiny, flags, replicas=vd.Workers(env_vars=[*ENV, "HF_HUB_OFFLINE"]))
    pipeline = docs(tmp_path)
    pipeline.embed("embedded", "text", model=embedder)

    assert materialize(pipeline, ray).success

    found = read(tmp_path, "embedded")["embedded"].to_pylist()
    assert np.allclose(found, vectors(tiny, TEXTS), atol=1e-5)


def in_flight(server: psutil.Process) -> bool:
    """Whether a server computes answers, by its own count."""
    port = server.cmdline()[server.cmdline().index("--port") + 1]
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        lines = answer.read().decode().splitlines()
        return any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0
            for line in lines
        )
    return False
