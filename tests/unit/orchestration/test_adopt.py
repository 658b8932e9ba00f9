"""Edits that change no result are adopted after a comparison; others are not."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import partitioned, read_stage, write_source
from support.in_process import InProcess, InProcessCompute
from support.promotions import promote
from support.prompts import docs
from vane_dagster.cli.definitions import Definitions
from vane_dagster.cli.main import main
from vane_dagster.errors import DefinitionError, PlanError
from vane_dagster.providers.base import Answer, Request

KEYS = ["a", "b", "c"]


class Power:
    def __init__(self, exponent: int) -> None:
        self.exponent = exponent

    def __call__(self, batch: Any) -> Any:
        return {"y": [float(x**self.exponent) for x in batch["x"].to_pylist()]}


class Product(Power):
    def __call__(self, batch: Any) -> Any:
        return {"y": [float(x * x) for x in batch["x"].to_pylist()]}


class Almost(Power):
    def __call__(self, batch: Any) -> Any:
        return {"y": [x * x + (x == 5) / 8 for x in batch["x"].to_pylist()]}


class Slightly(Power):
    def __call__(self, batch: Any) -> Any:
        return {"y": [x * x * (1 + 1e-7) for x in batch["x"].to_pylist()]}


class OfSmall(Power):
    """Differs for numbers from 100 to 199."""

    def __call__(self, batch: Any) -> Any:
        return {"y": [-1.0 if x // 100 == 1 else x * x for x in batch["x"].to_pylist()]}


class Fails(Power):
    def __call__(self, batch: Any) -> Any:
        raise ValueError("no such weights")


class Twice:
    def __init__(self, by: str) -> None:
        self.by = by

    def __call__(self, batch: Any) -> Any:
        return {"z": [2 * y for y in batch["y"].to_pylist()]}


class Picky(Power):
    def __call__(self, batch: Any) -> Any:
        if any(x % 7 == 3 for x in batch["x"].to_pylist()):
            raise ValueError("three")
        return super().__call__(batch)


def numbers(
    tmp_path: Path, fn: Any = Power, exponent: int = 2, kind: str = "DOUBLE", **options: Any
) -> vd.Pipeline:
    for day, key in enumerate(KEYS):
        rows = range(10 * day, 10 * day + 10)
        write_source(tmp_path / "src" / key, {"id": rows, "x": rows})
    made = partitioned(tmp_path / "src", KEYS, "numbers")
    power = made.map_batches(
        "power", fn, schema={"y": kind}, fn_constructor_kwargs={"exponent": exponent}, **options
    )
    power.project("last", ["id", "y"])
    return made


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Workers in this process, and a store with the results of `Power` for all partitions."""
    made = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    numbers(tmp_path).run(**made)
    return made


@pytest.fixture
def stored(given: dict[str, Any]) -> str:
    store: str = given["store"]
    return store


def test_an_adopted_edit_computes_nothing_and_neither_does_what_reads_it(tmp_path, stored, given):
    edited = numbers(tmp_path, Product)
    assert [s.up_to_date for s in edited.plan(store=stored).stages] == [0, 0]
    adoption = edited["power"].adopt(**given)
    assert (adoption.rows, adoption.partitions) == (30, 3)
    assert "no stored row differs" in str(adoption)

    found = edited.plan(store=stored)
    assert found.is_up_to_date
    assert "code of Product, code of Power, adopted on" in found.stages[0].adopted[0]
    assert numbers(tmp_path).plan(store=stored).is_up_to_date, "the former code too"

    write_source(tmp_path / "src" / "a", {"id": [100], "x": [100]}, "more.parquet")
    assert edited.plan("a", store=stored).stages[0].fragments == 1
    edited.run("a", **given)
    assert read_stage(tmp_path / "store", "numbers", "power", "a")["y"].to_pylist()[-1] == 10_000


class LastFirst(InProcessCompute):
    def backend(self) -> Any:
        return InProcess(lambda count: count - 1)


def test_an_edit_is_compared_with_converted_rows_that_were_collected(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.csv").write_text("id,x\n1,2\n2,3\n")
    given: dict[str, Any] = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}

    def made(fn: Any) -> vd.Pipeline:
        texts = vd.Pipeline("texts", source=vd.csv(str(tmp_path / "src")), id="id")
        arguments = {"exponent": 2}
        texts.map_batches("power", fn, schema={"y": "DOUBLE"}, fn_constructor_kwargs=arguments)
        return texts

    made(Power).run(**given)
    shutil.rmtree(tmp_path / "store/~tables")
    assert made(Product)["power"].adopt(**given).rows == 2


