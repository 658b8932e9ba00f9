"""Which results a stage reuses: the default by what is known of its columns; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vane_dagster as vd
from support.prompts import Reversed


def same(batch):
    return batch


def length(text: str) -> int:
    return len(text)


def of_row(row: dict[str, Any]) -> int:
    return len(row)


def words(text: str) -> list[str]:
    return text.split()


def is_long(text: str) -> bool:
    return len(text) > 3


class Lengths:
    @vd.method.batch(return_dtype="BIGINT")
    def __call__(self, text: np.ndarray):
        return [len(each) for each in text]


def factory():
    return lambda values: values


def before(row: dict[str, Any]) -> str:
    return str(row)


def documents() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("rows.parquet"), id="id")


SCHEMA = {"x": "BIGINT"}
CHUNKS = {"chunk": "VARCHAR"}
MODEL = {"provider": "openai", "model": "m"}
MANY = {"cardinality": vd.Children("chunk_id")}


Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def rows(method: str, *args: Any, **given: Any) -> Case:
    return "rows", method, args, given


def fragments(method: str, *args: Any, **given: Any) -> Case:
    return "fragments", method, args, given


FILTER = {"schema": SCHEMA, "cardinality": "filter"}
OWN_IDS = {"chunk_id": "VARCHAR"}
LABELS = ("text", ["a", "b"])
DEFAULTS: dict[str, Case] = {
    "batches": fragments("map_batches", same, schema=SCHEMA),
    "named columns": rows("map_batches", same, schema=SCHEMA, columns=["n"]),
    "a filter of batches": fragments("map_batches", same, columns=["n"], **FILTER),
    "a filter that knows the id": rows("map_batches", same, columns=["id", "n"], **FILTER),
    "chunks of batches": fragments("map_batches", same, schema=CHUNKS, columns=["text"], **MANY),
    "chunks with the parent's id": rows(
        "map_batches", same, schema=CHUNKS, columns=["id", "text"], **MANY
    ),
    "chunks with ids of their own": fragments(
        "map_batches", same, schema=OWN_IDS, columns=["id", "text"], **MANY
    ),
    "no column": fragments("map_batches", same, schema=SCHEMA, columns=[]),
    "inferred chunks": fragments("flat_map", words, schema="infer", id="word_id"),
    "parameters": rows("map", length),
    "inputs": rows("map", length, columns={"text": "title"}),
    "arrays": rows("map", Lengths),
    "a whole row": fragments("map", of_row),
    "a row of named columns": rows("map", of_row, columns=["text"]),
    "inferred": rows("map", length, schema="infer"),
    "a filter": rows("filter", is_long),
    "words": rows("flat_map", words, id="word_id"),
    "words with ids of their own": fragments(
        "flat_map", words, id="word_id", schema={"word_id": "VARCHAR"}
    ),
    "Spark's": rows("predict_batch", factory, columns=["n"], return_type="float"),
    "a prompt": rows("prompt", "{text}", **MODEL),
    "a prompt by a function": fragments("prompt", before, **MODEL),
    "a prompt by a function of columns": rows("prompt", before, **MODEL, columns=["text"]),
    "vectors": rows("embed", "text", model="m"),
    "labels": rows("classify", *LABELS, **MODEL),
}
"""The default, and the arguments of a stage."""


def declare(name: str, pipeline: vd.Pipeline | vd.Stage | None = None, **more: Any) -> vd.Stage:
    _, method, args, given = DEFAULTS[name]
    stage: vd.Stage = getattr(pipeline or documents(), method)("out", *args, **{**given, **more})
    return stage


def files() -> vd.Stage:
    docs = vd.Pipeline("docs", source=vd.files("/data/*.txt"))
    return docs.project("named", {"path": "path", "text": "upper(path)", "n": "length(path)"})


def refusal(name: str, pipeline: vd.Pipeline | vd.Stage | None = None, **more: Any) -> str:
    with pytest.raises(vd.errors.DefinitionError) as raised:
        declare(name, pipeline, **more)
    assert "stage 'docs/out'" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default(name):
    expected = DEFAULTS[name][0]
    assert declare(name).spec.reuse.mode == expected
    assert declare(name, reuse=expected).spec.reuse.mode == expected
    assert declare(name, reuse="none").spec.reuse.mode == "none"
    if expected == "rows":
        assert declare(name).spec.reuse.partitions == 1
        assert declare(name, reuse=vd.Reuse(partitions=7)).spec.reuse.partitions == 7
    if expected == "rows":
        assert declare(name, reuse="fragments").spec.reuse.mode == "fragments"


@pytest.mark.parametrize("name", [name for name, case in DEFAULTS.items() if case[0] != "rows"])
def test_rows_that_cannot_be_reused_one_by_one_are_refused_with_the_fix(name):
    fixes = ("name them in columns=", "name it in columns=", "declare a schema without them")
    text = refusal(name, reuse="rows")
    assert 'reuse="rows"' in text
    assert any(fix in text for fix in fixes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("named columns", "fragments"),
        ("parameters", "fragments"),
        ("a prompt by a function of columns", "fragments"),
        ("a prompt", "rows"),
        ("vectors", "rows"),
    ],
)
def test_user_code_may_open_the_files_that_rows_name(name, expected):
    """A row is known by the versions of the files that it names, if it names them."""
    assert declare(name, files()).spec.reuse.mode == expected
    if expected == "fragments":
        assert "its rows do not tell which" in refusal(name, files(), reuse="rows")


def size_of(image: bytes) -> int:
    return len(image)


def name_of(path: str, image: bytes) -> str:
    return path.upper()


def test_a_function_over_files_that_gets_nothing_made_from_the_path_opens_none():
    photos = vd.Pipeline("photos", source=vd.images("/data/*.jpg"))
    wide = photos.project(
        "wide", {"path": "path", "file": "upper(path)", "double": "2 * width", "one": "1"},
        where="width > 9", include_columns=["image"],
    )  # fmt: skip
    sized = wide.map("sized", size_of, include_columns=["double", "file"])
    named = photos.map("named", name_of)
    both = photos.join("both", sized, named)

    def mode(above: vd.Pipeline | vd.Stage, *columns: str) -> str | None:
        name = f"stage{len(photos.stages)}"
        made = above.map_batches(name, same, columns=[*columns], schema={"x": "INT"})
        return made.spec.reuse.mode

    assert mode(photos, "image", "width") == mode(photos, "path") == "rows"
    assert mode(wide, "image", "double", "one") == mode(sized, "sized", "double") == "rows"
    assert mode(both, "sized") == mode(both, "named", "path") == "rows"
    assert mode(wide, "file") == mode(sized, "sized", "file") == "fragments"
    assert mode(named, "named") == mode(both, "sized", "named") == "fragments"
    for schema in ("infer", {"x": "INT"}):
        options = {"schema": schema, "include_columns": ["width"]}
        name = f"stage{len(photos.stages)}"
        some = photos.map_batches(f"some{name}", same, columns=["image"], **options)
        whole = photos.map_batches(f"whole{name}", same, **options)
        assert mode(some, "x", "width") == mode(whole, "width") == "rows"
        assert mode(whole, "x") == "fragments"
        again = whole.project(f"again{name}", {"path": "path", "y": "x"})
        assert mode(again, "y") == "fragments"
    above = photos.map_batches("above", same, columns=["path"], schema="infer")
    options = {"columns": ["path"], "schema": {"z": "INT"}, "include_columns": True}
    passed = above.map_batches("passed", same, **options)
    assert mode(passed, "name") == "fragments", "a column that the first run infers"


def test_the_files_of_the_source_that_rows_name_are_part_of_their_keys():
    def size(scan: vd.File, language: str) -> int:
        return len(scan.read())

    source = vd.files("/data/*.txt")
    pipeline = vd.Pipeline("docs", source=source)
    named = pipeline.project("named", {"scan": "path", "language": "'en'"})
    for stage, expected in [
        (named.map("own", size), ("scan",)),
        (named.map_batches("path", same, columns=["path", "language"], reuse="rows",
                           schema={"x": "DOUBLE"}), ("path",)),
    ]:  # fmt: skip
        assert stage.spec.reuse.mode == "rows"
        assert stage.spec.file_columns(pipeline) == expected


def test_a_users_own_provider_may_open_files_too():
    own = declare("a prompt", files(), provider=Reversed)
    assert own.spec.reuse.mode == "fragments"
    assert declare("a prompt", provider=Reversed).spec.reuse.mode == "rows"


GREEDY = {"sampling_params": {"temperature": 0}}
PER_ROW = [
    ("named columns", {}, False),
    ("named columns", {"reuse": vd.Reuse(per_row=True)}, True),
    ("batches", {"reuse": vd.Reuse(per_row=True)}, False),  # it computes each row anyway
    ("vectors", {}, False),
    ("labels", {"sampling_params": {"temperature": 0.5}}, True),
    ("a prompt", {}, True),
    ("a prompt", GREEDY, False),
    ("a prompt", {"sampling_params": {"temperature": 0.1}}, True),
    ("a prompt", {"sampling_params": {"temperature": "{n}"}}, True),
    ("a prompt", {**GREEDY, "reuse": vd.Reuse(per_row=True)}, True),
    ("a prompt", {"reuse": vd.Reuse(per_row=False)}, False),
    ("a prompt by a function of columns", GREEDY, False),
]


@pytest.mark.parametrize(("name", "given", "expected"), PER_ROW)
def test_rows_of_a_prompt_that_samples_have_results_of_their_own(name, given, expected):
    stage = declare(name, **given)
    assert stage.spec.reuse.per_row is expected
    if stage.spec.reuse.mode == "rows":
        assert (stage.spec.key_columns(stage.pipeline)[0] == "id") is expected
        assert "id" not in stage.spec.columns_given(stage.pipeline)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("vectors", {"reuse": "row"}, "reuse is 'row'"),
        ("vectors", {"reuse": True}, "reuse is True"),
        ("vectors", {"reuse": vd.Reuse("fragments", partitions=2)}, "partitions=2 is for"),
        ("batches", {"reuse": vd.Reuse(partitions=2)}, "name them in columns="),
    ],
)
def test_wrong_values_are_refused(name, given, words):
    assert words in refusal(name, **given)


def test_code_gets_the_columns_that_it_names_and_the_id_only_if_it_names_it():
    def given(name: str, **more: Any) -> Any:
        stage = declare(name, **more)
        return stage.spec.columns_given(stage.pipeline)

    assert given("named columns") == ("n",)
    assert given("named columns", columns=["n", "id", "text"]) == ("n", "id", "text")
    assert given("named columns", reuse="fragments") == ("id", "n")
    assert given("named columns", reuse="none", columns=["n", "id"]) == ("id", "n")
    assert given("batches") is None
    assert given("vectors") == ("text",)


def test_key_columns_count_in_the_order_that_code_can_observe():
    def counted(name: str, **more: Any) -> Any:
        stage = declare(name, **more)
        return stage.spec.key_columns(stage.pipeline)

    def joined(title: str, body: str) -> str:
        return title + body

    assert counted("named columns", columns=["n", "a"]) == ("n", "a")
    assert counted("a row of named columns", columns=["n", "a"]) == ("n", "a")
    assert counted("Spark's", columns=["n", "a"]) == ("n", "a")
    assert counted("a prompt by a function of columns", columns=["n", "a"]) == ("id", "n", "a")
    assert documents().map("out", joined).spec.key_columns(documents()) == ("body", "title")
    stage = documents().prompt("out", "{text} {n}", **MODEL)
    assert stage.spec.key_columns(stage.pipeline) == ("id", "n", "text")
    assert counted("named columns", reuse="fragments") == ()
