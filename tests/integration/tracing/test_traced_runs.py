"""Rows of real runs, traced on the command line and by `vd.trace`."""

from __future__ import annotations

import json
import shlex
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

import vane_dagster as vd
from support.data import write_source
from support.results import metadata
from vane_dagster.cli.main import main

DAY = "2026-01-02"


class Embedder:
    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"length": [len(text.as_py()) for text in batch["text"]]}


def test_a_published_row_is_traced_back_and_a_source_row_forward(tmp_path, local, materialize):
    for number, name in enumerate("ab"):
        ids = list(range(30 * number, 30 * number + 30))[::-1]
        table = {"id": ids, "text": [f"word{id}" for id in ids]}
        write_source(tmp_path / "src" / DAY, table, f"{name}.parquet", row_group_size=10)
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{tmp_path}/src/{{partition_key}}"),
        id="id",
        fragment_rows=10,
        partitions_def=dg.StaticPartitionsDefinition(["2026-01-01", DAY]),
    )
    clean = pipeline.project("clean", ["id", "text"], where="id % 5 <> 0")
    embedded = clean.map_batches("embedded", Embedder, schema={"length": "BIGINT"})
    pipeline.join("joined", clean, embedded).write("published", f"{tmp_path}/out/{{partition_key}}")
    result = materialize(pipeline, local, DAY)
    store = str(tmp_path / "store")

    def traced(*arguments: str) -> Any:
        options = [*arguments, "--partition", DAY, "--store", store]
        return CliRunner().invoke(main, ["trace", *options])

    # The command prints the row's way: files, the run, code, model and workers.
    found = vd.trace("docs/published", 42, DAY, store=store)
    assert traced("docs/published", "--id", "42").output == f"{found}\n"
    assert [step.stage.removeprefix("docs/") for step in found.steps] == [
        "source", "clean", "embedded", "joined", "published",
    ]  # fmt: skip
    assert f"row 17 of file://{tmp_path}/src/{DAY}/b.parquet" in str(found)
    for step in found.steps:
        rows = pq.ParquetFile(step.url.removeprefix("file://")).read()
        assert rows.slice(step.row, 1)["id"].to_pylist() == [42]
    made = found.steps[2]
    assert (made.run_id, made.committed_by, made.model) == (result.run_id,) * 2 + ("Embedder",)
    assert made.workers
    assert made.pool
    (published,) = found.steps[-1].published
    assert pq.read_table(published).slice(found.steps[-1].row, 1)["id"].to_pylist() == [42]

    # The materialization's metadata has the command for its first row.
    command = shlex.split(metadata(result, "joined")["trace"].strip("`"))
    shown = CliRunner().invoke(main, command[1:])
    assert shown.output.startswith(f"docs/joined, partition {DAY}, id ")

    # Forward, as JSON; and rows that a stage dropped.
    forward = vd.trace("docs", 42, DAY, store=store, forward=True)
    output = traced("docs", "--id", "42", "--forward", "--json").output
    assert json.loads(output) == json.loads(json.dumps(forward.to_dict()))
    wrong = traced("docs/published", "--id", "45")
    assert wrong.exit_code == 1
    assert wrong.output.startswith(f"Error: 'docs/published', partition '{DAY}' has no row")
    assert "was filtered by 'docs/clean'" in wrong.output
