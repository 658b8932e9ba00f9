"""Functions that make prompts: what they may return, and how a stage declares them."""

from __future__ import annotations

import pickle
import re
import sys
import types
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

import vane_dagster as vd
from support.prompts import Reversed, docs
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.providers.base import Answer
from vane_dagster.providers.format import InvalidAnswer
from vane_dagster.providers.prompt_function import PromptFunction


def prompt_of(made: Any) -> Any:
    return PromptFunction(lambda row: made).prompt({})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("text", ("text", {})),
        ([{"role": "user"}], ([{"role": "user"}], {})),
        ({"messages": [1], "prompt": "p"}, ([1], {})),
        ({"prompt": "p", "sampling_params": {"seed": 1}}, ("p", {"seed": 1})),
    ],
)
def test_what_makes_a_prompt(made, expected):
    assert prompt_of(made) == expected


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
        prompt_of(made)


# Declaration


def asks(row: dict[str, Any]) -> str:
    return f"What is {row['text']}?"


class Stateful:
    def __call__(self, row: dict[str, Any]) -> str:
        return "a"


async def later(row: dict[str, Any]) -> str:
    return "a"


def no_row() -> str:
    return "a"


def declared(tmp_path: Any, messages: Any = None, **kwargs: Any) -> vd.Stage:
    return docs(tmp_path).prompt("asked", messages, provider=Reversed, model="m", **kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": Stateful()}, "expected a plain function of a row that returns its prompt."),
        ({"messages": later}, "expected a plain function of a row"),
        ({"messages": no_row}, "cannot be called as messages(row)"),
        (
            {"messages": "{text}", "columns": ["text"]},
            "columns is only for a function that makes the prompt",
        ),
        ({"preprocess": asks}, "unknown argument 'preprocess' of prompt"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, tmp_path):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        declared(tmp_path, **arguments)


def test_it_counts_in_keys_and_not_in_the_identity_of_workers(tmp_path):
    stages = [
        declared(tmp_path, "{text}"),
        declared(tmp_path, asks),
        declared(tmp_path, asks, columns=["text"]),
        declared(tmp_path, asks, system="Be brief."),
        declared(tmp_path, lambda row: row["text"]),
    ]
    definitions = {stage_definition(stage.pipeline, stage.spec) for stage in stages}
    assert len(definitions) == len(stages)
    assert len({pool_identity(stage.pipeline, stage.spec) for stage in stages}) == 1


def imports_its_module(row: dict[str, Any]) -> str:
    from support.prompts import TEXTS

    return TEXTS[0]


def test_a_function_that_travels_by_value_is_loaded_once_in_a_worker(tmp_path):
    function = declared(tmp_path, asks).spec.model_task.function
    assert not function.is_preloaded
    one, other = (pickle.loads(pickle.dumps(function)) for _ in range(2))
    assert one.call is other.call
    assert one.prompt({"text": "x"}) == ("What is x?", {})
    alone = declared(tmp_path, imports_its_module)
    assert alone.spec.model_task.function.is_preloaded
    plain = declared(tmp_path, asks)
    pools = [pool_identity(stage.pipeline, stage.spec) for stage in (alone, plain)]
    assert pools[0] != pools[1]


class Mood(BaseModel):
    mood: str = Field(min_length=2)


class ImportsWhenItValidates(BaseModel):
    mood: str

    @field_validator("mood")
    @classmethod
    def known(cls, mood: str) -> str:
        from support.prompts import TEXTS

        return TEXTS[0]


def test_a_pydantic_model_shares_the_workers_of_other_formats_if_it_travels_by_value(tmp_path):
    formats = [None, ["good", "bad"], Mood, ImportsWhenItValidates]
    stages = [declared(tmp_path, "{text}", return_format=each) for each in formats]
    pools = [pool_identity(stage.pipeline, stage.spec) for stage in stages]
    assert pools[0] == pools[1] == pools[2] != pools[3]
    assert len({stage_definition(stage.pipeline, stage.spec) for stage in stages}) == 4
    one, other = (pickle.loads(pickle.dumps(stages[2].spec.model_task.format)) for _ in range(2))
    assert one.model is other.model
    assert one.value(Answer('{"mood": "fine"}')) == {"mood": "fine"}
    with pytest.raises(InvalidAnswer, match="at least 2 characters"):
        one.value(Answer('{"mood": "x"}'))


def test_an_edit_of_a_cell_that_the_code_calls_reaches_workers(monkeypatch):
    """Also if the stage is not declared again, and in a worker that has run another edit."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(_CELLS, vars(main))
    stage = main.p["s"]
    for number in (1, 2, 1):
        exec(f"def number(): return {number}", vars(main))
        assert stage.spec.worker_code(main.p)  # a plan
        task = pickle.loads(pickle.dumps(stage.spec.model_task))
        assert task.function.prompt({}) == (str(number), {})
        assert task.format.value(Answer('{"n": 0}')) == {"n": number}


_CELLS = """
import pydantic
import vane_dagster as vd
def number(): return 0
def ask(row): return str(number())
class Answer(pydantic.BaseModel):
    n: int
    @pydantic.field_validator("n")
    @classmethod
    def counted(cls, n): return n + number()
p = vd.Pipeline("p", source=vd.parquet("/data"), id="id")
p.prompt("s", ask, columns=["id"], provider="openai", model="m", return_format=Answer)
"""
