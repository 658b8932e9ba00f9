"""A pipeline as text, and the schema of a stage."""

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


def test_a_pipeline_is_drawn_as_a_tree_with_columns_and_known_types():
    assert str(declared()) == "\n".join(
        [
            "docs: rows of rows.parquet, by 'id'",
            "└── clean (project)",
            "    │   id ?, text ?, one ?, n ?",
            "    ├── chunks (map_batches)",
            "    │       chunk_id VARCHAR, id ?, chunk VARCHAR",
            "    ├── both (join of 'clean', 'chunks')",
            '    │       id ?, n ?, chunks STRUCT("chunk_id" VARCHAR, "chunk" VARCHAR)[]',
            "    └── length (map_batches)",
            "            id BIGINT, length INTEGER",
        ]
    )


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
