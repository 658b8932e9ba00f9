"""The pipeline under chaos, and a run of it in a process: ``python chaos_run.py OPTIONS``, as JSON.

The exit status is `RAN` or `FAILED`, or 1 after an error outside of the run.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd
from support.pools_run import ShortLease
from support.results import failure, materializing

KEYS = ("north", "south")
STAGES = ("texts", "scores", "labels", "joined", "published")
KEYED = ("scores", "labels")
"""The stages whose rows are reused one by one."""
FRAGMENT_ROWS = 50
RAN, FAILED = 0, 3
LEASE_SECONDS = 8.0
"""Lease time of a killed run in seconds; long enough that a busy machine ends none by mistake."""
FAILURE = "the step failed:"
"""The text before a run's error in its log."""


class Scorer:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(0.01)
        return pa.table({"score": [self.factor * n for n in batch["n"].to_pylist()]})


class Labeller:
    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(0.01)
        picked = [self.words[len(t) % len(self.words)] + t[-2:] for t in batch["text"].to_pylist()]
        return pa.table({"label": picked})


def pipeline(source: str, out: str) -> vd.Pipeline:
    """Declare two models side by side, joined and published."""
    docs = vd.Pipeline(
        "chaos",
        source=vd.parquet(source + "/{partition_key}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(KEYS)),
        fragment_rows=FRAGMENT_ROWS,
    )
    texts = docs.project("texts", {"n": "n", "text": "upper(text)"})
    scored = texts.map_batches(
        "scores",
        Scorer,
        schema={"score": "BIGINT"},
        columns=["id", "n"],
        batch_size=10,
        concurrency=2,
        on_error=vd.Failures("quarantine", max_error_rate=0.1),
        fn_constructor_kwargs={"factor": 3},
    )
    labelled = texts.map_batches(
        "labels",
        Labeller,
        schema={"label": "VARCHAR"},
        columns=["text"],
        batch_size=16,
        concurrency=1,
        on_error=vd.Failures("quarantine", max_error_rate=0.1),
        fn_constructor_kwargs={"words": ("low", "mid", "high")},
    )
    docs.join("joined", scored, labelled).write("published", out + "/{partition_key}")
    return docs


def _materialized(options: Mapping[str, Any]) -> bool:
    root = options["root"]
    docs = pipeline(options["source"], f"{root}/out")
    compute: Any = vd.LocalCompute(num_cpus=2)
    if options["cluster"] is not None:
        cluster = vd.LocalCluster(**options["cluster"])
        compute = ShortLease(cluster=cluster, lease_seconds=LEASE_SECONDS)
    partition = options["partition"] or KEYS
    result = materializing(Path(root))(docs, compute, partition, raises=False)
    if not result.success:
        print(FAILURE, failure(result))
    return result.success


if __name__ == "__main__":
    logging.getLogger().handlers.clear()
    sys.exit(RAN if _materialized(json.loads(sys.argv[1])) else FAILED)
