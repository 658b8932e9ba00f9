"""The provider "vllm": answers, one engine for many stages and runs, and engines that die."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from conftest import failure, read_stage, write_source
from tiny_llm import make

import vane_dagster as vd
from vane_dagster.execute.keeper_client import keepers
from vane_dagster.providers import guard
from vane_dagster.providers.vllm import VllmProvider, reserved_gpus

TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all", "12, 34", "yes or no"]
SYSTEM = "The quick brown fox jumps over the lazy dog, and answers briefly."
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 192,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def ray_compute(cluster: vd.LocalCluster) -> Iterator[vd.RayCompute]:
    """The session's cluster, without models' pools afterwards."""
    yield vd.RayCompute(cluster=cluster)
    cluster.connect()
    evict()


def evict() -> None:
    import ray

    for keeper in keepers().values():
        for pool in ray.get(keeper.pools.remote(), timeout=30):
            if pool["identity"] != "io":
                ray.get(keeper.evict.remote(pool["identity"], True), timeout=30)


def described() -> dict[str, Any]:
    """The only model's worker."""
    import ray

    pools = [p for keeper in keepers().values() for p in ray.get(keeper.pools.remote(), timeout=30)]
    ((found,),) = [pool["workers"] for pool in pools if pool["identity"] != "io"]
    return dict(found)


def worker() -> int:
    return int(described()["pid"])


def engine(of: int) -> list[psutil.Process]:
    """The processes of the engines below a process, the engine's core first."""
    below = psutil.Process(of).children(recursive=True)
    return sorted(
        (p for p in below if p.name().startswith("VLLM::")), key=lambda p: "Core" not in p.name()
    )


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether processes end in time."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def docs(tmp_path: Path, texts: list[str] = TEXTS) -> vd.Pipeline:
    write_source(tmp_path / "src", {"id": pa.array(range(len(texts)), pa.int64()), "text": texts})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def ask(pipeline: vd.Pipeline, model: Path, name: str = "asked", **kwargs: Any) -> vd.Stage:
    options = {"engine_kwargs": ENGINE, **kwargs.pop("provider_options", {})}
    sampling = {"temperature": 0, "max_tokens": 8, **kwargs.pop("sampling_params", {})}
    return pipeline.prompt(
        name,
        kwargs.pop("messages", "{text}"),
        provider="vllm",
        model=str(model),
        provider_options=options,
        sampling_params=sampling,
        env_vars=["VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS"],
        **kwargs,
    )


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


def answers(tmp_path: Path, stage: str = "asked") -> list[str]:
    """Without a last character of which not all bytes came: vLLM leaves it out."""
    return [text.rstrip("\ufffd") for text in read(tmp_path, stage)["response"].to_pylist()]


def greedy(
    folder: Path, texts: list[str], tokens: int = 8, system: str = "", change: Any = None
) -> list[str]:
    """What transformers answers with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if change is not None:
        change(model)
    found = []
    for text in texts:
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        given = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
        new = out[0, given["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd"))
    return found


# Without an engine


def test_a_missing_vllm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'vane-dagster\[vllm\]'"):
        VllmProvider("m")


def test_what_changes_no_answer_is_no_part_of_the_key(tmp_path):
    options = {"lora": {"a": "/a"}, "tensor_parallel_size": 2}
    ask(docs(tmp_path), tmp_path, "asked", provider_options=options)
    pipeline = docs(tmp_path)
    asked = ask(pipeline, tmp_path, "asked", provider_options=options)
    assert asked.spec.options == {
        "engine_kwargs": {
            "dtype": "float32",
            "max_model_len": 192,
            "structured_outputs_config": ENGINE["structured_outputs_config"],
        },
        "lora": {"a": "/a"},
    }


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 1), ("", 1), ("-1", 1), ("3", 1), ("0,2", 2), ("GPU-a,GPU-b", 2)]
)
def test_a_model_is_spread_over_the_gpus_that_its_worker_holds(visible, count, monkeypatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert reserved_gpus() == count


def test_a_killed_process_leaves_no_children():
    script = f"""
import subprocess, sys, time
sys.path.insert(0, {str(Path(guard.__file__).parent)!r})
import guard
guard.start()
nested = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    until(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == 3, "all have begun")
    below = psutil.Process(parent.pid).children(recursive=True)
    assert child in below
    time.sleep(2 * guard._EVERY_SECONDS)  # it has looked
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(below)


def until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


# With one


