"""What functions before and after the model may return, and how a stage declares them."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from vane_dagster.providers.row_functions import PostprocessError, processed, prompt_of

import vane_dagster as vd
from support.prompts import Reversed, docs
from support.udf_calls import run_stage
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.providers.base import Answer

SCHEMA = pa.schema({"words": pa.int64(), "tags": pa.list_(pa.string())})
ANSWER = Answer("two words", 5, 2, 1, requests=3)


# What preprocess returns


@pytest.mark.parametrize(
    ("made", "has_template", "expected"),
    [
        ("text", False, ("text", {}, {})),
        ([{"role": "user"}], True, ([{"role": "user"}], {}, {})),
        ({"prompt": "p", "x": 1}, False, ("p", {"prompt": "p", "x": 1}, {})),
        ({"messages": [1], "prompt": "p"}, False, ([1], {"messages": [1], "prompt": "p"}, {})),
        ({"prompt": "p"}, True, (None, {"prompt": "p"}, {})),
    ],
)
def test_what_makes_a_prompt(made, has_template, expected):
    assert prompt_of(made, has_template) == expected


def test_sampling_parameters_of_a_row():
    assert prompt_of({"prompt": "p", "sampling_params": {"seed": 1}}, False)[2] == {"seed": 1}
    assert prompt_of({"prompt": "p", "sampling_params": None}, False)[2] == {}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned a NoneType; expected text, a list of messages, or a dict"),
        ({"text": "a"}, "returned a dict of 'text'; expected 'messages' or 'prompt' in it"),
        ({"prompt": "a", "sampling_params": 7}, "returned a int as 'sampling_params'"),
    ],
)
def test_what_makes_no_prompt(made, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prompt_of(made, has_template=False)


# What postprocess returns


def test_columns_are_those_of_the_schema():
    row = {"id": 1, "text": "a"}
    arrays = processed(lambda row: {**row, "words": 2, "tags": None}, row, ANSWER, SCHEMA)
    assert [array.to_pylist() for array in arrays] == [[2], [None]]
    assert [array.type for array in arrays] == SCHEMA.types


def test_arrays_have_the_shape_of_a_tensor():
    schema = pa.schema({"image": vd.tensor("float32", (2, 3))})
    image = np.arange(6.0).reshape(2, 3)
    (array,) = processed(lambda row: {"image": image}, {"id": 1}, ANSWER, schema)
    assert array.to_numpy_ndarray().tolist() == [image.tolist()]
    with pytest.raises(PostprocessError, match=r"shape \(3, 2\), not \(2, 3\)"):
        processed(lambda row: {"image": image.T}, {"id": 1}, ANSWER, schema)


def test_preprocess_gets_arrays_of_a_tensor():
    def shape(row: dict[str, Any]) -> str:
        return str(getattr(row["image"], "shape", None))[::-1]

    kind = vd.tensor("float32", (2, 3))
    images = pa.array([[1, 2, 3, 4, 5, 6], None], kind.storage_type)
    table = pa.table({"id": [1, 2], "image": pa.ExtensionArray.from_storage(kind, images)})
    pipeline = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    stage = pipeline.prompt("out", provider=Reversed, model="m", messages=shape)
    assert run_stage(stage, table)["response"].to_pylist() == ["(2, 3)", "None"]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises(error: BaseException) -> Any:
    def function(row: dict[str, Any]) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises(KeyError("mood")), "postprocess raised KeyError: 'mood'. The answer: two words"),
        (raises(SystemExit(1)), "postprocess raised SystemExit: 1"),
        (raises(Unprintable()), "postprocess raised Unprintable."),
        (lambda row: None, "returned a NoneType; expected a dict"),
        (lambda row: {"words": 1}, "returned no 'tags'; it returned 'words'"),
        (lambda row: {"words": 1, "tags": [], "tag": 1}, "returned 'tag', which schema does not"),
        (lambda row: {"words": "two", "tags": []}, "returned a str as 'words', which schema decl"),
        (lambda row: {"words": 2**70, "tags": []}, "returned a int as 'words'"),
        (lambda row: {"words": 4.5, "tags": []}, "returned a float as 'words'"),
        (lambda row: {"words": np.float32(4.5), "tags": []}, "returned a float32 as 'words'"),
    ],
)
def test_a_row_that_postprocess_fails_for_is_paid_for(function, message):
    with pytest.raises(PostprocessError, match=re.escape(message)) as raised:
        processed(function, {"id": 1}, ANSWER, SCHEMA)
    counts = {"requests": 3, "prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
    assert raised.value.used == counts


# Declaration


def asks(row: dict[str, Any]) -> str:
    return f"What is {row['text']}?"


def uses(row: dict[str, Any]) -> dict[str, Any]:
    return {"words": len(row["response"].split())}


class Stateful:
    def __call__(self, row: dict[str, Any]) -> str:
        return "a"


async def later(row: dict[str, Any]) -> str:
    return "a"


def no_row() -> str:
    return "a"


def declared(tmp_path: Any, messages: str | None = None, **kwargs: Any) -> vd.Stage:
    return docs(tmp_path).prompt("asked", messages, provider=Reversed, model="m", **kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preprocess": Stateful()}, "expected a function of a row. A class that holds state"),
        ({"preprocess": Stateful}, "expected a function of a row"),
        ({"preprocess": later}, "preprocess 'later' is asynchronous or a generator"),
        ({"preprocess": no_row}, "preprocess 'no_row' cannot be called with a row"),
        ({"postprocess": uses}, "the columns that postprocess makes are unknown"),
        ({"schema": {"n": "BIGINT"}}, "schema declares what postprocess makes, and there is none"),
        ({"columns": ["text"]}, "columns are what preprocess and postprocess get"),
        ({"postprocess": uses, "schema": {"id": "BIGINT"}}, "would be called 'id'"),
        ({"preprocess": asks, "system": " "}, "system is ' '; expected text"),
    ],
)
def test_functions_that_do_not_fit(arguments, message, tmp_path):
    with pytest.raises(vd.DefinitionError, match=re.escape(message)):
        declared(tmp_path, **arguments)


def test_prompts_are_in_the_column_that_is_called_like_the_stage(tmp_path):
    rows = docs(tmp_path).project("clean", {"prompt": "text"})
    given = {"provider": Reversed, "model": "m"}
    assert rows.prompt("prompt", **given).spec.columns == ("prompt",)
    with pytest.raises(vd.DefinitionError, match="messages is missing, and 'clean' has no column"):
        rows.prompt("asked", **given)


def test_functions_get_all_columns_or_those_that_are_named(tmp_path):
    assert declared(tmp_path, preprocess=asks).spec.columns is None
    heat = {"sampling_params": {"temperature": "{heat}"}}
    named = declared(tmp_path, preprocess=asks, columns=["title"], **heat)
    assert named.spec.columns == ("title", "heat")
    made = declared(tmp_path, "{text}", postprocess=uses, schema={"words": "BIGINT"}, columns=[])
    assert made.spec.columns == ("text",)
    assert made.spec.schema.names == ["words", "response_usage"]


class Counted(NamedTuple):
    words: int
    share: float | None


def counts(row: dict[str, Any]) -> Counted:
    return Counted(2, None)


def test_columns_are_the_fields_of_the_return_annotation(tmp_path):
    made = declared(tmp_path, "{text}", postprocess=functools.partial(counts)).spec.schema
    assert made.field("words").type == pa.int64()
    assert made.field("share").type == pa.float64()
    schema = pa.schema([made.field("words"), made.field("share")])
    arrays = processed(counts, {}, ANSWER, schema)
    assert [array.to_pylist() for array in arrays] == [[2], [None]]


def test_the_description_names_the_function(tmp_path):
    partial = functools.partial(asks)
    assert declared(tmp_path, preprocess=partial).spec.description == (
        "Reversed('m') is asked what `asks` makes of a row"
    )


def test_functions_count_in_keys_and_not_in_the_identity_of_workers(tmp_path):
    schema = {"words": "BIGINT"}
    stages = [
        declared(tmp_path, "{text}"),
        declared(tmp_path, preprocess=asks),
        declared(tmp_path, "{text}", preprocess=asks),
        declared(tmp_path, preprocess=lambda row: row["text"]),
        declared(tmp_path, "{text}", postprocess=uses, schema=schema),
        declared(tmp_path, "{text}", postprocess=uses, schema=schema, columns=[]),
        declared(tmp_path, "{text}", postprocess=uses, schema={"words": "DOUBLE"}),
    ]
    definitions = {stage_definition(stage.pipeline, stage.spec) for stage in stages}
    assert len(definitions) == len(stages)
    assert len({pool_identity(stage.pipeline, stage.spec).digest for stage in stages}) == 1


def imports_its_module(row: dict[str, Any]) -> str:
    from support.prompts import TEXTS

    return TEXTS[0]


def test_functions_that_need_their_modules_have_workers_of_their_own(tmp_path):
    alone = declared(tmp_path, preprocess=imports_its_module)
    other = declared(tmp_path, preprocess=asks)
    pools = [pool_identity(stage.pipeline, stage.spec).digest for stage in (alone, other)]
    assert pools[0] != pools[1]
