"""Input columns that a stage passes on, and parameters that get files of a column."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage
from vane_dagster.pipeline.specs import StageSpec

GIVEN = pa.schema({"id": pa.int64(), "text": pa.string(), "n": pa.int64()})


def pipeline() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")


def columns(stage: vd.Stage, given: pa.Schema = GIVEN) -> list[str]:
    spec: StageSpec = stage.spec
    return list(spec.output_schema(stage.pipeline, {spec.upstream[0]: given}).names)


def stages(**include: Any) -> dict[str, vd.Stage]:
    docs = pipeline()
    model = {"provider": "openai", "model": "m", **include}
    return {
        "project": docs.project("a", {"m": "n + 1"}, **include),
        "map_batches": docs.map_batches("b", len, schema={"m": "BIGINT"}, **include),
        "map": docs.map("m", len, schema="BIGINT", columns={"obj": "text"}, **include),
        "prompt": docs.prompt("d", "{text}", output_column="m", **model),
        "embed": docs.embed("e", "text", output_column="m", dimensions=3, **model),
    }


@pytest.mark.parametrize("kind", ["project", "map_batches", "map", "prompt", "embed"])
def test_every_kind_of_stage_passes_on_columns(kind):
    own = set(columns(stages()[kind]))
    assert set(columns(stages(include_columns=["text"])[kind])) == {*own, "text"}
    assert set(columns(stages(include_columns=True)[kind])) == {*own, "text", "n"}
    assert set(columns(stages(include_columns=False)[kind])) == own
    with pytest.raises(vd.errors.SchemaError, match="'lost'"):
        columns(stages(include_columns=["lost"])[kind])


def test_keys_change_only_if_columns_are_included():
    plain, named, every = (
        stages(**given)["project"].spec.components(pipeline())
        for given in ({}, {"include_columns": ["n"]}, {"include_columns": True})
    )
    assert len({str(plain), str(named), str(every)}) == 3


PATHS = pa.table({"id": [1, 2], "path": ["/a.txt", None], "scan": ["/b.pdf", "/c.pdf"]})


def name(file: vd.File | None) -> str:
    return "none" if file is None else file.name


def suffix(scan: vd.File, by: int = 1) -> str:
    return scan.suffix * by


def both(file: vd.File, scan: vd.File, path: str) -> str:
    return f"{file.name if file else None} {scan.name} {path}"


@pytest.mark.parametrize(
    ("fn", "columns", "expected"),
    [
        (name, None, ["a.txt", "none"]),  # `file` gets the path of the row
        (suffix, None, [".pdf", ".pdf"]),  # other parameters the column of their name
        (name, {"file": "scan"}, ["b.pdf", "c.pdf"]),
        (both, None, ["a.txt b.pdf /a.txt", "None c.pdf None"]),
    ],
)
def test_a_parameter_gets_a_file_of_its_column(fn, columns, expected):
    stage = row_stage("map", fn, columns=columns, schema={"x": "VARCHAR"})
    assert run_stage(stage, PATHS)["x"].to_pylist() == expected


def test_a_file_parameter_is_part_of_the_definition():
    def as_text(file: str) -> str:
        return file

    def as_file(file: vd.File) -> str:
        return file.name

    text = row_stage("map", as_text, columns={"file": "path"}, schema={"x": "VARCHAR"})
    opened = row_stage("map", as_file, columns={"file": "path"}, schema={"x": "VARCHAR"})
    assert text.spec.contract.keyed != opened.spec.contract.keyed
