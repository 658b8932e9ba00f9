"""Pipelines over CSV, JSON lines and text: what is computed again, and where a row comes from."""

from __future__ import annotations

import gzip
import os
from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata
from vane_dagster.sources.ingested_files import IngestedSource


def shout(batch: pa.Table) -> dict[str, Any]:
    return {"loud": [text.upper() for text in batch["text"].to_pylist()]}


def docs(source: Any, id: str = "id", **given: Any) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=source, id=id, fragment_rows=50, **given)
    kept = pipeline.project("kept", ["text"], where=f"{id} <> 17")
    kept.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    return pipeline


def csv_of(first: int, rows: int) -> bytes:
    lines = [f'{n},"text\n{n}"' for n in range(first, first + rows)]
    return ("id,text\n" + "\n".join(lines)).encode()


def test_a_csv_file_is_cut_and_an_added_one_computed_alone(
    tmp_path, compute, materialize, monkeypatch
):
    ingest, pids = IngestedSource._ingest, tmp_path / "pids"

    def noted(*given: Any) -> Any:
        (pids / str(os.getpid())).touch()
        return ingest(*given)

    monkeypatch.setattr(IngestedSource, "_ingest", noted)
    folder = tmp_path / "src"
    for each in (folder, pids):
        each.mkdir()
    (folder / "a.csv").write_bytes(csv_of(0, 120))
    source = vd.csv(str(folder))
    assert metadata(materialize(docs(source), compute), "loud")["fragments_computed"] == 3
    (pid,) = pids.iterdir()
    assert (pid.name == str(os.getpid())) == isinstance(compute, vd.LocalCompute), (
        "a cluster converts it"
    )
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert found["loud"].to_pylist() == [f"TEXT\n{n}" for n in range(120) if n != 17]

    assert metadata(materialize(docs(source), compute), "loud")["fragments_computed"] == 0
    (folder / "b.csv.gz").write_bytes(gzip.compress(csv_of(200, 30)))
    assert metadata(materialize(docs(source), compute), "loud")["fragments_computed"] == 1
    (folder / "b.csv.gz").write_bytes(gzip.compress(csv_of(200, 40)))
    assert metadata(materialize(docs(source), compute), "loud")["fragments_computed"] == 1
    assert read_stage(tmp_path / "store", "docs", "loud").num_rows == 159

    store = str(tmp_path / "store")
    step = vd.trace(docs(source)["loud"], 100, store=store).steps[0]
    assert (step.url, step.row) == (f"file://{folder}/a.csv", 100)
    dropped = vd.trace(docs(source)["kept"], 239, store=store).steps[0]
    assert (dropped.url, dropped.row) == (f"file://{folder}/b.csv.gz", 39)
    (folder / "a.csv").write_bytes(csv_of(1, 119))
    moved = vd.trace(docs(source)["loud"], 100, store=store).steps[0]
    assert any("changed" in note or "replaced" in note for note in moved.notes)