def test_partitions_may_be_compared_in_any_order(tmp_path):
    """Also those whose checks compare them with the partition before."""
    store, drift = str(tmp_path / "store"), vd.checks.Drift("y", max_psi=1e9)

    def made(fn: type) -> vd.Pipeline:
        partitions = dg.StaticPartitionsDefinition(KEYS)
        rows = [{"id": n, "x": n, "part": key} for n, key in enumerate(KEYS * 4)]
        source = vd.table(rows, partition_column="part")
        pipeline = vd.Pipeline("p", source=source, id="id", partitions_def=partitions)
        given = {"schema": {"y": "DOUBLE"}, "columns": ["x"], "asset": vd.Asset(checks=[drift])}
        pipeline.map_batches("power", fn, fn_constructor_args=(2,), **given)
        return pipeline

    made(Power).run(store=store, compute=InProcessCompute())
    assert made(Product)["power"].adopt(store=store, compute=LastFirst()).rows == 12


def test_a_fix_of_failed_rows_is_adopted_and_a_retry_computes_them_alone(tmp_path):
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    options = {"on_error": vd.Failures("quarantine", max_error_rate=0.5), "columns": ["x"]}
    numbers(tmp_path, Picky, **options).run(**given)
    fixed = numbers(tmp_path, Power, **options)
    failed = vd.quarantine(fixed["power"], store=given["store"])["id"].to_pylist()
    assert failed == [3, 10, 17, 24]
    assert fixed["power"].adopt(**given).rows == 26
    assert fixed.plan(store=given["store"]).is_up_to_date
    retry = fixed.plan(store=given["store"], select="power", retry_quarantined=True, rows=True)
    assert [(s.rows, s.copied) for s in retry.stages] == [(4, 26)]
    fixed.run(**given, retry_quarantined=True)
    assert vd.quarantine(fixed["power"], store=given["store"]).num_rows == 0
    assert vd.load(fixed["power"], store=given["store"]).num_rows == 30


def test_what_changes_results_is_not_adopted(tmp_path, stored):
    for edit, message in (
        (
            {"fn": Almost},
            r"1 of 30 rows differ from the stored rows: ids 5, in 'y':\n  5, y: 25.0 is stored",
        ),
        ({"exponent": 3}, "28 of 30 rows differ"),
        ({"fn": Fails}, "no such weights"),
        ({"kind": "FLOAT"}, "option 'schema' changed. Only edits of code"),
        ({"on_error": "null"}, "option 'on_error' changed"),
        ({}, "all stored partitions have the current definition"),
    ):
        edited = numbers(tmp_path, **edit)
        before = edited.plan(store=stored).to_dict()
        with pytest.raises(vd.errors.VaneError, match=message):
            edited["power"].adopt(store=stored, compute=InProcessCompute())
        assert edited.plan(store=stored).to_dict() == before
    assert numbers(tmp_path).plan(store=stored).is_up_to_date


class Echo:
    """Answers with the question in upper case, and with the time."""

    varies = False

    def __init__(self, model: str) -> None:
        pass

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"].split()[-1].upper()
        return Answer(f"{text}{time.perf_counter_ns() if Echo.varies else ''}", 1, 1)


def test_an_edit_of_a_prompt_is_adopted(tmp_path, monkeypatch):
    """After a comparison of its answers without their usage, or on the user's word."""
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}

    def made(system: str = "Ansser.", texts: Any = ("a", "b"), **options: Any) -> vd.Pipeline:
        pipeline = docs(tmp_path, [*texts])
        options = {"messages": "say {text}", "model": "m", "provider": Echo} | options
        pipeline.prompt("asked", system=system, **options)
        return pipeline

    made().run(**given)
    renamed = {"model": "m-2026-01", "messages": "please say {text}"}
    for edit in ({}, renamed, {"sampling_params": {"temperature": 0}}):
        edited = made("Answer.", **edit)
        assert "asked: adopted " in str(adoption := edited["asked"].adopt(**given))
        assert adoption.is_all
        assert edited.plan(store=given["store"]).is_up_to_date
    monkeypatch.setattr(Echo, "varies", True)
    edited = made("Answer!")
    with pytest.raises(PlanError, match="adopt the edit without a comparison: --sample 0"):
        edited["asked"].adopt(**given)
    adoption = edited["asked"].adopt(0, **given)
    assert str(adoption) == "asked: adopted option 'messages' without a comparison"
    assert "without a comparison" in edited.plan(store=given["store"]).stages[0].adopted[-1]
    (note,) = vd.trace(edited["asked"], 1, store=given["store"]).steps[-1].notes
    assert re.fullmatch(r"asked: option 'messages', adopted on .* a comparison; and 3 more", note)
    later = made("Answer!", ("a", "b", "c"))
    assert later.plan(store=given["store"], rows=True).stages[0].copied == 2
    for edit, message in (
        ({"return_format": {"type": "integer"}}, "its types changed"),
        ({"output_column": "said"}, "option 'output_column' changed. Only edits of code"),
        ({"messages": lambda row: "say a"}, "option 'columns' changed"),
    ):
        with pytest.raises(PlanError, match=message):
            made(**edit)["asked"].adopt(0, **given)


