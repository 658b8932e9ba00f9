"""vLLM as a server that the pool manager starts, keeps warm and supervises.

The tests share one server: it stays up between their runs. Some reach it by its URL, as endpoints
of others are reached by the providers "openai" and "anthropic".
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
from support.coming_from_data import TEXTS as REVIEWS
from support.coming_from_data import write_data
from support.data import read_stage
from support.prompts import asked
from support.results import Run, materializing, metadata
from support.snippets import loaded, pipelines, snippets
from support.tiny_answers import greedy, vectors
from support.vllm_stages import (
    ENGINE,
    SERVER_ENV,
    TEXTS,
    docs,
    engine,
    needs_vllm,
    read,
    vllm_python,
    vllm_server,
)

pytestmark = [needs_vllm, pytest.mark.usefixtures("vllm_variables")]

LONG = "word " * 200
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
SEED = 17
"""A flag by which this file's server is told from those that other tests have left warm."""
FLAGS = {
    "gpu_memory_utilization": 0.1,
    "enable_prompt_tokens_details": True,
    "seed": SEED,
    **ENGINE,
}


@pytest.fixture
def llm(tiny: Path) -> vd.VLLMServer:
    return vllm_server(str(tiny), {"served_model_name": "qwen", **FLAGS})


@pytest.fixture
def ray(cluster: vd.LocalCluster) -> vd.RayCompute:
    return vd.RayCompute(cluster=cluster)


def running(tiny: Path) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter()
        if {"vllm.entrypoints.openai.api_server", str(tiny)} <= {*(words := command(each))}
        and f"--seed {SEED}" in " ".join(words)
    ]


def command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).split()  # a title has one word
    return []


def by_server(pipeline: vd.Pipeline, llm: vd.VLLMServer) -> vd.Stage:
    sampling = {"temperature": 0, "max_tokens": 8}
    return pipeline.prompt(
        "asked", "{text}", sampling_params=sampling, include_columns=["text"], model=llm
    )


