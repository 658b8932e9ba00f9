"""The provider "vllm": answers, one engine for many stages and runs, and engines that die."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import vane_dagster as vd
from support.attacks import (
    mode,
    shared_tmp,  # noqa: F401  # fixtures
)
from support.pool_models import until
from support.results import metadata
from support.tiny_answers import greedy
from support.vllm_stages import (  # noqa: F401  # fixtures
    ENGINE,
    TEXTS,
    adapter,
    answers,
    ask,
    docs,
    engine,
    gone,
    local,
    needs_vllm,
    read,
    shared_memory,
    warm,
)
from support.warm_workers import waiting_models
from vane_dagster.providers import guard

SYSTEM = "The quick brown fox jumps over the lazy dog, and answers briefly."
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
PARSER = """
import re
from vllm.reasoning import ReasoningParser, ReasoningParserManager

class FirstToken(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return False

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        return True

    def extract_content_ids(self, input_ids):
        return input_ids[1:]

    def extract_reasoning(self, model_output, request):
        found = re.search(r"(praise|blame|[{].*[}])$", model_output)
        cut = found.start() if found else 0
        return model_output[:cut] or None, model_output[cut:] or None

    def extract_reasoning_streaming(self, *given):
        raise NotImplementedError

    def count_reasoning_tokens(self, token_ids):
        return 1

ReasoningParserManager.register_module("first_token", module=FirstToken)
"""
"""A parser for which the reasoning before a choice or an object is one token."""
LORA = {"enable_lora": True, "max_loras": 2}


pytestmark = pytest.mark.usefixtures("vllm_variables")


def test_a_killed_process_leaves_nothing(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    script = f"""
import subprocess, sys, time
sys.path[:] = {sys.path!r}
from vane_dagster.providers import guard
guard.start({str(folder)!r})
nested = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
print(child.pid, flush=True)
time.sleep({2 * guard._EVERY_SECONDS})  # the guard looks
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=8).name, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    shared = Path("/dev/shm", parent.stdout.readline().strip())
    below = psutil.Process(parent.pid).children(recursive=True)
    assert child in below
    assert len(below) == 2  # it and its own
    assert shared.exists()
    os.killpg(parent.pid, signal.SIGKILL)  # as a local worker is
    parent.wait()
    parent.stdout.close()
    assert gone(below)
    until(lambda: not folder.exists(), "the guard has ended")
    until(lambda: not shared.exists(), "the memory is freed")


