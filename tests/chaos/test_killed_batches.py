"""Runs in batch mode that are killed: nothing is submitted twice, and no row is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

import vane_dagster as vd
from support.data import write_source
from support.llm_server import KEY, Server
from vane_dagster import testing
from vane_dagster.engine import stage_batches
from vane_dagster.providers.batch_api import AnthropicBatches, OpenAIBatches

TEXTS = [*(f"text {i}" for i in range(9)), "expires", "refused", "busy"]
AGAIN = ("expires", "busy")
ROUNDS = int(os.environ.get("VANE_ROUNDS", "2"))
KILLS, MAX_RUNS = 2, 12
DOUBT_SECONDS = 2.0


def run(folder: Path, url: str, provider: str) -> None:
    """Run the pipeline in this process, until what it waits for is submitted."""
    os.environ["LLM_KEY"] = KEY
    stage_batches.DOUBT_SECONDS = DOUBT_SECONDS
    OpenAIBatches.MAX_REQUESTS = AnthropicBatches.MAX_REQUESTS = 5
    docs = vd.Pipeline("docs", source=vd.parquet(f"{folder}/src"), id="id", fragment_rows=4)
    asked = docs.prompt(
        "asked",
        "{text}",
        provider=provider,
        model=vd.Model("m", options={"base_url": url, "api_key_env": "LLM_KEY"}, mode="batch"),
        on_error="quarantine",
        concurrency=vd.Workers(env_vars=["LLM_KEY"]),
    )
    asked.project("below", ["id", "asked"])
    docs.run(store=f"{folder}/store", compute=vd.LocalCompute(num_cpus=1))


def killed(chance: random.Random, *given: object) -> int:
    faults = []
    if chance.random() < 0.7:
        operation = chance.choice(["write", "write", "delete", "list"])
        calls = chance.randint(1, 10)
        faults.append(testing.StorageFault("*/batches*", "kill", operation, calls=calls))
    with testing.faults(*faults):
        process = multiprocessing.get_context("spawn").Process(target=run, args=given)
        process.start()
        if not faults:
            process.join(chance.uniform(2.0, 7.0))
            if process.is_alive():
                process.kill()
        process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def is_committed(folder: Path) -> bool:
    return any(folder.glob("store/docs/below/manifests/*/*.json"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_runs_that_are_killed(tmp_path: Path, endpoint: tuple[Server, str], number: int) -> None:
    seed = int(os.environ.get("VANE_SEED", "0")) + number
    chance = random.Random(seed)
    server, url = endpoint
    server.clear()
    server.batches.looks_until_end = chance.randint(0, 2)
    provider = ("openai", "anthropic")[seed % 2]
    url = url.removesuffix("/v1") if provider == "anthropic" else url
    write_source(tmp_path / "src", {"id": range(len(TEXTS)), "text": TEXTS}, row_group_size=4)
    context = multiprocessing.get_context("spawn")
    exits = []
    for _ in range(KILLS):
        exits.append(killed(chance, tmp_path, url, provider))
    for _ in range(MAX_RUNS):
        if is_committed(tmp_path):
            break
        time.sleep(DOUBT_SECONDS / 2)
        process = context.Process(target=run, args=[tmp_path, url, provider])
        process.start()
        process.join(120)
        assert process.exitcode == 0, f"seed {seed}"
    rows = vd.load("docs/below", store=f"{tmp_path}/store").sort_by("id").to_pylist()
    expected = [f"echo: {text}" for text in TEXTS if text != "refused"]
    assert [row["asked"] for row in rows] == expected, f"seed {seed}"
    failed = vd.quarantine("docs/asked", store=f"{tmp_path}/store").to_pylist()
    assert [row["id"] for row in failed] == [TEXTS.index("refused")], f"seed {seed}"
    counts = {text: 1 + (text in AGAIN) for text in TEXTS}
    assert server.batches.prompts == counts, f"seed {seed}, exits {exits}"
    assert {0, -signal.SIGKILL}.issuperset(exits)
