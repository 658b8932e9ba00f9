"""Ray Data's processor of HTTP requests, with its job-level checkpointing."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
import ray.data
from ray.data.llm import HttpRequestProcessorConfig, build_processor

from benchmarks.contenders.raydata import ACTOR_CPUS, connect, serve
from benchmarks.job import Job, Result
from benchmarks.second_day.days import PARTITIONS
from benchmarks.second_day.prompts.endpoint import MODEL, URL
from benchmarks.second_day.raydata import checkpointed

__all__ = ["run", "serve"]


def run(job: Job) -> Result:
    """Ask for the rows whose keys have no checkpoint; a block with an error is left out."""
    from embedder import prompt  # type: ignore[import-not-found,unused-ignore]  # of the day

    (step,) = job.steps
    start = time.perf_counter()
    connect(job)
    checkpointed(step.out)
    template = prompt("{text}")

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "user", "content": template.format(text=row["text"])}
        return {"payload": {"model": MODEL, "messages": [message]}, **row}

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        answer = row["http_response"]["choices"][0]["message"]["content"]
        return {"id": row["id"], "key": row["key"], "answer": answer}

    config = HttpRequestProcessorConfig(
        url=f"{os.environ[URL]}/chat/completions",
        headers={"Authorization": "Bearer none"},
        concurrency=1,
        batch_size=64,
    )
    config.http_request_stage = {"num_cpus": ACTOR_CPUS}
    columns = ["id", "key", "text"]
    rows = ray.data.read_parquet(step.source, columns=columns, override_num_blocks=PARTITIONS)
    processor = build_processor(config, preprocess=ask, postprocess=answered)
    processor(rows).write_parquet(f"{step.out}/rows")
    ray.shutdown()
    return Result([time.perf_counter() - start], {"ray": ray.__version__})
