"""What kinds of stages say of themselves, which others ask them."""

from __future__ import annotations

import pyarrow as pa
import pytest

import vane_dagster as vd


def same(batch):
    return batch


@pytest.fixture
def pipeline() -> vd.Pipeline:
    made = vd.Pipeline("docs", source=vd.parquet("rows.parquet"), id="id")
    clean = made.project("clean", ["text"], where="text <> ''")
    chunks = clean.map_batches(
        "chunks",
        same,
        schema={"chunk": "VARCHAR"},
        columns=["text"],
        cardinality=vd.Children("chunk_id"),
        on_error=vd.Failures("quarantine", max_error_rate=0.25, timeout_s=5),
    )
    asked = chunks.prompt(
        "asked", "{chunk}", provider="openai", model=vd.Model("m", token_budget=10)
    )
    chunks.embed("vectors", "chunk", model="m")
    listed = made.join("listed", clean, asked, how="left", children="list")
    listed.write("out", "published")
    return made


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("runs_udf", {"chunks", "asked", "vectors"}),
        ("publishes", {"out"}),
        ("makes_rows", {"chunks"}),
        ("may_filter", {"clean", "chunks"}),
        ("fills_nulls", {"listed"}),
        ("isolates_rows", {"chunks"}),
        ("quarantines", {"chunks"}),
        ("row_order", {"asked"}),
        ("usage", {"asked"}),
    ],
)
def test_a_property_holds_for_its_kinds_alone(pipeline, name, stages):
    assert {stage.name for stage in pipeline if getattr(stage.spec, name)} == stages


def test_a_stage_says_whose_rows_it_has_and_what_it_reads(pipeline):
    nodes = {stage.name: stage.spec.base_node(pipeline) for stage in pipeline}
    assert nodes["clean"] == "source"
    assert nodes["listed"] == "clean"
    assert pipeline["listed"].spec.quarantining(pipeline) == {"asked": ["chunks"]}
    assert pipeline["clean"].spec.quarantining(pipeline) == {}
    schema = pa.schema({"id": pa.int64(), "Text": pa.string(), "other": pa.string()})
    assert pipeline["clean"].spec.columns_read("source", schema, ["id"]) == ("id", "Text")
    assert pipeline["chunks"].spec.columns_read("clean", schema, ["id"]) == ("id", "text")
    assert pipeline["out"].spec.columns_read("listed", schema, ["id"]) is None
