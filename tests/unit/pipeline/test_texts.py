"""Arguments and code as texts for people: bounded, without secrets, the same each time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pydantic import SecretStr

from vane_dagster._secrets import keep
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.pipeline.texts import texts_of

API_KEY = "planted-by-name"
HEADERS = {"Authorization": "planted-in-a-dict", "retries": 3}
os_environ: dict[str, str] = {}


class Outer:
    class Inner:
        pass


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def called(batch: Any, api_key: str = "planted-by-default", page: int = 7) -> Any:
    os_environ["OPENAI_API_KEY"] = f"planted-{page}"
    token = """planted
    in lines"""
    return batch, API_KEY, HEADERS, functools.partial(text, password="planted", page="é"), token


def text(value: Any) -> str:
    return texts_of({"value": value})["value"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, "1"),
        ("two\nlines", "two\nlines"),
        ({"a": [1, "b"], "c": ()}, "a:\n  - 1\n  - 'b'\nc: ()"),
        ({"api_key": 1, "api_key_env": "KEY"}, "api_key: ***\napi_key_env: 'KEY'"),
        ([SecretStr("x"), {"auth": {"user": "u"}}], "- ***\n-\n  auth: ***"),
        ({"prompt": "a\nb"}, "prompt:\n  a\n  b"),
        ({*"cab"}, "- 'a'\n- 'b'\n- 'c'"),
        (Unshown(), "<Unshown>"),
        (functools.partial(text), "functools.partial(<function text>)"),
        (Unshown, "<class 'Unshown'>"),
        ([Outer.Inner, Outer()], "- <class 'Inner'>\n- <Outer object>"),
    ],
)
def test_values_have_a_line_for_each_item(value: Any, shown: str) -> None:
    assert text(value) == shown


def test_texts_are_short() -> None:
    endless: list[Any] = []
    endless.append(endless)

    assert len(text([*range(100_000)]).splitlines()) == 10_000
    assert len(text("x" * 5_000_000)) == 1_000_000
    assert len(text([b"x" * 5_000_000])) < 11_000
    assert len(text(endless)) < 1_000


def test_a_secret_of_several_lines_is_masked_as_a_whole() -> None:
    secret = "\n".join(f"planted line {n}" for n in range(10))
    keep([secret])
    assert text({"pem": secret, "more": f"a {secret} b"}) == "pem: ***\nmore: a *** b"


def test_lines_with_literals_under_names_of_secrets_are_masked_in_code() -> None:
    (code,) = code_identity(called).texts().values()

    assert "planted" not in code
    assert code.splitlines().count("***") == 7
    assert "os_environ" in code
