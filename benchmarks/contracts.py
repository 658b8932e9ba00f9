"""What each contract costs, against the same function as `map_batches`.

``python -m benchmarks.contracts`` creates its data in a temporary folder, and prints a table. The
functions do as little as possible, so a ratio shows what a contract adds at worst.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from benchmarks.report import machine
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Committed, Event
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions

PARTITIONS = 5
ELEMENTS = 64
SHARE = {"text": 1, "flat": 4, "tensor": 4}
"""By how much the rows of each kind of data are fewer."""


def length(text: str) -> int:
    """Return the number of characters."""
    return len(text)


def length_of_row(row: dict[str, Any]) -> int:
    """Return the number of characters of a row's text."""
    return len(row["text"])


def lengths(batch: pa.Table) -> dict[str, Any]:
    """Call `length` for each row of a batch."""
    return {"out": [length(text) for text in batch["text"].to_pylist()]}


def lengths_of_rows(batch: pa.Table) -> dict[str, Any]:
    """Call `length_of_row` for each row of a batch."""
    return {"out": [length_of_row(row) for row in batch.to_pylist()]}


def make_total() -> Callable[[Any], Any]:
    """Return a function of arrays, as Spark's ``predict_batch_udf`` takes it."""
    return lambda vectors: vectors.sum(axis=1)


class Total:
    """The same as a class that gets batches."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sum each vector."""
        return {"out": batch["vector"].sum(axis=1)}


class Double:
    """Doubles vectors, flat or as tensors."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Double each element."""
        return {"out": batch["vector"] * np.float32(2)}


class DoubleFlat:
    """Doubles tensors that are stored as flat lists."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Double each element."""
        tensors = batch["vector"].reshape(-1, 8, 8)
        return {"out": (tensors * np.float32(2)).reshape(len(tensors), -1)}


def _by_row(rows: vd.Pipeline) -> vd.Stage:
    return rows.map("out", length)


def _by_row_in_batches(rows: vd.Pipeline) -> vd.Stage:
    return rows.map_batches("out", lengths, schema={"out": "BIGINT"}, columns=["text"])


def _dict(rows: vd.Pipeline) -> vd.Stage:
    return rows.map("out", length_of_row, columns=["text"])


def _dict_in_batches(rows: vd.Pipeline) -> vd.Stage:
    return rows.map_batches("out", lengths_of_rows, schema={"out": "BIGINT"}, columns=["text"])


def _predict(rows: vd.Pipeline) -> vd.Stage:
    return rows.predict_batch("out", make_total, columns=["vector"], return_type="float")


def _predict_in_batches(rows: vd.Pipeline) -> vd.Stage:
    given: dict[str, Any] = {"columns": ["vector"], "batch_format": "numpy"}
    return rows.map_batches("out", Total, schema={"out": "FLOAT"}, **given)


def _tensors(rows: vd.Pipeline) -> vd.Stage:
    given: dict[str, Any] = {"columns": ["vector"], "batch_format": "numpy"}
    return rows.map_batches("out", Double, schema={"out": vd.tensor("float32", (8, 8))}, **given)


def _flat_lists(rows: vd.Pipeline) -> vd.Stage:
    given: dict[str, Any] = {"columns": ["vector"], "batch_format": "numpy"}
    return rows.map_batches("out", DoubleFlat, schema={"out": f"FLOAT[{ELEMENTS}]"}, **given)


Measured = tuple[str, Callable[..., vd.Stage]]
"""The data that a stage reads, and the function that adds the stage."""

PAIRS: dict[str, tuple[Measured, Measured]] = {
    "map, by name": (("text", _by_row), ("text", _by_row_in_batches)),
    "map, a dict": (("text", _dict), ("text", _dict_in_batches)),
    "predict_batch": (("flat", _predict), ("flat", _predict_in_batches)),
    "tensors of 8 x 8": (("tensor", _tensors), ("flat", _flat_lists)),
}
"""For each contract its stage, and the stage with the same function in `map_batches`."""


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000, help="of a partition")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    found = machine()
    print(
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}.\n"
    )
    print("| contract | rows/s | rows/s in `map_batches` | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root, given.rows)
        for name, (contract, batches) in PAIRS.items():
            repeats = []
            for repeat in range(given.repeat):  # in turns, so noise affects both
                pair = (contract, batches)[:: 1 if repeat % 2 else -1]
                seconds = {
                    each: _seconds(root, *each, f"{name}-{repeat}-{i}")
                    for i, each in enumerate(pair)
                }
                repeats.append((seconds[contract], seconds[batches]))
            total = given.rows // SHARE[contract[0]] * (PARTITIONS - 1)
            own, other = (statistics.median(column) for column in zip(*repeats))
            ratio = statistics.median(other / own for own, other in repeats)
            print(f"| {name} | {total / own:,.0f} | {total / other:,.0f} | {ratio:.2f} |")


def tables(rows: int) -> dict[str, pa.Table]:
    """Return the rows of a partition, by the name of the data.

    Args:
        rows: The number of texts; there are fewer vectors, by `SHARE`.
    """
    random = np.random.default_rng(0)
    few = rows // SHARE["flat"]
    vectors = pa.FixedSizeListArray.from_arrays(
        random.integers(0, 1000, few * ELEMENTS).astype(np.float32), ELEMENTS
    )
    texts = [f"the text of row {i}" for i in range(rows)]
    return {
        "text": pa.table({"id": range(rows), "text": texts}),
        "flat": pa.table({"id": range(few), "vector": vectors}),
        "tensor": pa.table(
            {
                "id": range(few),
                "vector": pa.ExtensionArray.from_storage(vd.tensor("float32", (8, 8)), vectors),
            }
        ),
    }


def _write(root: Path, rows: int) -> None:
    for name, table in tables(rows).items():
        for key in range(PARTITIONS):
            path = root / name / str(key) / "rows.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(table, path)


def _seconds(root: Path, data: str, add: Callable[..., vd.Stage], name: str) -> float:
    """Return the seconds from the first partition's commit to the last."""
    keys = [str(key) for key in range(PARTITIONS)]
    pipeline = vd.Pipeline(
        "rows",
        source=vd.parquet(str(root / data / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    add(pipeline)
    commits: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Committed):
            commits.append(time.perf_counter())

    store = vd.FragmentStore(root=str(root / "stores" / name)).open()
    context = RunContext(store, "run", CheckRunner(pipeline, store), listen=listen)
    run_pipeline(context, pipeline, ["out"], keys, vd.LocalCompute(num_cpus=2), RunOptions())
    assert len(commits) == PARTITIONS
    return commits[-1] - commits[0]


if __name__ == "__main__":
    main()
