"""vane_dagster: a stage of prompts with row keys, which is the default."""

from __future__ import annotations

import os
from typing import Any

import vane_dagster as vd
from benchmarks.contenders.vane import serve
from benchmarks.job import Job, Result
from benchmarks.second_day import vane
from benchmarks.second_day.prompts.endpoint import MODEL, URL

__all__ = ["run", "serve"]


def run(job: Job) -> Result:
    """Materialize all partitions; a refused row is quarantined, and fails no run."""
    return vane.run(job, stage)


def stage(texts: Any, job: Job) -> None:
    """Add the stage."""
    from embedder import prompt  # type: ignore[import-not-found,unused-ignore]  # of the day

    options = {"base_url": os.environ[URL], "api_key_env": None}
    texts.prompt(
        vane.STAGE,
        prompt("{text}"),
        provider="openai",
        model=vd.Model(MODEL, options=options),
        output_column="answer",
        on_error="quarantine",
    )
