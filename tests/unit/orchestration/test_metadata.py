"""Where each column of a stage comes from, as Dagster draws it, and what its metadata shows."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd
from support.data import write_source
from support.in_process import compute
from vane_dagster.orchestration.metadata import column_metadata, stage_metadata
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


def chunks(batch: pa.Table) -> pa.Table:
    return pa.table({"id": batch["id"], "chunk": batch["text"]})


def score(batch: pa.Table) -> pa.Table:
    vectors = pa.array([[0.25, 0.5, 0.75, 1.0]] * len(batch), pa.list_(pa.float32(), 4))
    return pa.table({"score": [1.0] * len(batch), "vector": vectors, "label": ["l"] * len(batch)})


def lineage(metadata: dict[str, Any]) -> dict[str, set[str]]:
    found = metadata["dagster/column_lineage"].deps_by_column
    return {
        column: {f"{dep.asset_key.to_user_string()}:{dep.column_name}" for dep in deps}
        for column, deps in found.items()
    }


def test_column_lineage_schema_and_sample_of_every_stage(tmp_path):
    texts = ["x" * 200, "pipe | *bold* <b>", "third"]
    write_source(
        tmp_path / "src",
        {"id": pa.array([1, 2, 3]), "text": texts, "n": [1, 2, 3], "url": ["u"] * 3},
    )
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    clean = docs.project("clean", {"text": "text", "long": "length(Text) + n"}, where="n > 0")
    made = clean.map_batches(
        "chunks", chunks, schema={"chunk": "VARCHAR"}, cardinality=vd.Children("chunk_id")
    )
    scored = made.map_batches(
        "scored",
        score,
        schema={"score": "DOUBLE", "vector": "FLOAT[4]", "label": "VARCHAR"},
        columns=["chunk"],
    )
    both = docs.join(
        "both",
        clean,
        scored,
        children="list",
        columns={"clean": {"words": "long"}},
        source_columns=["url"],
    )
    both.write("out", str(tmp_path / "out"))
    store = Store(StoragePath(str(tmp_path / "store")))
    compute(docs, store)
    events: dict[str, dict[str, Any]] = {}
    for stage in docs:
        (name,) = store.latest("docs", stage.name, [None]).values()
        manifest = store.read("docs", stage.name, None, name)
        columns = column_metadata(manifest, stage.id, lambda node: dg.AssetKey(["docs", node]))
        of_run = stage_metadata(stage.spec, manifest, name, store, 1)
        events[stage.name] = {**columns, **of_run}
    assert lineage(events["clean"]) == {
        "id": {"docs/source:id"},
        "text": {"docs/source:text"},
        "long": {"docs/source:text", "docs/source:n"},
    }
    assert lineage(events["chunks"]) == {
        "chunk_id": {"docs/clean:id"},
        "id": {"docs/clean:id"},
        "chunk": {"docs/clean:id", "docs/clean:text", "docs/clean:long"},
    }
    assert lineage(events["scored"]) == {
        "chunk_id": {"docs/chunks:chunk_id"},
        "id": {"docs/chunks:id"},
        "score": {"docs/chunks:chunk"},
        "vector": {"docs/chunks:chunk"},
        "label": {"docs/chunks:chunk"},
    }
    scored_columns = {f"docs/scored:{c}" for c in ("chunk_id", "score", "vector", "label")}
    assert lineage(events["both"]) == {
        "id": {"docs/clean:id"},
        "words": {"docs/clean:long"},
        "url": {"docs/source:url"},
        "scored": scored_columns,
    }
    assert lineage(events["out"])["words"] == {"docs/both:words"}

    columns = events["clean"]["dagster/column_schema"].columns
    described = {c.name: c.description for c in columns}
    assert described["long"] == "from docs/source: n, text"
    columns = events["scored"]["dagster/column_schema"].columns
    types = {"chunk_id": "VARCHAR", "id": "BIGINT", "score": "DOUBLE", "vector": "FLOAT[4]"}
    assert {c.name: c.type for c in columns} == {**types, "label": "VARCHAR"}
    assert [c.name for c in columns if c.constraints.unique] == ["chunk_id"]

    details = {name: event["details"].value.split("\n\n") for name, event in events.items()}
    shown = details["clean"][2].splitlines()
    assert len(shown) == 2 + 3
    assert "x" * 60 in shown[2]
    assert "x" * 100 not in shown[2]
    assert r"pipe \| \*bold\* \<b\>" in shown[3]
    assert "[0.25, 0.5, 0.75, 1]" in details["scored"][2].replace("\\", "")
