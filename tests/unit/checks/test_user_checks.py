"""A user's own subclass of `vd.checks.Check`: its name, evaluation and definition."""

from __future__ import annotations

import importlib
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from vane_dagster.engine.check_runner import ManifestContext, evaluate, results_for
from vane_dagster.storage.manifest import CheckResult, Manifest


@dataclass(frozen=True)
class LongTexts(vd.checks.Check):
    """Few texts are long. More follows."""

    column: str

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        return vd.checks.CheckOutcome(True)


@dataclass(frozen=True)
class Returns(vd.checks.Check):
    value: Any = field(default=None, hash=False)

    def evaluate(self, context: vd.checks.CheckContext) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value(context) if callable(self.value) else self.value


def stored(**columns: Any) -> ManifestContext:
    """A partition in memory, as one that an earlier release has written without statistics."""
    table = pa.table({"id": range(len(next(iter(columns.values())))), **columns})

    def dataset() -> Any:
        import pyarrow.dataset as ds

        return ds.dataset(table)

    manifest = Manifest(
        "p", "s", "b", 0, "", "", table.schema, (), (), (), {}, "run", 0.0, keys=("id",)
    )
    return ManifestContext(manifest, "id", dataset)


def result(value: Any, **kwargs: Any) -> CheckResult:
    (found,) = evaluate([Returns(value, **kwargs)], stored(x=[1]))
    return found


def test_the_example_of_the_documentation_works():
    text = textwrap.dedent((vd.checks.__doc__ or "").split("::\n")[1].split("docs.map_batches")[0])
    scope: dict[str, Any] = {"__name__": __name__}
    exec(text, scope)
    check = scope["LongTexts"]("text", max_characters=8)
    (found,) = evaluate([check], stored(text=["a" * 9, "b", None]))
    assert (found.passed, found.description) == (False, "1 of 3 texts are too long")


def test_a_check_has_the_name_and_the_description_of_its_class():
    assert LongTexts("text").name == "long_texts"
    assert LongTexts("text", name="other").name == "other"
    assert LongTexts("text").description == "Few texts are long. More follows"
    assert Returns().description == "returns", "what dataclasses writes is not a description"
    assert LongTexts("text", blocking=True, severity="WARN").severity == "ERROR"
    with pytest.raises(vd.errors.DefinitionError, match="name is 'a b'"):
        LongTexts("text", name="a b")


class WithoutText(Exception):
    def __str__(self) -> str:
        raise KeyError("inside")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (WithoutText(), "WithoutText"),
        (SystemExit(3), "SystemExit: 3"),
        (True, "expected evaluate to return vd.checks.CheckOutcome"),
        # Wrong types are what is refused.
        (vd.checks.CheckOutcome(None), "expected evaluate to return"),  # type: ignore[arg-type]  # refused
        (vd.checks.CheckOutcome(True, severity="BAD"), "severity is 'BAD'"),  # type: ignore[arg-type]  # refused
        (vd.checks.CheckOutcome(True, metadata={"a": [object()]}), "metadata has a object"),
        (lambda context: context.previous(), "set compares = True in its class"),
        (lambda context: context.recomputed(), "define rows_to_recompute"),
        (lambda context: context.batches(["y"]), "the stage has no column 'y'"),
    ],
)
def test_what_is_wrong_in_a_check_fails_the_check(value: Any, error: str):
    found = result(value)
    assert not found.passed
    assert error in found.description
    assert error in found.metadata["error"]
    assert found.definition == "", "it is evaluated again"


def test_values_of_numpy_and_numbers_without_json_are_stored():
    metadata = {"n": np.int64(3), "share": np.float32(0.5), "nan": math.nan, "rows": [{"id": 1}]}
    # NumPy's booleans are accepted, but not declared.
    found = result(vd.checks.CheckOutcome(np.bool_(True), "fine", metadata))  # type: ignore[arg-type]  # numpy bool
    assert found.passed is True
    assert found.metadata == {"n": 3, "share": 0.5, "nan": "nan", "rows": [{"id": 1}]}
    assert [type(value) for value in found.metadata.values()] == [int, float, str, list]
    warned = vd.checks.CheckOutcome(False, severity="WARN")
    assert [result(warned, blocking=each).severity for each in (False, True)] == ["WARN", "ERROR"]


