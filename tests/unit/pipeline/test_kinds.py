"""What kinds of stages say of themselves, which others ask them."""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.pipeline.stage_kind import StageKind


def same(batch):
    """Gives a batch back.

    And nothing else.
    """
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


def attribute_by_stage(pipeline: vd.Pipeline, name: str) -> dict[str, object]:
    return {stage.name: getattr(stage.spec, name) for stage in pipeline}


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
    assert {stage for stage, value in attribute_by_stage(pipeline, name).items() if value} == stages


def test_limits_are_those_of_stages_that_run_code(pipeline):
    failures = {stage.name: stage.spec.failures for stage in pipeline}
    assert (failures["chunks"].timeout_s, failures["clean"].timeout_s) == (5, None)
    assert {name: each.max_error_rate for name, each in failures.items()} == {
        "clean": None, "chunks": 0.25, "asked": None, "vectors": None, "listed": None, "out": None,
    }  # fmt: skip


def test_a_stage_describes_itself_where_it_can(pipeline):
    descriptions = attribute_by_stage(pipeline, "description")
    assert descriptions.pop("chunks") == "Gives a batch back."
    assert "is asked: {chunk}" in descriptions.pop("asked")
    assert descriptions.pop("vectors") == (
        "Column `chunk` is embedded by SentenceTransformersProvider('m')"
    )
    assert set(descriptions.values()) == {None}


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


def test_a_prompt_over_a_join_is_refused_for_a_column_that_it_lacks(pipeline):
    with pytest.raises(vd.DefinitionError, match="'listed' has no column 'texts'"):
        pipeline["listed"].prompt("more", "{texts}", provider="openai", model="m")


def test_no_class_of_a_stage_is_tested_in_the_package():
    kinds = {kind.__name__ for kind in subclasses(StageKind)}
    assert {"ProjectSpec", "ModelStageSpec"} <= kinds
    tested = []
    for file in Path(vd.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if not any(kind in text for kind in kinds):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                tested += [f"{file.name}:{node.lineno}"] if names & kinds else []
    assert tested == []


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))
