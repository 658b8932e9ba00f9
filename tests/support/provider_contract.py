"""The contract of a provider: tests over the fixture `offered`, computed by real workers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage
from support.in_process import committed, compute
from support.llm_server import Server
from support.prompts import docs
from vane_dagster.events import Event
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.providers.usage import COUNTS, USAGE
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

Arguments = Mapping[str, Any]

TEXTS = ["a fox", "the dog and the fox", "12, 34", "yes or no", "a fox", "nothing at all", "a dog"]
SECRET = "sk-planted-key"
REQUESTS: Mapping[str, Sequence[Arguments]] = {
    "prompt": [
        {"system": "Be brief."},
        {"sampling_params": {"temperature": 0.5}},
        {"sampling_params": {"temperature": "{text}"}},
        {"return_format": ["yes", "no"]},
        {"return_format": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        {"explain_errors": 1},
    ],
    "embed": [{"dimensions": 2}],
}
"""Arguments that change what a model is asked, or what becomes of its answer."""
OPERATIONAL: Sequence[Arguments] = [
    {"batch_size": 7},
    {"max_concurrency": 2},
    {"concurrency": (1, 3)},
    {"num_cpus": 1},
    {"gpus": 1},
    {"execution_backend": "subprocess_actor"},
    {"env_vars": ["ANOTHER"]},
    {"max_retries": 1},
    {"timeout_s": 9},
    {"max_batches": 9},
]
"""Arguments that change how it is computed."""


@dataclass(frozen=True)
class Offered:
    """A provider, and what its tests know about it.

    Attributes:
        backend: The workers.
        method: The stage's method: "prompt" or "embed".
        arguments: Arguments of the stage, such as the provider.
        expected: Returns what the model makes of each text alone: an answer or a vector.
        bad: Texts that are row errors, with patterns of their messages.
        broken: Arguments with which the stage fails, with part of the message.
        refused: Arguments that are refused at declaration, with part of the message.
        keyed: Values of all options that may change answers.
        server: The endpoint; None for a model in the worker.
    """

    backend: Any
    method: str
    arguments: Arguments
    expected: Callable[[Sequence[str]], Any]
    bad: Mapping[str | None, str]
    broken: Sequence[tuple[Arguments, str]] = ()
    refused: Sequence[tuple[Arguments, str]] = ()
    keyed: Arguments = field(default_factory=dict)
    server: Server | None = None

    def declare(self, pipeline: vd.Pipeline, **arguments: Any) -> vd.Stage:
        given = _merged(self.arguments, arguments)
        stage: vd.Stage = getattr(pipeline, self.method)("made", "text", **grouped(given))
        return stage

    def compute(
        self, folder: Path, texts: Sequence[str | None], fragment_rows: int = 100, **arguments: Any
    ) -> tuple[pa.Table, list[Event]]:
        """Return the rows that a stage makes of texts, and the events of the run."""
        pipeline = docs(folder, list(texts))
        pipeline.fragment_rows = fragment_rows
        stage = self.declare(pipeline, **arguments)
        events = compute(pipeline, Store(StoragePath(str(folder / "store"))), backend=self.backend)
        rows = read_stage(folder / "store", "docs", "made")
        made = list(stage.spec.schema)
        kept = [rows.schema.field(each.name) for each in made]
        assert [each.type for each in kept] == [each.type for each in made], "as declared"
        return rows, events

    def agree(self, rows: pa.Table, texts: Sequence[str]) -> None:
        found = rows[self.column].to_pylist()
        expected = self.expected(texts)
        if isinstance(expected[0], str):
            assert [text.rstrip("\ufffd") for text in found] == expected
        else:
            assert np.allclose(found, expected, atol=1e-4)

    @property
    def column(self) -> str:
        return str(self.arguments.get("output_column", "made"))


def quarantined(folder: Path) -> list[dict[str, Any]]:
    found = vd.quarantine("docs/made", store=str(folder / "store")).sort_by("id")
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def test_each_row_has_its_own_result_and_usage_in_the_order_of_the_rows(offered, tmp_path):
    rows, events = offered.compute(tmp_path, TEXTS, batch_size=3, include_columns=["text"])
    own = [offered.column, *(["made_usage"] if offered.method == "prompt" else [])]
    assert rows.schema.names == ["id", "text", *own]
    assert rows["id"].to_pylist() == list(range(len(TEXTS)))
    assert rows["text"].to_pylist() == TEXTS
    offered.agree(rows, TEXTS)
    if offered.method != "prompt":
        return
    assert rows.schema.field("made_usage").type == USAGE
    usage = rows["made_usage"].to_pylist()
    assert {each["requests"] for each in usage} == {1}
    assert all(each["prompt_tokens"] >= len(text.split()) for each, text in zip(usage, TEXTS))
    assert all(0 <= each["cached_tokens"] <= each["prompt_tokens"] for each in usage)
    assert all(each["completion_tokens"] >= 0 and each["seconds"] >= 0 for each in usage)
    assert {each["finish_reason"] for each in usage} <= {"stop", "length"}
    (one,) = committed(events, "made")
    (part,) = one.manifest.parts
    sums = {name: sum(each[name] for each in usage) for name in COUNTS}
    assert part.measures["made_usage"] == {"nulls": 0, **sums}


@pytest.mark.parametrize(("on_error", "size"), [("quarantine", 64), ("null", 1)])
def test_a_row_that_fails_costs_no_other(offered, tmp_path, on_error, size):
    texts = ["a fox", *offered.bad, "yes or no", "a dog"]
    rows, _ = offered.compute(
        tmp_path, texts, batch_size=size, on_error=on_error, max_error_rate=0.9
    )
    bad = range(1, 1 + len(offered.bad))
    good = [place for place in range(len(texts)) if place not in bad]
    if on_error == "quarantine":
        failed = quarantined(tmp_path)
        assert [each["id"] for each in failed] == list(bad)
        messages = [f"{each['error']}: {each['message']}" for each in failed]
        assert rows["id"].to_pylist() == good
    else:
        failed = rows.take(list(bad)).to_pylist()
        assert all(each.pop("id") and each.pop("error") for each in failed)
        assert {value for each in failed for value in each.values()} == {None}
        messages = rows["error"].to_pylist()[bad.start : bad.stop]
        rows = rows.take(good)
        assert rows["error"].null_count == len(good)
    for pattern, message in zip(offered.bad.values(), messages):
        assert re.search(pattern, message)
    offered.agree(rows, [texts[place] for place in good])


def test_an_error_of_no_row_fails_the_stage_whatever_on_error(offered, tmp_path):
    for arguments, message in offered.broken:
        with pytest.raises(vd.errors.VaneError, match=re.escape(message)) as raised:
            offered.compute(tmp_path, TEXTS, on_error="quarantine", max_error_rate=1.0, **arguments)
        model = offered.declare(docs(tmp_path), **arguments).spec.udf.name
        assert any(place in str(raised.value) for place in ("stage 'docs/made'", model))
        assert SECRET not in str(raised.value)
        assert not offered.server or not offered.server.requests


def test_arguments_are_refused_at_declaration(offered, tmp_path):
    pipeline = docs(tmp_path)
    provider = offered.declare(docs(tmp_path)).spec.provider
    wrong = [({"model": ""}, "model is ''; expected a model's name"), *offered.refused]
    if not _takes_any(provider):
        wrong.append(
            ({"options": {"adress": "x"}}, "unknown argument 'adress' of vd.Model(options")
        )
    for arguments, message in wrong:
        with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)) as raised:
            offered.declare(pipeline, **arguments)
        assert "stage 'docs/made'" in str(raised.value)
        assert SECRET not in str(raised.value)


def test_the_definition_has_what_may_change_results_and_nothing_else(offered, tmp_path):
    def identities(arguments: Arguments) -> tuple[str, str]:
        pipeline = docs(tmp_path)
        spec = offered.declare(pipeline, **arguments).spec
        return stage_definition(pipeline, spec), pool_identity(pipeline, spec)

    provider = offered.declare(docs(tmp_path)).spec.provider
    declared = getattr(provider, "OPERATIONAL", ())
    takes = set(inspect.signature(provider).parameters) - {"model", "server", "options"}
    known = {name.partition(".")[0] for name in declared} | set(offered.keyed)
    assert takes <= known, "a value of each option is tested"

    assert identities({"model": Path("a/b")}) == identities({"model": "a/b"})
    base, pool = identities({})
    for arguments in ({}, *OPERATIONAL, *({"options": _nested(name)} for name in declared)):
        assert identities(arguments)[0] == base, arguments
    options = [{"options": {name: value}} for name, value in offered.keyed.items()]
    models = [{"model": "another"}, *options]
    others = [{"output_column": "o"}, {"include_columns": ["text"]}, {"on_error": "null"}]
    if offered.method == "embed":
        others.append({"normalize": not offered.arguments["normalize"]})
    every = [*models, *REQUESTS[offered.method], *others]
    found = {identities(arguments)[0]: arguments for arguments in every}
    assert base not in found, found[base]
    assert len(found) == len(every)

    for arguments in models:
        assert identities(arguments)[1] != pool, arguments
    for arguments in (*REQUESTS[offered.method], *others, {"batch_size": 7}):
        assert identities(arguments)[1] == pool, f"{arguments}: stages share a model"


def _merged(given: Arguments, others: Arguments) -> dict[str, Any]:
    both = {
        name: _merged(given[name], value)
        if isinstance(value, Mapping) and isinstance(given.get(name), Mapping)
        else value
        for name, value in others.items()
    }
    return {**given, **both}


def _nested(name: str) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: 1} if inner else 1}


def _takes_any(provider: type) -> bool:
    parameters = inspect.signature(provider).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


__all__ = [name for name in dir() if name.startswith("test_")]
