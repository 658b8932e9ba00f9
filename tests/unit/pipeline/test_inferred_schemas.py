"""Stages whose schema is inferred by their first run."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.checks import NullRate
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.planning.definition import (
    inference_definition,
    stage_definition,
)

GIVEN = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("text", pa.string())])


def label(text: str) -> Any:
    return {"label": text, "score": 1.0}


def batches(batch):
    return batch


def pipeline() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")


def stage(method: str = "map", fn: Any = label, schema: Any = "infer", **options: Any) -> vd.Stage:
    made: vd.Stage = getattr(pipeline(), method)("out", fn, schema=schema, **options)
    return made


def udf(stage: vd.Stage) -> MapBatchesSpec:
    assert stage.spec.runs_udf
    return stage.spec


def test_columns_of_a_stage_are_unknown_until_they_are_inferred():
    docs = pipeline()
    first = docs.map("labels", label, schema="infer", include_columns=["n"])
    first.project("half", {"half": "score / 2", "one": "1"})
    first.map_batches("more", batches, schema={"x": "BIGINT"}, include_columns=True)
    tables = docs._tables()
    for name, columns, is_complete in (
        ("labels", ["id", "n"], False),
        ("half", ["id", "half", "one"], True),
        ("more", ["id", "n", "x"], False),
    ):
        assert (list(tables[name].fields), tables[name].is_complete) == (columns, is_complete)
    for name in ("labels", "half", "more"):
        with pytest.raises(
            vd.errors.SchemaError, match="'docs/labels': its columns are unknown until"
        ):
            docs._resolve_schemas(docs.stages, {"source": GIVEN})[name]


def test_stages_downstream_of_unknown_columns_are_declared_and_published(tmp_path):
    docs = pipeline()
    first = docs.map("labels", label, schema="infer")
    second = docs.map("length", len, schema="BIGINT", columns={"obj": "text"})
    docs.join("both", first, second).write("out", str(tmp_path / "out"))
    first.classify("kinds", "label", ["a", "b"], provider="transformers", model="m")
    resolved = docs._with_schema("labels", pa.schema([("label", pa.string())]))
    found = resolved._resolve_schemas(["labels", "length", "both", "out"], {"source": GIVEN})
    assert found["out"].names == ["id", "label", "length"]
    assert docs["labels"].spec.is_inferred, "the declaration stays as it is"


@pytest.mark.parametrize(
    ("method", "fn", "options"),
    [
        ("map", label, {}),
        ("map", label, {"output_column": "answer"}),
        ("flat_map", label, {"id": "new"}),
        ("map_batches", batches, {"include_columns": ["n"]}),
    ],
)
def test_pasting_the_inferred_schema_changes_no_key(method, fn, options):
    kind = pa.struct([("label", pa.string()), ("score", pa.float64())])
    columns = pa.schema([("answer", kind)] if "output_column" in options else list(kind))
    inferred = stage(method, fn, **options)
    resolved = inferred.pipeline._with_schema("out", columns)
    code = resolved["out"].spec.schema_code
    assert code == 'schema={"label": "VARCHAR", "score": "DOUBLE"}'
    pasted = stage(method, fn, **eval(f"dict({code})"), **options)
    definition = stage_definition(resolved, resolved["out"].spec)
    assert definition == stage_definition(pasted.pipeline, pasted.spec)
    assert definition != stage_definition(inferred.pipeline, inferred.spec)


def test_a_schema_is_pinned_for_the_code_of_the_stage_and_of_those_upstream():
    def docs(where: str, fn: Any, order: str = "ab") -> str:
        made = pipeline()
        clean = made.project("clean", {"text": "text"}, where=where)
        clean.map("beside", len, schema="BIGINT", columns={"obj": "text"})
        clean.map("out", fn, schema="infer")
        return inference_definition(made, "out")

    def other(text: str) -> Any:
        return {"label": text, "score": 2.0}

    assert docs("n > 1", label) == docs("n > 1", label)
    assert len({docs("n > 1", label), docs("n > 2", label), docs("n > 1", other)}) == 3


def test_the_size_of_vectors_is_inferred_unless_it_is_declared():
    docs = pipeline()
    vectors = docs.embed("vectors", "text", model="m")
    declared = docs.embed("declared", "text", model="m", dimensions=3)
    assert (udf(vectors).is_inferred, udf(declared).is_inferred) == (True, False)
    assert docs._tables()["vectors"].fields == {"id": None, "vectors": None}, "its name is known"
    with pytest.raises(vd.errors.SchemaError, match="'vectors' has no column"):
        vectors.embed("wrong", "text", model="m")
    with pytest.raises(
        vd.errors.SchemaError, match=r"columns are unknown until .* Declare dimensions="
    ):
        docs._resolve_schemas(["vectors"], {"source": GIVEN})

    def pinned(size: int) -> tuple[vd.Pipeline, MapBatchesSpec]:
        schema = pa.schema([("vectors", pa.list_(pa.float32(), size))])
        resolved = docs._with_schema("vectors", schema)
        assert resolved._resolve_schemas(["vectors"], {"source": GIVEN})["vectors"] == pa.schema(
            [("id", pa.int64()), *schema]
        )
        return resolved, udf(resolved["vectors"])

    definitions = {stage_definition(*pinned(size)) for size in (3, 4)}
    assert len(definitions | {stage_definition(docs, udf(vectors))}) == 3


def inferred(found: list[tuple[str, pa.DataType]], **options: Any) -> list[str]:
    made = stage(**options)
    schema = udf(made).inferred_schema(made.pipeline, pa.schema(found), GIVEN, 16)
    return list(schema.names)


def test_columns_that_pass_through_are_not_part_of_the_schema():
    found = [("id", pa.int64()), ("n", pa.int64()), ("x", pa.int64()), ("error", pa.string())]
    assert inferred(found) == ["n", "x", "error"]
    assert inferred(found, include_columns=["n"]) == ["x", "error"]
    assert inferred(found, include_columns=True) == ["x", "error"]
    with pytest.raises(vd.errors.SchemaError, match="returned no new column"):
        inferred(found[:1])
    found = [("id", pa.int64()), ("new", pa.int64()), ("x", pa.int64())]
    assert inferred(found, method="flat_map", id="new") == ["new", "x"]


def test_a_column_without_a_type_is_named():
    found = [
        ("a", pa.int64()),
        ("b", pa.null()),
        ("c", pa.list_(pa.null())),
        ("d", pa.struct([])),
        ("e", pa.list_(pa.float32(), 0)),
    ]
    with pytest.raises(vd.errors.SchemaError) as raised:
        inferred(found)
    for words in (
        "stage 'docs/out': the type of 'b', 'c', 'd', 'e' cannot be inferred",
        "the first 16 rows have only nulls, empty lists or empty dicts there",
        'schema={"a": "BIGINT", "b": ..., "c": ..., "d": ..., "e": ...}',
    ):
        assert words in str(raised.value)


def test_what_a_declared_schema_must_fit_an_inferred_one_must_fit_too():
    columns = pa.schema([("label", pa.string()), ("error", pa.string())])
    for options, words in (
        ({"on_error": "null"}, "adds a column 'error'"),
        ({"asset": vd.Asset(checks=[NullRate(columns=["x"])])}, "'x'"),
    ):
        made = stage(**options)
        with pytest.raises(vd.errors.DefinitionError, match=words):
            made.pipeline._with_schema("out", columns)._resolve_schemas(["out"], {"source": GIVEN})
