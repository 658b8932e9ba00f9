"""Arguments that functions do not take, or that need a name, each with what to write."""

from __future__ import annotations

import inspect

import pytest

import vane_dagster as vd
from vane_dagster._keywords import known_keywords, require_columns

OPEN = {"cls", "huggingface"}
"""Functions with further arguments: values of any number, or options of another library."""
NAMED = [name for name in vd.__all__ if inspect.isfunction(getattr(vd, name)) and name not in OPEN]


@pytest.mark.parametrize("name", NAMED)
def test_every_public_function_names_what_it_takes(name):
    function = getattr(vd, name)
    taken = list(inspect.signature(function).parameters)
    for argument in taken:
        wrong = {f"{argument}x": 1}
        expected = rf"unknown argument '{argument}x' of vd\.{name}\. Did you mean .*'{argument}'"
        with pytest.raises(vd.errors.DefinitionError, match=expected):
            function(**wrong)
    with pytest.raises(
        vd.errors.DefinitionError, match=rf"^vd\.{name}: too many positional arguments\. It takes "
    ):
        function(*range(len(taken) + 1))


def test_a_checked_function_stays_what_it_is():
    @known_keywords("g")
    def g() -> None:
        """Takes nothing."""

    assert (g.__doc__, g.__name__) == ("Takes nothing.", "g")
    with pytest.raises(vd.errors.DefinitionError, match=r"^g: too many .* takes none"):
        g(1)


def test_arguments_without_a_name():
    docs = vd.Pipeline("docs", source=vd.parquet("x"), id="id")
    schema = {"y": "BIGINT"}
    for add in (docs.map, docs.map_batches):
        expected = "stage 'docs/m': map.*: too many pos.* takes 'name', 'fn', 'schema'"
        with pytest.raises(vd.errors.DefinitionError, match=expected):
            add("m", len, schema)
    stage = docs.project("p", ["x"])
    for call, expected in (
        (lambda: stage.preview(limit=3), "unknown argument 'limit' of Stage.preview: its options"),
        (lambda: stage.preview(row=3), "Did you mean 'rows'"),
        (lambda: stage.preview(3, "day"), "too many .* takes 'rows', 'partition'"),
        (lambda: vd.Pipeline("docs", vd.parquet("x")), "vd.Pipeline: too many .* takes 'name'"),
        (lambda: vd.row_id(nam="b"), "of vd.row_id. Did you mean 'name'"),
    ):
        with pytest.raises(vd.errors.DefinitionError, match=expected):
            call()


@pytest.mark.parametrize(
    ("wanted", "columns", "text"),
    [
        (["txt"], ["id", "text"], "it has 'id', 'text'. Did you mean 'text'? Fix it"),
        (["text"], ["ID", "TEXT"], "it has 'ID', 'TEXT'. Did you mean 'TEXT'? Fix it"),
        (["id", "x", "y"], ["id"], "'docs' has no column 'x', 'y'; it has 'id'. Fix it"),
        (["x"], [f"c{n}" for n in range(30)], "'c18', 'c19' and 10 more. Fix it"),
        (["x"], [], "it has none. Fix it"),
    ],
)
def test_an_unknown_column_is_reported_with_those_that_exist(wanted, columns, text):
    with pytest.raises(vd.errors.SchemaError) as raised:
        require_columns("'docs'", wanted, columns, fix="Fix it")
    assert str(raised.value).endswith(text)
    require_columns("'docs'", columns, columns)


@pytest.mark.parametrize(
    ("extra", "declare"),
    [
        ("delta", lambda: vd.delta("/data")),
        ("huggingface", lambda: vd.huggingface("name")),
        ("iceberg", lambda: vd.iceberg("prod", "db.events")),
        ("images", lambda: vd.images("/data")),
        ("lance", lambda: vd.lance("/data")),
        *((each, lambda each=each: written(each)) for each in ("delta", "lance")),
    ],
)
def test_an_extra_that_is_not_installed(extra, declare, monkeypatch):
    monkeypatch.setattr("vane_dagster._arguments.find_spec", lambda name: None)
    with pytest.raises(vd.errors.DefinitionError, match=rf"Install vane-dagster\[{extra}\]"):
        declare()


def written(format: str) -> None:
    docs = vd.Pipeline("docs", source=vd.parquet("/data"), id="id")
    docs.project("clean", ["n"]).write("out", "/out", format=format)
