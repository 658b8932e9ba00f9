"""The provider "openai" against vLLM's own server, which speaks OpenAI's API."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from benchmarks.tiny_llm import make
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import failure, metadata
from support.tiny_answers import greedy, vectors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

KEY = "sk-a-key-of-the-server"
TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all", "12, 34", "yes or no"]
LONG = "word " * 200
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def serving(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """A server of a model on a CPU; gives its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--api-key", KEY, "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-num-seqs", "4", "--max-model-len", "192", *arguments,
    ]  # fmt: skip
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        _until_ready(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        below = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        server.wait()
        for process in psutil.wait_procs(below, timeout=20)[1]:
            process.kill()


def _until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def generating(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    compact = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(
        tiny, log, "--enable-prompt-tokens-details", "--structured-outputs-config", compact
    ) as url:
        yield url


@pytest.fixture(scope="module")
def pooling(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(tiny, log, "--runner", "pooling", "--convert", "embed") as url:
        yield url


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KEY", KEY)


def docs(tmp_path: Path, texts: list[str] = TEXTS) -> vd.Pipeline:
    write_source(tmp_path / "src", {"id": pa.array(range(len(texts)), pa.int64()), "text": texts})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def reached(url: str, key: str | None = "LLM_KEY") -> dict[str, Any]:
    """Arguments of a stage that reaches a server."""
    options = {"base_url": url, "api_key_env": key}
    return {"provider": "openai", "options": options, "env_vars": ["LLM_KEY"]}


def ask(above: Any, url: str, name: str = "asked", **kwargs: Any) -> vd.Stage:
    sampling = {"temperature": 0, "max_tokens": 8, **kwargs.pop("sampling_params", {})}
    given = {"model": "tiny", **reached(url), **kwargs}
    return above.prompt(name, "{text}", sampling_params=sampling, **grouped(given))


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


def test_answers_usage_and_a_prompt_that_is_too_long(
    generating, tiny, tmp_path, local, materialize
):
    system = "The quick brown fox jumps over the lazy dog, and answers briefly."
    pipeline = docs(tmp_path, [*TEXTS, LONG, "x" * 100_000])
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    ask(pipeline, generating, system=system, **aside)

    facts = metadata(materialize(pipeline, local), "asked")

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [*range(len(TEXTS))]
    found = [text.rstrip("\ufffd") for text in rows["asked"].to_pylist()]
    assert found == greedy(tiny, TEXTS, system=system)
    usage = rows["asked_usage"].to_pylist()
    assert {u["finish_reason"] for u in usage} <= {"stop", "length"}
    assert all(u["prompt_tokens"] > 32 and 0 < u["completion_tokens"] <= 8 for u in usage)
    assert max(u["cached_tokens"] for u in usage) >= 32  # the system message
    assert facts["prompt_tokens"] == sum(u["prompt_tokens"] for u in usage)
    faults = vd.quarantine("docs/asked", store=str(tmp_path / "store")).sort_by("id").to_pylist()
    assert [(f["id"], f["error"]) for f in faults] == [
        (len(TEXTS), "PromptTooLong"),
        (len(TEXTS) + 1, "PromptTooLong"),
    ]
    assert all("maximum context length is 192 tokens" in f["message"] for f in faults)


def test_answers_are_held_to_formats(generating, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    free = {"temperature": 1, "max_tokens": 60}
    ask(pipeline, generating, "chosen", return_format=["yes", "no"], sampling_params=free)
    ask(pipeline, generating, "filled", return_format=SCHEMA, sampling_params=free)

    materialize(pipeline, local)

    assert set(read(tmp_path, "chosen")["chosen"].to_pylist()) <= {"yes", "no"}
    filled = read(tmp_path, "filled")["filled"].to_pylist()
    assert len(filled) == len(TEXTS)
    assert all(f["mood"] in ("good", "bad") and isinstance(f["sure"], bool) for f in filled)


def test_completions_with_fields_of_the_servers_own(generating, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    options = {**reached(generating)["options"], "api": "completions"}
    sampling = {"extra_body": {"structured_outputs": {"regex": "[0-9]{4}"}}, "temperature": 1}
    ask(pipeline, generating, options=options, sampling_params=sampling)

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert all(len(text) == 4 and text.isdigit() for text in rows["asked"].to_pylist())
    # No chat template surrounds the text.
    usage = rows["asked_usage"].to_pylist()
    assert all(0 < u["prompt_tokens"] <= len(t) for u, t in zip(usage, TEXTS))


def test_anthropics_api_has_the_same_answers(generating, tiny, tmp_path, local, materialize):
    system = "The quick brown fox jumps over the lazy dog, and answers briefly."
    pipeline = docs(tmp_path, [*TEXTS, LONG])
    options = {"base_url": generating.removesuffix("/v1"), "api_key_env": "LLM_KEY"}
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    ask(pipeline, generating, provider="anthropic", options=options, system=system,
        **aside)  # fmt: skip

    materialize(pipeline, local)

    rows = read(tmp_path)
    found = [text.rstrip("\ufffd") for text in rows["asked"].to_pylist()]
    assert found == greedy(tiny, TEXTS, system=system)
    usage = rows["asked_usage"].to_pylist()
    assert {u["finish_reason"] for u in usage} <= {"stop", "length"}
    assert all(u["prompt_tokens"] > 32 and 0 < u["completion_tokens"] <= 8 for u in usage)
    faults = vd.quarantine("docs/asked", store=str(tmp_path / "store")).to_pylist()
    assert [(fault["id"], fault["error"]) for fault in faults] == [(len(TEXTS), "PromptTooLong")]


def test_what_no_row_is_at_fault_of_fails_at_once(
    generating, tmp_path, local, materialize, monkeypatch
):
    pipeline = docs(tmp_path)
    ask(pipeline, generating, model="another", on_error="quarantine")
    message = failure(materialize(pipeline, local, raises=False))
    assert "NotFoundError: Error code: 404 - The model `another` does not exist" in message

    pipeline = docs(tmp_path)
    given = {"model": "tiny", **reached(generating)}
    pipeline.embed("asked", "text", on_error="quarantine", **grouped(given))
    message = failure(materialize(pipeline, local, raises=False))
    assert f"The request was to {generating}/embeddings, for the model 'tiny'" in message

    monkeypatch.setenv("LLM_KEY", "sk-another-key-altogether")
    pipeline = docs(tmp_path)
    ask(pipeline, generating, on_error="quarantine")
    message = failure(materialize(pipeline, local, raises=False))
    assert "AuthenticationError: Error code: 401 - Unauthorized" in message
    assert "The key is that of the environment variable 'LLM_KEY'" in message
    assert "sk-another" not in message

    pipeline = docs(tmp_path)
    ask(pipeline, generating, **reached(generating, None))
    message = failure(materialize(pipeline, local, raises=False))
    assert "401 - Unauthorized. No key was given: name its variable by api_key_env" in message


def test_a_column_is_embedded(pooling, tiny, tmp_path, local, materialize):
    pipeline = docs(tmp_path, [*TEXTS, LONG])
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    given = {"model": "tiny", **reached(pooling), **aside}
    pipeline.embed("asked", "text", **grouped(given))

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [*range(len(TEXTS))]
    assert np.allclose(rows["asked"].to_pylist(), vectors(tiny, TEXTS), atol=1e-5)
    (fault,) = vd.quarantine("docs/asked", store=str(tmp_path / "store")).to_pylist()
    assert (fault["id"], fault["error"]) == (len(TEXTS), "PromptTooLong")
