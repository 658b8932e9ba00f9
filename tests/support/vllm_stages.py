"""Shared by the tests of models in workers: a tiny model, its stages, and its processes."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from support import forked
from support.arguments import grouped
from support.data import read_stage, write_source
from support.warm_workers import ForkedLocal, WarmLocal, end_waiting, workers_that_imported

TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all", "12, 34", "yes or no"]
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 192,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

ENV = ["VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS"]
SERVER_ENV = [*ENV, "HF_HUB_OFFLINE"]

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")

LIBRARIES = ("sentence_transformers", "transformers.models.auto.modeling_auto")
if HAS_VLLM:
    LIBRARIES += ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""What takes each worker longer to import than it takes to load a tiny model."""


@pytest.fixture(scope="module")
def local() -> Iterator[vd.LocalCompute]:
    """Subprocesses that have imported the libraries."""
    with workers_that_imported(*LIBRARIES):
        yield WarmLocal(num_cpus=2)


@pytest.fixture
def warm() -> Iterator[vd.LocalCompute]:
    """The same, which also keep their models from run to run."""
    with workers_that_imported(*LIBRARIES):
        yield ForkedLocal(num_cpus=2)
        end_waiting()


BY = ["transformers", *(pytest.param(by, marks=needs_vllm) for by in ("vllm", "vllm server"))]
"""Where a model runs."""


def engine(of: int) -> list[psutil.Process]:
    """Return the engine processes below a process, the engine core first."""
    below = psutil.Process(of).children(recursive=True)
    return sorted(
        (p for p in below if p.name().startswith("VLLM::")), key=lambda p: "Core" not in p.name()
    )


def shared_memory(pid: int) -> set[str]:
    """Return the shared memory segments that a process has open."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.add(os.readlink(file))
        except OSError:  # it is closed, or the process has ended
            continue
    return {name for name in found if name.startswith("/dev/shm/psm_") and "deleted" not in name}


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20.0)[1]


def arguments(by: str, model: Path, **kwargs: Any) -> dict[str, Any]:
    if by == "transformers":
        return {"provider": by, "model": str(model), "options": {"batch_size": 3}}
    engine = {**ENGINE, "gpu_memory_utilization": 0.1, **kwargs}
    if by == "vllm":
        return {"provider": by, "model": str(model), "options": {"engine_kwargs": engine}}
    return {"model": vllm_server(model, engine)}


def vllm_python() -> str:
    """The interpreter of `vd.VLLMServer`: its engine is forked from it."""
    return str(forked.vllm_python(Path(os.environ["VANE_DAGSTER_HOME"])))


def vllm_server(model: Path | str, flags: Mapping[str, Any]) -> vd.VLLMServer:
    replicas = vd.Workers(env_vars=SERVER_ENV)
    return vd.VLLMServer(model, flags, replicas=replicas, python=vllm_python())


def docs(tmp_path: Path, texts: Sequence[str | None] = TEXTS, **columns: Any) -> vd.Pipeline:
    ids = pa.array(range(len(texts)), pa.int64())
    write_source(tmp_path / "src", {"id": ids, "text": [*texts], **columns})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def ask(pipeline: vd.Pipeline, model: Path, name: str = "asked", **kwargs: Any) -> vd.Stage:
    options = {"engine_kwargs": ENGINE, **kwargs.pop("options", {})}
    sampling = {"temperature": 0, "max_tokens": 8, **kwargs.pop("sampling_params", {})}
    own = {"provider": "vllm", "model": str(model), "options": options, "env_vars": ENV}
    given = {**own, "sampling_params": sampling, **kwargs}
    return pipeline.prompt(name, given.pop("messages", "{text}"), **grouped(given))


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


def answers(tmp_path: Path, stage: str = "asked") -> list[str]:
    """Read the answers; vLLM leaves out a last character that is incomplete in bytes."""
    return [text.rstrip("\ufffd") for text in read(tmp_path, stage)[stage].to_pylist()]


def adapter(folder: Path, model: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter that changes the answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 128)
        tensors[f"{name}.lora_B.weight"] = torch.randn(64, rank)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    settings |= {
        "target_modules": ["down_proj"],
        "base_model_name_or_path": str(model),
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
