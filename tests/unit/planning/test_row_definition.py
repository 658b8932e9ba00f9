"""What is part of a row definition: what changes the results of equal key columns, nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.edits import Project
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.planning.definition import components, row_definition, stage_definition
from vane_dagster.types.tensors import tensor

INPUT = pa.schema(
    {"id": pa.int64(), "key": pa.string(), "text": pa.string(), "n": pa.int64(), "more": pa.bool_()}
)
CODE = """
def helper(text):
    # of a text
    return len(text)

def batches(batch, by=1, llm=None):
    return {"x": [helper(each) for each in batch["text"].to_pylist()]}

class Model:
    def __init__(self, size=1):
        self.size = size
    def __call__(self, batch):
        return batch
    def other(self, batch):
        return batch

def rows(text: str, n: int) -> int:
    return helper(text) + n

def swapped(n: int, text: str) -> int:
    return helper(text) + n

def is_long(text: str) -> bool:
    return helper(text) > 3

def words(text: str) -> list[str]:
    return text.split()

def before(row):
    return row["text"]
"""
MODEL = {"provider": "openai", "model": "m"}
VECTORS = {"model": "m", "dimensions": 4}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    project = Project(tmp_path / "project")
    project.write(defs=CODE)
    monkeypatch.syspath_prepend(str(project.root))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield project
    project.forget()


def declared(
    project: Project, method: str, *args: Any, source_id: str = "id", **options: Any
) -> tuple[vd.Pipeline, MapBatchesSpec]:
    """Declare a stage. Text that begins with ``code:`` is the name of code of the project."""
    if method == "map_batches":
        args = args or ("code:batches",)
        options = {"schema": {"x": "BIGINT"}, "columns": ["text", "n"], **options}

    def loaded(value: Any) -> Any:
        named = isinstance(value, str) and value.startswith("code:")
        return project.load(value.removeprefix("code:")) if named else value

    pipeline = vd.Pipeline("docs", source=vd.parquet("rows.parquet"), id=source_id)
    given = {name: loaded(value) for name, value in options.items()}
    spec = getattr(pipeline, method)("out", *map(loaded, args), **grouped(given)).spec
    assert isinstance(spec, MapBatchesSpec)
    return pipeline, spec


def found(project: Project, *args: Any, given: pa.Schema = INPUT, **options: Any) -> str:
    return defined(*declared(project, *args, **options), given)


def defined(pipeline: vd.Pipeline, spec: MapBatchesSpec, given: pa.Schema) -> str:
    return row_definition(pipeline, spec, given, components(pipeline, spec))


def with_type(name: str, kind: pa.DataType) -> pa.Schema:
    return INPUT.set(INPUT.get_field_index(name), pa.field(name, kind))


def test_edits_of_code_change_it_and_comments_do_not(project):
    before = found(project, "map_batches")
    project.edit("defs.py", "# of a text", "# the number of characters of a text")
    project.edit("defs.py", "return helper(text) > 3", "return helper(text) > 4")
    assert found(project, "map_batches") == before, (
        "of comments, and of code that the stage does not reach"
    )
    project.edit("defs.py", "return len(text)", "return len(text) + 1")
    assert found(project, "map_batches") != before


B = "map_batches"
SAME: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "the name of an id that is not read": ((B,), {}, {"source_id": "key"}),
    "on_error='null'": ((B,), {}, {"on_error": "null"}),
    "include_columns": ((B,), {}, {"include_columns": True}),
    "batch size and workers": ((B,), {}, {"batch_size": 3, "concurrency": 2, "num_cpus": 1}),
    "reuse of other partitions": ((B,), {}, {"partitions": 4}),
    "a column that is not read": ((B,), {}, {"given": INPUT.append(pa.field("new", pa.bool_()))}),
    "metadata of the input": (
        (B,),
        {},
        {"given": pa.schema([each.with_metadata({"field_id": "1"}) for each in INPUT])},
    ),
    "the rows that a filter passes on": (
        ("filter", "code:is_long"),
        {},
        {"include_columns": ["text"]},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_stays(project, name):
    args, before, after = SAME[name]
    assert found(project, *args, **before) == found(project, *args, **after) != ""


CHANGED: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "the type of an output column": ((B,), {}, {"schema": {"x": "INTEGER"}}),
    "the columns": ((B,), {}, {"columns": ["text"]}),
    "the order of columns in a batch": ((B,), {}, {"columns": ["n", "text"]}),
    "reading the id": ((B,), {}, {"columns": ["text", "n", "id"]}),
    "the batch format": ((B,), {}, {"batch_format": "numpy"}),
    "an argument": ((B,), {}, {"fn_kwargs": {"by": 2}}),
    "a version": ((B,), {}, {"version": "2"}),
    "names of fields that read like types": (
        (B,),
        {"given": with_type("n", pa.struct([("a: int64, b", pa.int64()), ("c", pa.int64())]))},
        {"given": with_type("n", pa.struct([("a", pa.int64()), ("b: int64, c", pa.int64())]))},
    ),
    "the type of an input column": (
        (B,),
        {},
        {"given": with_type("n", pa.int32())},
    ),
    "a keyed variable": ((B,), {}, {"keyed_env_vars": ["LANGUAGE_OF_MODEL"]}),
    "making rows": (
        (B,),
        {"columns": ["id", "text"]},
        {"columns": ["id", "text"], "cardinality": vd.Children("chunk_id")},
    ),
    "columns of parameters": (
        ("map", "code:rows"),
        {},
        {"columns": {"n": "id"}},
    ),
    "a value in place of a field": (
        ("map", "code:rows"),
        {"output_column": "x", "schema": {"a": "BIGINT"}},
        {"schema": {"x": "STRUCT(a BIGINT)"}},
    ),
    "the template of a prompt": (
        ("prompt",),
        {**MODEL, "messages": "{text}"},
        {**MODEL, "messages": "Really: {text}"},
    ),
    "sampling by row": (
        ("prompt", "{text}"),
        {**MODEL, "sampling_params": {"seed": "{n}"}},
        {**MODEL, "sampling_params": {"seed": "{id}"}},
    ),
    "the scale of vectors": (
        ("embed", "text"),
        VECTORS,
        {**VECTORS, "normalize": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_it_changes(project, name):
    args, before, after = CHANGED[name]
    first, second = (found(project, *args, **options) for options in (before, after))
    assert "" not in (first, second)
    assert first != second


def test_what_a_server_serves_changes_it_and_its_replicas_do_not(project):
    def calling(**options: Any) -> str:
        server = vd.Server(["serve", "{port}"], **options)
        return found(project, "map_batches", fn_kwargs={"llm": server})

    assert calling(replicas=1) == calling(replicas=2)
    assert calling(version="1") != calling(version="2")


def test_other_modes_have_none(project):
    for reuse in ("fragments", "none"):
        assert found(project, "map_batches", reuse=reuse) == ""


@pytest.mark.parametrize(
    "kind", [pa.list_view(pa.int64()), pa.dense_union([pa.field("a", pa.int8())])]
)
def test_columns_without_row_keys_have_none(project, kind):
    assert found(project, "map_batches", given=with_type("n", kind)) == ""
    assert found(project, "map_batches", given=with_type("more", kind)) != "", "it is not read"


@pytest.mark.parametrize(
    "kind",
    [
        pa.null(),
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        pa.decimal256(50, 2),
        pa.duration("us"),
        pa.list_(tensor("float32", (2, 3))),
        pa.dictionary(pa.int8(), pa.string()),
        pa.uuid(),
    ],
)
def test_other_columns_have_one(project, kind):
    assert found(project, "map_batches", given=with_type("n", kind)) != ""


def test_an_inferred_schema_counts_once_it_is_known(project):
    pipeline, spec = declared(project, "map_batches", schema="infer")
    assert defined(pipeline, spec, INPUT) == ""
    pinned = spec.with_schema(pipeline, pa.schema({"x": pa.int64()}))
    found_inferred = defined(pipeline, pinned, INPUT)
    assert found_inferred not in ("", found(project, "map_batches"))


def test_the_stage_definition_depends_on_reuse_as_far_as_the_code_can_observe_it(project):
    """With "rows", code gets the id only if it names it."""

    def definition(**given: Any) -> str:
        return stage_definition(*declared(project, "map_batches", **given))

    assert definition() == definition(reuse="rows") == definition(partitions=3)
    assert definition(reuse="fragments") == definition(reuse="none") != definition()
    assert definition(per_row=True) != definition()


def test_row_definitions_are_frozen(project):
    """Stores hold rows under them. Raise `ROW_VERSION` if they change."""
    assert {
        "batches": found(project, "map_batches", version="1"),
        "prompt": found(project, "prompt", "{text}", **MODEL),
        "vectors": found(project, "embed", "text", **VECTORS),
    } == FROZEN


FROZEN = {
    "batches": "6eb5b77997c23a2ac97bc17177d1d416aa129f65",
    "prompt": "b63c6637f2e4d0434356a71ecb683c6dec3eb880",
    "vectors": "1c83136962c768667ec78652ae0a4d41142eebb0",
}