def test_what_is_adopted_only_so(tmp_path, stored, given):
    """Small differences with a tolerance; an argument; and before a run of the edited code."""
    slightly = numbers(tmp_path, Slightly)
    with pytest.raises(PlanError, match="nothing was adopted"):
        slightly["power"].adopt(**given)
    assert slightly["power"].adopt(**given, tolerance=1e-5).tolerance == 1e-5
    argument = numbers(tmp_path, Product, exponent=7)
    assert argument["power"].adopt(10, **given).rows
    assert argument.plan(store=stored).is_up_to_date

    assert "with 95% confidence at most 0.3 of all rows differ" in str(
        numbers(tmp_path, Product)["power"].adopt(10, **given, partitions=["a", "b"])
    )
    cube = numbers(tmp_path, exponent=3)
    cube.run("c", **given)
    with pytest.raises(PlanError, match="10 of 10 rows differ"):
        numbers(tmp_path, Almost)["power"].adopt(**given, partitions="c")
    with pytest.raises(
        DefinitionError, match="only stages with a function or a model can be adopted"
    ):
        numbers(tmp_path)["last"].adopt(store=stored)
    with pytest.raises(DefinitionError, match="rows is -1"):
        cube["power"].adopt(-1, store=stored)


def test_a_stage_is_adopted_whether_those_upstream_are_or_not(tmp_path):
    write_source(tmp_path / "src", {"id": range(20), "x": range(20)})
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}

    def chain(fn: Any) -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        options: Any = {"fn_constructor_kwargs": {"exponent": 2}}
        x = docs.map_batches("x", fn, schema={"y": "DOUBLE"}, **options)
        x.map_batches("y", Twice, schema={"z": "DOUBLE"}, fn_constructor_kwargs={"by": fn.__name__})
        return docs

    chain(Power).run(**given)
    edited = chain(Product)
    for stage in ("y", "x"):
        assert edited[stage].adopt(**given).is_all
    assert edited.plan(store=given["store"]).is_up_to_date


def test_what_is_undone_returns_to_the_definition_that_computed_it(
    tmp_path, stored, given, monkeypatch
):
    former, edited, store = numbers(tmp_path), numbers(tmp_path, OfSmall), tmp_path / "store"
    edited["power"].adopt(**given)  # it differs for numbers that are not there yet
    write_source(tmp_path / "src" / "a", {"id": [100], "x": [100]}, "more.parquet")
    edited.run("a", **given)
    assert read_stage(store, "numbers", "power", "a")["y"].to_pylist()[-1] == -1

    monkeypatch.setattr(Definitions, "stage", lambda self, path: edited[path])
    monkeypatch.setattr(Definitions, "resource", lambda self, key: {"store": stored}.get(key))
    shown = CliRunner().invoke(main, ["adopt", "power", "--undo", "-m", "support.data"])
    assert (shown.exit_code, "undone: power" in shown.output) == (0, True), shown.output
    assert "The next run computes what the present code has not" in shown.output
    with pytest.raises(PlanError, match="adopt it again instead, materialize the stage with the f"):
        edited["power"].adopt(store=stored)
    for pipeline, value, missing in ((former, 10_000, 1), (edited, -1, 1), (former, 10_000, 0)):
        found = pipeline.plan("a", store=stored)
        assert [stage.fragments for stage in found.stages] == [missing, missing]
        pipeline.run("a", **given)
        assert read_stage(store, "numbers", "power", "a")["y"].to_pylist()[-1] == value
        assert read_stage(store, "numbers", "last", "a")["y"].to_pylist()[-1] == value
        assert pipeline.plan("a", store=stored).is_up_to_date
    found = former.plan(["b", "c"], store=stored).stages[0]
    assert found.fragments == 0, "what it computed is its own again"
    with pytest.raises(PlanError, match="was not adopted, or its adoption was undone"):
        edited["power"].adopt(undo=True, store=stored)


def test_results_of_runs_that_did_not_know_of_a_split_are_not_compared(tmp_path, stored):
    """It is undone in a branch; meanwhile a run commits rows of both definitions."""
    former, edited = numbers(tmp_path), numbers(tmp_path, OfSmall)
    branch = vd.FragmentStore(root=str(tmp_path / "branch"), fallback=stored)
    compute = InProcessCompute()
    edited["power"].adopt(store=stored, compute=compute)
    write_source(tmp_path / "src" / "b", {"id": [100], "x": [100]}, "more.parquet")
    former.run("b", store=stored, compute=compute)
    edited["power"].adopt(undo=True, store=branch)
    edited.run("a", store=branch, compute=compute)
    write_source(tmp_path / "src" / "b", {"id": [7], "x": [7]}, "most.parquet")
    edited.run("b", store=stored, compute=compute)
    promote(branch, vd.FragmentStore(root=stored), "numbers")
    assert read_stage(tmp_path / "store", "numbers", "power", "b")["y"].to_pylist()[-2] == 10_000
    with pytest.raises(PlanError, match="there is no stored row to compare with"):
        numbers(tmp_path, Product)["power"].adopt(store=stored, partitions="b", compute=compute)
