"""CSV files in runs on a cluster, whose workers convert them."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata
from vane_dagster.sources.ingested_files import IngestedSource


def shout(batch: pa.Table) -> dict[str, Any]:
    return {"loud": [text.upper() for text in batch["text"].to_pylist()]}


def test_a_cluster_converts_a_csv_file_once(tmp_path, cluster, materialize, monkeypatch):
    ingest, pids = IngestedSource._ingest, tmp_path / "pids"

    def noted(*given: Any) -> Any:
        (pids / str(os.getpid())).touch()
        return ingest(*given)

    monkeypatch.setattr(IngestedSource, "_ingest", noted)
    pids.mkdir()
    lines = [f'{n},"text\n{n}"' for n in range(120)]
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(lines))
    source = vd.csv(f"{tmp_path}/a.csv")
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=50)
    docs.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    for computed in (3, 0):
        result = materialize(docs, vd.RayCompute(cluster=cluster))
        assert metadata(result, "loud")["fragments_computed"] == computed
    (pid,) = pids.iterdir()
    assert pid.name != str(os.getpid())
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert found["loud"].to_pylist() == [f"TEXT\n{n}" for n in range(120)]
