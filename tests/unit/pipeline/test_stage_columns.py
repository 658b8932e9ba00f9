"""The columns of stages, as far as they are known without the source, and their schemas."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import same

ROWS = pa.table({"id": [1], "text": [" a "], "n": pa.array([1], pa.int32())})


def declared(url: str = "rows.parquet", **kwargs) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=vd.parquet(url), id="id", **kwargs)
    clean = pipeline.project("clean", {"text": "trim(text)", "one": "1::BIGINT", "n": "n"})
    chunks = clean.map_batches(
        "chunks", same, schema={"chunk": "VARCHAR"}, cardinality=vd.Children("chunk_id")
    )
    pipeline.join("both", clean, chunks, children="list", columns={"clean": ["n"]})
    clean.map_batches("length", same, schema={"id": "BIGINT", "length": "INTEGER"})
    return pipeline


def known(pipeline: vd.Pipeline, stage: str) -> dict[str, str | None]:
    """The columns of a stage, with their types if they are known without the source."""
    fields = pipeline._tables()[stage].fields
    return {name: each and str(each.type) for name, each in fields.items()}


def test_columns_and_types_are_known_as_far_as_they_are_declared():
    pipeline = declared()
    assert known(pipeline, "clean") == {"id": None, "text": None, "one": None, "n": None}
    assert known(pipeline, "chunks") == {"chunk_id": "string", "id": None, "chunk": "string"}
    children = "list<item: struct<chunk_id: string, chunk: string>>"
    assert known(pipeline, "both") == {"id": None, "n": None, "chunks": children}
    assert known(pipeline, "length") == {"id": "int64", "length": "int32"}
    assert repr(pipeline) == "<Pipeline docs: clean, chunks, both, length>"


def test_the_schema_of_a_stage_is_completed_from_one_footer(tmp_path):
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    pipeline = declared(str(tmp_path / "rows.parquet"))
    child = pa.struct({"chunk_id": pa.string(), "chunk": pa.string()})
    assert pipeline["both"].schema == pa.schema(
        {"id": pa.int64(), "n": pa.int32(), "chunks": pa.list_(child)}
    )
    assert pipeline["clean"].schema.field("text").type == pa.string()


def test_a_source_that_is_missing_or_does_not_fit_is_named(tmp_path):
    stage = declared(str(tmp_path / "rows.parquet"))["clean"]
    with pytest.raises(vd.errors.SourceError, match=r"'docs': no Parquet file at .*rows\.parq"):
        _ = stage.schema
    pq.write_table(ROWS.drop_columns(["text"]), tmp_path / "rows.parquet")
    with pytest.raises(vd.errors.SchemaError, match=r"'docs/clean'.*text"):
        _ = stage.schema
    stage = vd.Pipeline("p", source=vd.stored("other/stage"), id="id").project("a", ["text"])
    with pytest.raises(
        vd.errors.DefinitionError, match="types of 'asset other/stage' are known only in a run"
    ):
        _ = stage.schema