def merge(model: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(str(folder / "adapter_model.safetensors"))
    for number, layer in enumerate(model.model.layers):
        name = f"base_model.model.model.layers.{number}.mlp.down_proj"
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        layer.mlp.down_proj.weight.data += up @ down


@needs_vllm
def test_stages_with_formats_adapters_and_none_share_an_engine(tiny, tmp_path, local, materialize):
    above = tmp_path / "adapters"
    folders = {name: adapter(above / name, tiny, seed) for seed, name in enumerate("ab", 7)}
    adapter(above / "large", tiny, 9, rank=32)
    (tmp_path / "first_token.py").write_text(PARSER)
    parser = {"reasoning_parser_plugin": str(tmp_path / "first_token.py")}
    engine_kwargs = {**ENGINE, **LORA, "reasoning_parser": "first_token", **parser}
    given = {"options": {"engine_kwargs": engine_kwargs}}
    own = ["a", None, "b", "a", None, "large", None]
    pipeline = docs(tmp_path, [*TEXTS, "word " * 200], own=own)
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    ask(pipeline, tiny, "said", system=SYSTEM, include_columns=["text", "own"], **aside, **given)
    said = pipeline["said"]
    reasons = {"include_reasoning": True, "sampling_params": {"max_tokens": 60}, **given}
    ask(said, tiny, "chosen", return_format=["praise", "blame"], **reasons)
    ask(said, tiny, "filled", return_format=SCHEMA, **reasons)
    chosen = {"mixed": above / "{own}", "a": above / "a", "b": above / "b", "plain": None}
    for name, folder in chosen.items():
        ask(said, tiny, name, sampling_params={"max_tokens": 16}, adapter=folder, **aside, **given)
    done = materialize(pipeline, local)

    assert sum(metadata(done, name).get("model_loads", 0) for name in pipeline.stages) == 1
    rows = read(tmp_path, "said")
    assert rows["id"].to_pylist() == [*range(len(TEXTS))]
    assert answers(tmp_path, "said") == greedy(tiny, TEXTS, system=SYSTEM)
    usage = rows["said_usage"].to_pylist()
    assert max(u["cached_tokens"] for u in usage) >= 32  # the system message
    (fault,) = vd.quarantine("docs/said", store=str(tmp_path / "store")).to_pylist()
    assert (fault["id"], fault["error"]) == (len(TEXTS), "VLLMValidationError")
    rows = read(tmp_path, "chosen")
    assert set(rows["chosen"].to_pylist()) <= {"praise", "blame"}
    assert all(rows["chosen_reasoning"].to_pylist())
    assert {u["reasoning_tokens"] for u in rows["chosen_usage"].to_pylist()} == {1}
    assert metadata(done, "chosen")["reasoning_tokens"] == rows.num_rows
    filled = read(tmp_path, "filled")["filled"].to_pylist()
    assert all(f["mood"] in ("good", "bad") and isinstance(f["sure"], bool) for f in filled)
    changes = {n: functools.partial(merge, folder=folder) for n, folder in folders.items()}
    found = {name: answers(tmp_path, name) for name in ("a", "b", "plain")}
    for name, texts in found.items():
        assert texts == greedy(tiny, TEXTS, 16, change=changes.get(name))
    assert len({tuple(texts) for texts in found.values()}) == 3
    names = ["a", "plain", "b", "a", "plain"]
    assert answers(tmp_path, "mixed") == [found[name][i] for i, name in enumerate(names)]
    (fault,) = vd.quarantine("docs/mixed", store=str(tmp_path / "store")).to_pylist()
    assert fault["id"] == 5
    assert "LoRA rank 32 is greater than max_lora_rank 16" in fault["message"]


@needs_vllm
def test_an_engine_is_warm_over_runs_and_replaced_when_it_dies(tiny, tmp_path, warm, materialize):
    given = {"options": {"engine_kwargs": {**ENGINE, **LORA}}}

    def asked() -> vd.Pipeline:
        pipeline = docs(tmp_path)
        ask(pipeline, tiny, **given)
        ask(pipeline, tiny, "adapted", adapter=tmp_path / "adapter", **given)
        return pipeline

    right, loaded = greedy(tiny, TEXTS), []
    for seed in (7, 8):  # the second by the same engine
        folder = adapter(tmp_path / "adapter", tiny, seed)
        materialize(asked(), warm)
        (worker,) = waiting_models()
        first = engine(worker.process.pid)
        assert answers(tmp_path) == right
        change = functools.partial(merge, folder=folder)
        assert answers(tmp_path, "adapted") == greedy(tiny, TEXTS, change=change)
        loaded.append(first)
    assert loaded[0] == loaded[1]

    first[0].send_signal(signal.SIGKILL)  # idle: found out before the next run's first row
    assert gone(first)
    materialize(asked(), warm, config={"force": True})
    assert answers(tmp_path) == right
    (worker,) = waiting_models()
    second = engine(worker.process.pid)
    assert second != first
    shared = {name for process in second for name in shared_memory(process.pid)}
    assert shared

    def kill() -> None:
        until(lambda: worker.is_busy, "rows are with the engine")
        time.sleep(0.3)
        second[0].send_signal(signal.SIGKILL)

    texts = [f"{text} {n}" for n in range(16) for text in TEXTS]  # equal ones are asked once
    pipeline = docs(tmp_path, texts)
    ask(pipeline, tiny, sampling_params={"max_tokens": 16}, **given)
    killer = threading.Thread(target=kill)
    killer.start()
    materialize(pipeline, warm)
    killer.join()
    assert gone(second)
    assert answers(tmp_path) == greedy(tiny, texts, 16)
    (last,) = waiting_models()
    third = engine(last.process.pid)
    assert third != second

    shared |= {name for process in third for name in shared_memory(process.pid)}
    os.kill(last.process.pid, signal.SIGKILL)
    assert gone(third)
    until(lambda: not any(os.path.exists(name) for name in shared), "memory is freed")


# Sockets


def test_sockets_of_vllm_are_in_a_private_folder(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network_utils = pytest.importorskip("vllm.utils.network_utils", reason="vllm is not installed")
    from vane_dagster.providers.vllm_engine import engine_folder

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    folder = engine_folder()
    assert folder.parent == shared_tmp
    assert mode(folder) == 0o700
    assert network_utils.get_open_zmq_ipc_path().startswith(f"ipc://{folder}/")
