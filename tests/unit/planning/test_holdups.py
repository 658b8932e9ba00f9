"""Costs of samples, and what would stop a planned run or hold it up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import InProcessCompute
from support.prompts import Reversed
from vane_dagster.errors import VaneError
from vane_dagster.providers.base import Answer, Request


class Slow:
    def __call__(self, batch: Any) -> Any:
        return {"y": batch["x"]}


@dataclass(frozen=True)
class Below(vd.checks.Check):
    limit: int
    blocking: bool = field(default=True, kw_only=True)

    def evaluate(self, context: Any) -> vd.checks.CheckOutcome:
        most = max(max(batch["x"].to_pylist()) for batch in context.batches(["x"]))
        return vd.checks.CheckOutcome(most < self.limit, f"the largest is {most}")


class Odd:
    def __call__(self, batch: Any) -> Any:
        raise ValueError("no row of it can be computed")


def numbers(tmp_path: Path, fn: Any = Slow, keys: str = "ab", **given: Any) -> vd.Pipeline:
    for key in keys:
        write_source(tmp_path / "src" / key, {"id": range(100), "x": range(100)})
    made = partitioned(tmp_path / "src", keys, "numbers")
    some = made.project("some", {"x": "x"}, asset=vd.Asset(checks=given.pop("checks", [])))
    some.map_batches("slow", fn, schema={"y": "BIGINT"}, **given).project("last", ["y"])
    return made


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_a_sample_measures_what_nothing_stored_says(tmp_path, store):
    given = {"store": store, "compute": InProcessCompute()}
    made = numbers(tmp_path)
    assert made.plan(store=store).seconds is None
    found = made.plan("b", sample=7, **given)
    assert [(each.stage, each.sampled) for each in found.stages] == [
        ("some", 7), ("slow", 7), ("last", 7),
    ]  # fmt: skip
    assert "less than a second, measured on a sample of 7 rows" in str(found)
    assert found.stages[1].load_seconds > 0
    assert found.seconds is not None
    assert files(tmp_path) == []

    made.run("a", select=["some", "slow"], **given)
    before = files(tmp_path)
    found = made.plan("b", sample=7, **given)
    assert [each.sampled for each in found.stages] == [0, 0, 7]
    assert files(tmp_path) == before
    made.run(**given)
    assert made.plan(sample=7, **given).is_up_to_date


class Counting(Reversed):
    """A provider that records what it is asked; the answer is the length of the text."""

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"]
        with open(self.address, "a") as file:
            file.write(f"{text}\n")
        return Answer(str(len(text)), len(text), 1)

    def __init__(self, model: str, *, address: str) -> None:
        super().__init__(model)
        self.address = address


@pytest.mark.parametrize(("passing", "reached"), [("n % 5 = 0", 4), ("n >= 596", 0)])
@pytest.mark.parametrize("reuse", ["rows", "fragments"])
def test_a_sample_asks_nothing_twice(tmp_path, store, passing, reached, reuse):
    write_source(tmp_path / "src", {"id": range(600), "n": range(600)})
    made = vd.Pipeline("tickets", source=vd.parquet(str(tmp_path / "src")), id="id")
    model = vd.Model("m", options={"address": str(tmp_path / "asked")}, prices={"prompt": 1e6})
    given: dict[str, Any] = {"provider": Counting, "model": model, "reuse": reuse}
    made.prompt("label", "label {n}", include_columns=["n"], **given)
    urgent = made["label"].project("urgent", ["n"], where=passing)
    urgent.prompt("summary", "sum up {n}", **given).project("last", ["summary"])
    found = made.plan(store=store, sample=20, compute=InProcessCompute())
    assert [each.sampled for each in found.stages] == [20, 20, reached, reached]
    asked = (tmp_path / "asked").read_text().splitlines()
    label = [each for each in asked if each.startswith("label")]
    again = reuse == "fragments"  # without row keys, the first row is computed for itself
    assert len(label) == 20 + again
    assert set(label) == {f"label {n}" for n in range(20)}
    assert len(asked) - len(label) == (reached + again if reached else 0)
    unreached = "cost: unknown without stored results\n"
    assert str(found).count(unreached) == (0 if reached else 2)
    assert (found.stages[2].cost is None) == (not reached)


class SlowAtFirst(Slow):
    calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        time.sleep(0.5 if self.calls == 1 else 0)
        return super().__call__(batch)


@pytest.mark.parametrize("reuse", ["rows", "fragments"])
def test_the_first_call_which_is_slower_is_not_the_measure(tmp_path, store, reuse):
    columns = {"columns": ["x"]} if reuse == "rows" else {}
    made = numbers(tmp_path, SlowAtFirst, "a", reuse=reuse, **columns)
    found = made.plan(store=store, sample=5, compute=InProcessCompute()).stages[1]
    assert found.sampled == 5
    assert found.worker_seconds[1] < 10, "0.5 s for one of 100 rows"


def test_a_sample_that_fails_is_said(tmp_path, store):
    found = numbers(tmp_path, Odd).plan("a", store=store, sample=5, compute=InProcessCompute())
    assert [each.sampled for each in found.stages] == [5, 0, 0]
    text = " ".join(found.holdups)
    assert text.count("a sample could not be computed: stage 'numbers/slow'") == 1
    assert "no row of it can be computed" in text
    with pytest.raises(vd.errors.DefinitionError, match="sample is 0"):
        numbers(tmp_path).plan("a", store=store, sample=0)


@pytest.mark.parametrize("added", [{"language": "'en'"}, {"big": "y::UBIGINT"}])
def test_a_partition_whose_target_refuses_the_rows_is_not_planned(tmp_path, store, added):
    def published(columns: dict[str, str]) -> vd.Pipeline:
        made = numbers(tmp_path)
        shown = made["last"].project("shown", {"y": "y", **columns})
        shown.write("out", str(tmp_path / "out"), format="delta")
        return made

    given: dict[str, Any] = {"store": store, "compute": InProcessCompute()}
    published({}).run("a", **given)
    edited, (column,) = published(added), added
    (text,) = edited.plan("a", store=store).unplanned.values()
    assert f"stage 'numbers/out': column '{column}' is " in text
    before = files(tmp_path)
    with pytest.raises(VaneError, match=f"'numbers/out': column '{column}'"):
        edited.run("b", **given)
    assert files(tmp_path) == before


def test_failed_blocking_checks_upstream_are_said(tmp_path, store):
    checks = [Below(50, blocking=True)]
    made = numbers(tmp_path, checks=checks)
    with pytest.raises(VaneError, match="blocking checks: 1 failed"):
        made.run("a", select="some", store=store, compute=InProcessCompute())
    (text,) = made.plan(store=store).holdups
    assert text.startswith("blocking check 'below' of 'some', partition 'a' failed: ")
    assert text.endswith(". Its downstream stages will not be committed")
    assert list(made.plan("a", select="slow", store=store).holdups) == [text]
    assert made.plan("b", store=store).holdups == []
    with pytest.raises(VaneError, match="blocking checks: 1 failed"):
        made.run("b", store=store, compute=InProcessCompute())
    stored = made.plan("b", store=store)
    assert [s.fragments for s in stored.stages[1:]] == [0, 0]
    assert list(stored.holdups) == [text.replace("'a'", "'b'")], "parts that are not committed"
    lowered = numbers(tmp_path, checks=[Below(500, blocking=True)])
    (text,) = lowered.plan("a", store=store).holdups
    assert text == (
        "the blocking check 'below' of 'some', partition 'a' has no stored result; the run "
        "evaluates it"
    )


def test_a_blocking_check_that_was_added_is_said_of_stages_that_are_up_to_date(tmp_path, store):
    numbers(tmp_path).run(store=store, compute=InProcessCompute())
    found = numbers(tmp_path, checks=[Below(50, blocking=True)]).plan(store=store)
    assert found.is_up_to_date
    (text,) = found.holdups
    assert text.startswith("2 partitions (a, b), the first: the blocking check 'below' of 'some'")
    assert numbers(tmp_path, checks=[Below(50, blocking=False)]).plan(store=store).holdups == []


def test_pools_that_do_not_fit_are_said(tmp_path, store):
    made = numbers(tmp_path, gpus=3)
    assert made.plan(store=store).holdups == []  # nothing is known of the compute resource
    (text,) = made.plan(store=store, compute=vd.LocalCompute(num_gpus=1)).holdups
    assert "slow" in text
    assert "3 GPU" in text


def test_a_cluster_that_does_not_run_is_not_started(tmp_path, store, monkeypatch):
    monkeypatch.setattr("vane_dagster.compute.local_head.LocalHead.ensure", None)
    made = numbers(tmp_path, gpus=3)
    compute = vd.RayCompute(cluster=vd.LocalCluster(name="never-started"))
    assert made.plan(store=store, compute=compute).holdups == []


def test_budgets_that_the_run_may_use_up_are_said(tmp_path, store):
    def asking(question: str, **budgets: Any) -> vd.Pipeline:
        write_source(tmp_path / "src", {"id": range(3), "text": ["one", "three", "fifteen"]})
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        model = vd.Model("m", prices={"prompt": 1e6, "completion": 2e6}, **budgets)
        docs.prompt("asked", question, provider=Reversed, model=model)
        return docs

    asking("{text}").run(store=store, compute=InProcessCompute())
    assert asking("Why {text}", token_budget=10_000).plan(store=store).holdups == []
    found = asking("Why {text}", token_budget=10, cost_budget=5.0).plan(store=store).holdups
    assert [text.partition(", but")[0] for text in found] == [
        "asked: its token_budget is 10",
        "asked: its cost_budget is 5",
    ]
    assert all("the budget cannot stop the only fragment to compute" in text for text in found)


def test_servers_that_have_to_start_are_said(tmp_path, store):
    server = vd.Server(["sleep", "{port}"], name="sleeper", model="m")
    write_source(tmp_path / "src", {"id": range(3), "text": ["a", "b", "c"]})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    docs.prompt("asked", "{text}", provider="openai", model=server)
    (text,) = docs.plan(store=store).holdups
    assert text.endswith("must start first, unless it already runs")
    (text,) = docs.plan(store=store, compute=vd.LocalCompute()).holdups
    assert text.endswith("must start first")


def broken(batch: Any) -> Any:
    raise ValueError("broken")


def test_a_stage_that_fails_loses_no_answers_of_those_above_it(tmp_path, store):
    write_source(tmp_path / "src", {"id": range(50), "n": range(50)})
    made = vd.Pipeline("tickets", source=vd.parquet(str(tmp_path / "src")), id="id")
    model = vd.Model("m", options={"address": str(tmp_path / "asked")})
    label = made.prompt("label", "label {n}", provider=Counting, model=model)
    failing = label.map_batches("failing", broken, schema={"label": "VARCHAR"})
    failing.project("last", ["label"]).project("very_last", ["label"])
    for sample in (1, 10):
        found = made.plan(store=store, sample=sample, compute=InProcessCompute())
        assert [each.sampled for each in found.stages] == [sample, 0, 0, 0]
        assert "broken" in " ".join(found.holdups)
        asked = (tmp_path / "asked").read_text().splitlines()
        assert sorted(asked) == sorted(f"label {n}" for n in range(sample))
        (tmp_path / "asked").unlink()