def test_a_context_has_rows_statistics_and_the_previous_partition():
    context = stored(x=[1, None, 3], text=["a", "", None])
    assert context.partition == "b"
    assert [batch.to_pydict() for batch in context.batches(["text"])] == [{"text": ["a", "", None]}]
    assert context.lookup(pa.array([2]), ["x"]).to_pydict() == {"id": [2], "x": [3]}
    assert [b.num_rows for b in context.sample(["x", "text"], 2)] == [2]
    assert context.keys == ("id",)

    @dataclass(frozen=True)
    class Compares(Returns):
        compares = True

    previous: list[Any] = []

    def look(given: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        previous.append(given.previous())
        return vd.checks.CheckOutcome(True)

    evaluate([Compares(look)], replace(context, find_previous=lambda: context))
    assert previous == [context]


def test_rows_of_large_files_that_a_check_selects_have_their_nested_lists(tmp_path):
    """A file is read in batches that are slices, from which Arrow's selections are wrong."""
    import pyarrow.dataset as ds

    nested = pa.array([[[n], [n]] for n in range(20_000)], pa.list_(pa.list_(pa.int32(), 1), 2))
    path = str(tmp_path / "rows.parquet")
    context = stored(x=nested)
    pq.write_table(context.dataset().to_table(), path)
    context = replace(context, dataset=lambda: ds.dataset(path))
    some = pa.array([3, 9_000, 17_000])
    assert context.lookup(some, ["x"])["x"].to_pylist() == [[[n], [n]] for n in some.to_pylist()]
    where = pc.field("id") > 19_997
    found = [row for batch in context.batches(["x"], where) for row in batch["x"].to_pylist()]
    assert found == [[[n], [n]] for n in (19_998, 19_999)]
    for batch in context.sample(["id", "x"], 100):
        assert [x[0][0] for x in batch["x"].to_pylist()] == batch["id"].to_pylist()


MODULE = """
from dataclasses import dataclass
import vane_dagster as vd
LIMIT = 3

def far(value):
    return value > LIMIT

@dataclass(frozen=True)
class Far(vd.checks.Check):
    column: str = "x"

    def evaluate(self, context):
        return vd.checks.CheckOutcome(far(4))

class Lenient(vd.checks.NullRate):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module with some text anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = iter(range(100))

    def load(text: str) -> Any:
        (tmp_path / "their_checks.py").write_text(f"{text}{' ' * next(count)}")
        sys.modules.pop("their_checks", None)
        importlib.invalidate_caches()
        return importlib.import_module("their_checks")

    yield load
    sys.modules.pop("their_checks", None)


def test_a_definition_follows_the_code_and_the_fields(module: Any):
    before = module(MODULE).Far().definition
    assert len(before) == 16
    assert int(before, 16) >= 0
    assert module(MODULE + "# a comment").Far().definition == before
    for edited in (
        MODULE.replace("far(4)", "far(5)"),
        MODULE.replace("LIMIT = 3", "LIMIT = 2"),
        MODULE.replace("value > LIMIT", "value >= LIMIT"),
    ):
        assert module(edited).Far().definition != before
    context = stored(x=[1])
    check = module(MODULE).Far()
    manifest = replace(context.manifest, checks=evaluate([check], context))
    assert results_for([check], manifest)["far"].passed
    edited = module(MODULE.replace("far(4)", "far(1)")).Far()
    assert results_for([edited], manifest) == {}, "a stored result counts until an edit"
    assert not evaluate([edited], context)[0].passed
    far = module(MODULE).Far
    others = [far("y"), far(name="other"), far(blocking=True), far(severity="WARN")]
    assert len({before, *(check.definition for check in others)}) == 5


def test_a_subclass_of_a_built_in_check_has_a_definition_of_its_own(module: Any):
    lenient = module(MODULE).Lenient
    assert lenient().definition != vd.checks.NullRate().definition
    assert lenient(0.1).definition != lenient(0.2).definition
    assert not lenient().is_built_in
    assert vd.checks.NullRate().is_built_in


def test_a_check_without_a_rule_is_refused_where_it_is_made():
    with pytest.raises(TypeError, match=r"abstract method '?evaluate"):
        type("Empty", (vd.checks.Check,), {})()
