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
from support.pool_models import listed, ray_compute, until  # noqa: F401  # fixtures
from support.results import metadata
from support.tiny_answers import greedy
from support.vllm_stages import (
    TEXTS,
    adapter,
    answers,
    ask,
    docs,
    engine,
    gone,
    needs_vllm,
    read,
    shared_memory,
)
from vane_dagster.providers import guard

SYSTEM = "The quick brown fox jumps over the lazy dog, and answers briefly."
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}


pytestmark = pytest.mark.usefixtures("vllm_variables")


def described() -> dict[str, Any]:
    """The only model's worker."""
    ((found,),) = [pool["workers"] for pool in listed()]
    return dict(found)


def worker() -> int:
    return int(described()["pid"])


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
    """Add an adapter to the weights of a model."""
    from safetensors.torch import load_file

    tensors = load_file(str(folder / "adapter_model.safetensors"))
    for number, layer in enumerate(model.model.layers):
        name = f"base_model.model.model.layers.{number}.mlp.down_proj"
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        layer.mlp.down_proj.weight.data += up @ down


@needs_vllm
def test_stages_with_formats_adapters_and_none_share_an_engine(tiny, tmp_path, local, materialize):
    folders = {name: adapter(tmp_path / name, tiny, seed) for seed, name in enumerate("ab", 7)}
    lora = {"options": {"lora": {name: str(folder) for name, folder in folders.items()}}}
    pipeline = docs(tmp_path, [*TEXTS, "word " * 200], own=[*["a", None, "b"] * 2, None])
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    ask(pipeline, tiny, "said", system=SYSTEM, include_columns=["text", "own"], **aside, **lora)
    said = pipeline["said"]
    free = {"temperature": 1, "max_tokens": 60}
    ask(said, tiny, "chosen", return_format=["yes", "no"], sampling_params=free, **lora)
    ask(said, tiny, "filled", return_format=SCHEMA, sampling_params=free, **lora)
    for name, chosen in {"mixed": "{own}", "a": "a", "b": "b", "plain": None}.items():
        sampling = {"max_tokens": 16, **({"adapter": chosen} if chosen else {})}
        ask(said, tiny, name, sampling_params=sampling, **lora)
    done = materialize(pipeline, local)

    assert sum(metadata(done, name).get("model_loads", 0) for name in pipeline.stages) == 1
    rows = read(tmp_path, "said")
    assert rows["id"].to_pylist() == [*range(len(TEXTS))]
    assert answers(tmp_path, "said") == greedy(tiny, TEXTS, system=SYSTEM)
    usage = rows["said_usage"].to_pylist()
    assert max(u["cached_tokens"] for u in usage) >= 32  # the system message
    (fault,) = vd.quarantine("docs/said", store=str(tmp_path / "store")).to_pylist()
    assert (fault["id"], fault["error"]) == (len(TEXTS), "VLLMValidationError")
    assert set(read(tmp_path, "chosen")["chosen"].to_pylist()) <= {"yes", "no"}
    filled = read(tmp_path, "filled")["filled"].to_pylist()
    assert all(f["mood"] in ("good", "bad") and isinstance(f["sure"], bool) for f in filled)
    changes = {n: functools.partial(merge, folder=folder) for n, folder in folders.items()}
    found = {name: answers(tmp_path, name) for name in ("a", "b", "plain")}
    for name, texts in found.items():
        assert texts == greedy(tiny, TEXTS, 16, change=changes.get(name))
    assert len({tuple(texts) for texts in found.values()}) == 3
    names = ["a", "plain", "b"] * 2
    assert answers(tmp_path, "mixed") == [found[name][i] for i, name in enumerate(names)]


@needs_vllm
def test_an_engine_is_warm_over_runs_and_replaced_when_it_dies(
    tiny, tmp_path, ray_compute, materialize
):
    def asked(**kwargs: Any) -> vd.Pipeline:
        pipeline = docs(tmp_path)
        ask(pipeline, tiny, **kwargs)
        return pipeline

    materialize(asked(), ray_compute)
    right = greedy(tiny, TEXTS)
    assert answers(tmp_path) == right
    first = engine(worker())

    first[0].send_signal(signal.SIGKILL)  # idle: found out before the next run's first row
    assert gone(first)
    materialize(asked(), ray_compute, config={"force": True})
    assert answers(tmp_path) == right
    second = engine(worker())
    assert second != first
    shared = {name for process in second for name in shared_memory(process.pid)}
    assert shared

    def kill() -> None:
        until(lambda: described()["state"] == "busy", "rows are with the engine")
        time.sleep(0.3)
        second[0].send_signal(signal.SIGKILL)

    texts = [f"{text} {n}" for n in range(16) for text in TEXTS]  # equal ones are asked once
    pipeline = docs(tmp_path, texts)
    ask(pipeline, tiny, sampling_params={"max_tokens": 16})
    killer = threading.Thread(target=kill)
    killer.start()
    materialize(pipeline, ray_compute)
    killer.join()
    assert gone(second)
    assert answers(tmp_path) == greedy(tiny, texts, 16)
    third = engine(worker())
    assert third != second

    shared |= {name for process in third for name in shared_memory(process.pid)}
    os.kill(worker(), signal.SIGKILL)
    assert gone(third)
    until(lambda: not any(os.path.exists(name) for name in shared), "memory is freed")
