"""Models on a real GPU; skipped where there is none."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

import vane_dagster as vd
from benchmarks.tiny_llm import make
from support.data import read_stage, write_source
from support.results import failure, metadata
from support.tiny_answers import greedy
from support.vllm_stages import TEXTS, answers, ask, docs
from vane_dagster.compute.local_backend import visible_gpus
from vane_dagster.sources.parquet import ParquetSource

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="no NVIDIA GPU on this machine")


class Project:
    """Multiplies vectors by a seeded matrix on the GPU, once `together` workers are up."""

    def __init__(self, seed: int, size: int = 64, together: int = 1, meet: str = "") -> None:
        import torch

        assert torch.cuda.is_available(), "the worker sees no GPU"
        self.device = torch.device("cuda")
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randn(size, size, generator=generator).to(self.device)
        self.together, self.meet = together, meet

    def __call__(self, batch):
        import torch

        if self.meet:
            Path(self.meet, str(os.getpid())).touch()
            deadline = time.monotonic() + 60
            while len(os.listdir(self.meet)) < self.together and time.monotonic() < deadline:
                time.sleep(0.05)

        vectors = torch.as_tensor(np.stack(list(batch["vector"]))).to(self.device)
        out = vectors @ self.matrix
        return {"id": batch["id"], "out": out, "pid": [os.getpid()] * len(out)}


def sees_gpu(batch):
    return {"gpus": [os.environ.get("CUDA_VISIBLE_DEVICES", "unset")] * batch.num_rows}


SCHEMA = {"id": "BIGINT", "out": "FLOAT[64]", "pid": "BIGINT"}


def source(tmp_path, rows: int = 5_000) -> ParquetSource:
    vectors = np.random.default_rng(0).standard_normal((rows, 64)).astype("f4")
    write_source(tmp_path / "src", {"id": range(rows), "vector": list(vectors)})
    return vd.parquet(str(tmp_path / "src"))


def stage(
    pipeline, name: str, seed: int = 1, gpus: float = 1, concurrency: int = 1, **arguments
) -> vd.Stage:
    return pipeline.map_batches(
        name,
        Project,
        schema=SCHEMA,
        batch_format="numpy",
        batch_size=256,
        gpus=gpus,
        concurrency=concurrency,
        fn_constructor_kwargs={"seed": seed, **arguments},
    )


def reference(tmp_path, seed: int) -> np.ndarray:
    import pyarrow.parquet as pq
    import torch

    vectors = np.stack(pq.read_table(tmp_path / "src")["vector"].to_pylist()).astype("f8")
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).double().numpy()
    return vectors @ matrix


def error(tmp_path, name: str, seed: int) -> float:
    found = read_stage(tmp_path / "store", "vectors", name).sort_by("id")
    out = np.stack(found["out"].to_pylist())
    expected = reference(tmp_path, seed)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def test_a_model_runs_on_the_gpu_and_a_function_beside_it_does_not(tmp_path, compute, materialize):
    pipeline = vd.Pipeline("vectors", source=source(tmp_path), id="id")
    stage(pipeline, "projected")
    pipeline.map_batches("seen", sees_gpu, schema={"gpus": "VARCHAR"}, columns=[])

    result = materialize(pipeline, compute)

    assert error(tmp_path, "projected", 1) < 1e-3
    assert metadata(result, "projected")["batches"] >= 5_000 // 256
    gpus = read_stage(tmp_path / "store", "vectors", "seen")["gpus"].unique().to_pylist()
    assert gpus == [""]


def test_two_workers_share_a_gpu_by_fractions(tmp_path, compute, materialize):
    pipeline = vd.Pipeline("vectors", source=source(tmp_path), id="id", fragment_rows=500)
    (tmp_path / "meet").mkdir()
    meet = str(tmp_path / "meet")
    stage(pipeline, "projected", gpus=0.5, concurrency=2, together=2, meet=meet)

    materialize(pipeline, compute)

    assert error(tmp_path, "projected", 1) < 1e-3
    pids = read_stage(tmp_path / "store", "vectors", "projected")["pid"].unique()
    assert len(pids) == 2


def has_vllm() -> bool:
    """Whether vLLM is there, and not its build for CPUs, which has another name."""
    try:
        return bool(distribution("vllm"))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed, or its build for CPUs alone")
def test_vllm_answers_on_the_gpu_and_stays_there(tmp_path, cluster, materialize):
    model, compute = make(tmp_path / "tiny"), vd.RayCompute(cluster=cluster)
    pipeline = docs(tmp_path, TEXTS * 20)
    ask(pipeline, model, gpus=1)
    ask(pipeline, model, "again", gpus=1, messages="Once more: {text}")

    done = materialize(pipeline, compute)

    assert answers(tmp_path) == greedy(model, TEXTS) * 20
    assert answers(tmp_path, "again") == greedy(model, [f"Once more: {t}" for t in TEXTS]) * 20
    facts = metadata(done, "asked")
    assert facts["completion_tokens"] > 0
    pipeline = docs(tmp_path / "other")
    ask(pipeline, model, gpus=1)
    assert metadata(materialize(pipeline, compute), "asked")["warm_hits"] == 1


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed, or its build for CPUs alone")
def test_vllm_without_a_gpu_of_its_own_says_what_to_reserve(tmp_path, cluster, materialize):
    pipeline = docs(tmp_path)
    ask(pipeline, make(tmp_path / "tiny"))
    message = failure(materialize(pipeline, vd.RayCompute(cluster=cluster), raises=False))
    assert "give the stage gpus=1" in message


class Forgotten:
    """Has a model that was never moved to the GPU, unless `device` says so."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self.model = torch.nn.Linear(64, 64).to(device)

    def __call__(self, batch):
        import torch

        vectors = torch.as_tensor(np.stack(list(batch["vector"]))).to(self.device)
        return {"id": batch["id"], "out": self.model(vectors)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_was_never_moved_to_its_gpu_is_noticed(tmp_path, device, materialize, capfd):
    vectors = vd.Pipeline("vectors", source=source(tmp_path, 300), id="id")
    vectors.map_batches(
        "out",
        Forgotten,
        schema={"id": "BIGINT", "out": "FLOAT[64]"},
        batch_format="numpy",
        batch_size=100,
        gpus=1,
        fn_constructor_kwargs={"device": device},
    )
    materialize(vectors, vd.LocalCompute())
    log = capfd.readouterr().err
    noticed = "'out': Forgotten reserves 1 GPU per worker, but torch has used no memory of it"
    assert log.count(noticed) == (device == "cpu")