@pytest.fixture
def url(
    llm: vd.VLLMServer,
    tiny: Path,
    ray: vd.RayCompute,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    if not running(tiny):
        folder = tmp_path_factory.mktemp("start")
        pipeline = docs(folder, TEXTS[:1])
        by_server(pipeline, llm)
        assert materializing(folder)(pipeline, ray).success
    (server,) = running(tiny)
    monkeypatch.setenv("LLM_KEY", server.environ()["VLLM_API_KEY"])
    return f"http://127.0.0.1:{port(server)}/v1"


def port(server: psutil.Process) -> str:
    words = command(server)
    return words[words.index("--port") + 1]


def ask(above: Any, url: str, name: str = "asked", **kwargs: Any) -> vd.Stage:
    sampling = {"temperature": 0, "max_tokens": 8, **kwargs.pop("sampling_params", {})}
    return asked(
        above, url, "{text}", name, **{"model": "qwen", **kwargs, "sampling_params": sampling}
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
    by_server(pipeline, llm).map(
        "continued", completed, fn_kwargs={"llm": llm}, schema={"continued": "VARCHAR"}
    )
    few = {"temperature": 1, "max_tokens": 4}  # enough for a choice, not for JSON
    choices = ["yes", "no"]
    pipeline.prompt("chosen", "{text}", model=llm, return_format=choices, sampling_params=few)

    assert materialize(pipeline, ray, select=["asked", "chosen"]).success
    (first,) = running(tiny)
    assert materialize(pipeline, ray, select=["continued"]).success
    assert running(tiny) == [first]  # by process id and the time of its start

    assert texts(tmp_path, "asked", "asked") == greedy(tiny, TEXTS)
    assert texts(tmp_path, "continued", "continued") == greedy(tiny, TEXTS, is_chat=False)
    assert {*read(tmp_path, "chosen")["chosen"].to_pylist()} <= {*choices}
    assert first.environ()["VLLM_API_KEY"] not in " ".join(first.cmdline())


def test_the_snippet_for_spark_asks_a_server(
    tiny: Path,
    tmp_path: Path,
    ray: vd.RayCompute,
    materialize: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`tests/examples/test_coming_from.py` counts its changed lines."""
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    snippet = next(each for each in snippets("spark") if each.heading == "vLLM on the executors")
    options = f"python={vllm_python()!r}, replicas=vd.Workers(env_vars={SERVER_ENV})"
    replaced = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(tiny)),
        '"max_model_len": 192}': f"**{FLAGS}}}, {options}",
    }
    with loaded(snippet, tmp_path, replaced) as module:
        (pipeline,) = pipelines(module)
        assert materialize(pipeline, ray).success

    answers = read_stage(tmp_path / "store", "reviews", "answer")["answer"].to_pylist()
    expected = greedy(tiny, REVIEWS, is_chat=False)
    assert [answer.rstrip("\ufffd") for answer in answers] == expected
    assert len(running(tiny)) == 1  # the one of the other tests


def test_rows_survive_a_crash_of_its_engine(
    llm: vd.VLLMServer, tiny: Path, tmp_path: Path, ray: vd.RayCompute, materialize: Run
) -> None:
    many = [f"{text} {n}" for n in range(20) for text in TEXTS]
    pipeline = docs(tmp_path, many)
    by_server(pipeline, llm)
    killed: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        while not (killed or ended.is_set()):
            for server in running(tiny):
                if in_flight(server):
                    for core in engine(server.pid)[:1]:
                        core.kill()
                        killed.append(core.pid)
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert materialize(pipeline, ray).success
    finally:
        ended.set()
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
    embedder = vllm_server(tiny, flags)
    pipeline = docs(tmp_path, [*TEXTS, LONG])
    aside = vd.Failures("quarantine", max_error_rate=0.5)
    pipeline.embed("embedded", "text", model=embedder, on_error=aside)

    assert materialize(pipeline, ray).success

    (fault,) = vd.quarantine("docs/embedded", store=str(tmp_path / "store")).to_pylist()
    assert (fault["id"], fault["error"]) == (len(TEXTS), "BadRequestError")
    found = read(tmp_path, "embedded")["embedded"].to_pylist()
    assert np.allclose(found, vectors(tiny, TEXTS), atol=1e-5)


def in_flight(server: psutil.Process) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port(server)}/metrics") as answer,
    ):
        lines = answer.read().decode().splitlines()
        return any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0
            for line in lines
        )
    return False


# By its URL


def test_answers_usage_formats_and_prompts_that_are_too_long(
    url, tiny, tmp_path, local, materialize
):
    """By OpenAI's API and by Anthropic's, in one pipeline."""
    system = "The quick brown fox jumps over the lazy dog, and answers briefly."
    pipeline = docs(tmp_path, [*TEXTS, LONG, "x" * 100_000])
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    said = ask(pipeline, url, system=system, include_columns=["text"], **aside)
    ask(pipeline, url, "other", provider="anthropic", system=system, **aside)
    free = {"temperature": 1, "max_tokens": 60}
    ask(said, url, "chosen", return_format=["yes", "no"], sampling_params=free)
    ask(said, url, "filled", return_format=SCHEMA, sampling_params=free)
    regex = {"extra_body": {"structured_outputs": {"regex": "[0-9]{4}"}}, "temperature": 1}
    ask(said, url, "digits", sampling_params=regex)

    done = materialize(pipeline, local)

    for stage in ("asked", "other"):
        rows = read(tmp_path, stage)
        assert rows["id"].to_pylist() == [*range(len(TEXTS))]
        assert texts(tmp_path, stage, stage) == greedy(tiny, TEXTS, system=system)
        usage = rows[f"{stage}_usage"].to_pylist()
        assert {u["finish_reason"] for u in usage} <= {"stop", "length"}
        assert all(u["prompt_tokens"] > 32 and 0 < u["completion_tokens"] <= 8 for u in usage)
        faults = vd.quarantine(f"docs/{stage}", store=str(tmp_path / "store")).sort_by("id")
        assert faults["id"].to_pylist() == [len(TEXTS), len(TEXTS) + 1]
        assert faults["error"].to_pylist() == ["BadRequestError"] * 2
        assert all("maximum context length is 192" in m for m in faults["message"].to_pylist())
    usage = read(tmp_path)["asked_usage"].to_pylist()
    assert max(u["cached_tokens"] for u in usage) >= 32  # the system message
    assert metadata(done, "asked")["prompt_tokens"] == sum(u["prompt_tokens"] for u in usage)
    assert set(read(tmp_path, "chosen")["chosen"].to_pylist()) <= {"yes", "no"}
    filled = read(tmp_path, "filled")["filled"].to_pylist()
    assert len(filled) == len(TEXTS)
    assert all(f["mood"] in ("good", "bad") and isinstance(f["sure"], bool) for f in filled)
    digits = read(tmp_path, "digits")["digits"].to_pylist()
    assert all(len(text) == 4 and text.isdigit() for text in digits)