@needs_vllm
def test_stages_of_a_pipeline_share_an_engine(tiny, tmp_path, local, materialize):
    texts = [*TEXTS, "word " * 200]
    pipeline = docs(tmp_path, texts)
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    ask(pipeline, tiny, "said", system=SYSTEM, include_columns=["text"], **aside)
    said = pipeline["said"]
    ask(said, tiny, "chosen", return_format=["yes", "no"], sampling_params={"temperature": 1})
    ask(said, tiny, "filled", return_format=SCHEMA, sampling_params={"max_tokens": 60})
    seen: set[int] = set()
    with watched(seen):
        materialize(pipeline, local)

    assert len(seen) == 1
    assert gone([psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)])
    rows = read(tmp_path, "said")
    assert rows["id"].to_pylist() == [*range(len(TEXTS))]
    assert answers(tmp_path, "said") == greedy(tiny, TEXTS, system=SYSTEM)
    usage = rows["response_usage"].to_pylist()
    assert {u["finish_reason"] for u in usage} <= {"stop", "length"}
    assert all(u["prompt_tokens"] > 32 and 0 < u["completion_tokens"] <= 8 for u in usage)
    assert max(u["cached_tokens"] for u in usage) >= 32  # the system message
    (fault,) = vd.quarantine("docs/said", store=str(tmp_path / "store")).to_pylist()
    assert (fault["id"], fault["error"]) == (len(TEXTS), "PromptTooLong")
    assert "the model takes 192, of which 8 are for the answer" in fault["message"]
    assert set(read(tmp_path, "chosen")["response"].to_pylist()) <= {"yes", "no"}
    filled = read(tmp_path, "filled")["response"].to_pylist()
    assert all(f["mood"] in ("good", "bad") and isinstance(f["sure"], bool) for f in filled)


class watched:
    """Notes the engines below this process while a run goes on."""

    def __init__(self, seen: set[int]) -> None:
        self.seen, self.over = seen, threading.Event()
        self.thread = threading.Thread(target=self.look)

    def look(self) -> None:
        while not self.over.wait(0.2):
            try:
                self.seen.update(p.pid for p in engine(os.getpid()) if "Core" in p.name())
            except psutil.Error:  # one has ended meanwhile
                continue

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()


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

    told = failure(materialize(asked(sampling_params={"beams": 4}), ray_compute, raises=False))
    assert "sampling_params has 'beams', which provider 'vllm' does not take" in told
    told = failure(materialize(asked(sampling_params={"adapter": "x"}), ray_compute, raises=False))
    assert "sampling_params has the adapter 'x'; provider_options['lora'] has none" in told
    told = failure(
        materialize(asked(sampling_params={"temperature": -1}), ray_compute, raises=False)
    )
    assert "sampling_params are refused by vLLM: temperature" in told
    assert engine(worker()) == first

    first[0].send_signal(signal.SIGKILL)  # idle: found out before the next run's first row
    assert gone(first)
    materialize(asked(), ray_compute, config={"force": True})
    assert answers(tmp_path) == right
    second = engine(worker())
    assert second != first

    def kill() -> None:
        until(lambda: described()["state"] == "busy", "rows are with the engine")
        time.sleep(0.3)
        second[0].send_signal(signal.SIGKILL)

    pipeline = docs(tmp_path, TEXTS * 8)
    ask(pipeline, tiny, sampling_params={"max_tokens": 16})
    killer = threading.Thread(target=kill)
    killer.start()
    materialize(pipeline, ray_compute)
    killer.join()
    assert gone(second)
    assert answers(tmp_path) == greedy(tiny, TEXTS, 16) * 8
    third = engine(worker())
    assert third != second

    evict()
    assert gone(third)


@needs_vllm
def test_a_killed_worker_takes_its_engine_along(tiny, tmp_path, ray_compute, materialize):
    pipeline = docs(tmp_path)
    ask(pipeline, tiny)
    materialize(pipeline, ray_compute)
    pid = worker()
    processes = engine(pid)
    assert processes

    os.kill(pid, signal.SIGKILL)

    assert gone(processes)


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter that changes the answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128)
        tensors[f"{name}.lora_B.weight"] = torch.randn(64, 8)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"]}
    settings |= {"base_model_name_or_path": str(model), "task_type": "CAUSAL_LM", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@needs_vllm
def test_stages_with_different_adapters_share_an_engine(tiny, tmp_path, local, materialize):
    from safetensors.torch import load_file

    folders = {name: adapter(tmp_path / name, tiny, seed) for seed, name in enumerate("ab", 7)}
    pipeline = docs(tmp_path)
    options = {"lora": {name: str(folder) for name, folder in folders.items()}}
    for name in folders:
        given = {"provider_options": options, "sampling_params": {"adapter": name}}
        ask(pipeline, tiny, name, **given)
    seen: set[int] = set()
    with watched(seen):
        materialize(pipeline, local)

    def merge(model: Any, folder: Path) -> None:
        tensors = load_file(str(folder / "adapter_model.safetensors"))
        for number, layer in enumerate(model.model.layers):
            name = f"base_model.model.model.layers.{number}.mlp.down_proj"
            down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
            layer.mlp.down_proj.weight.data += up @ down

    assert len(seen) == 1
    for name, folder in folders.items():
        right = greedy(tiny, TEXTS, change=functools.partial(merge, folder=folder))
        assert answers(tmp_path, name) == right
    assert answers(tmp_path, "a") != answers(tmp_path, "b")
