"""The pipeline under chaos: two models side by side, joined and published."""

from __future__ import annotations

import time

import dagster as dg
import pyarrow as pa

import vane_dagster as vd

KEYS = ("north", "south")
STAGES = ("texts", "scores", "labels", "joined", "published")
KEYED = ("scores", "labels")
"""The stages whose rows are reused one by one."""
FRAGMENT_ROWS = 50


class Scorer:
    """A slow model."""

    def __init__(self, factor: int, sleep: float) -> None:
        self.factor, self.sleep = factor, sleep

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(self.sleep)
        return pa.table({"score": [self.factor * n for n in batch["n"].to_pylist()]})


class Labeller:
    """A second slow model."""

    def __init__(self, words: tuple[str, ...], sleep: float) -> None:
        self.words, self.sleep = words, sleep

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(self.sleep)
        picked = [self.words[len(t) % len(self.words)] + t[-2:] for t in batch["text"].to_pylist()]
        return pa.table({"label": picked})


def make(source: str, out: str, labels: str, former: bool = False) -> vd.Pipeline:
    """Declare the pipeline.

    Args:
        source: Folder with a folder for each partition.
        out: The target of the published rows.
        labels: Handling of rows that cannot be labeled: "quarantine" or "null".
        former: Whether to make other rows, as an earlier version of the pipeline did. The scores
            are the same, and their rows are copied.
    """
    docs = vd.Pipeline(
        "chaos",
        source=vd.parquet(source + "/{partition_key}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(KEYS)),
        fragment_rows=FRAGMENT_ROWS,
    )
    texts = docs.project("texts", {"n": "n", "text": "text" if former else "upper(text)"})
    scored = texts.map_batches(
        "scores",
        Scorer,
        schema={"score": "BIGINT"},
        columns=["id", "n"],
        batch_size=10,
        concurrency=2,
        on_error=vd.Failures("quarantine", max_error_rate=0.1),
        fn_constructor_kwargs={"factor": 3, "sleep": 0.01},
    )
    labelled = texts.map_batches(
        "labels",
        Labeller,
        schema={"label": "VARCHAR"},
        columns=["text"],
        batch_size=16,
        concurrency=1,
        on_error=vd.Failures(labels, max_error_rate=0.1),
        fn_constructor_kwargs={"words": ("low", "mid", "high"), "sleep": 0.01},
    )
    docs.join("joined", scored, labelled).write("published", out + "/{partition_key}")
    return docs
