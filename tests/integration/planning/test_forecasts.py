"""Forecasts beside the runs that follow them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import write_source
from support.prompts import Reversed
from support.results import failure, metadata
from vane_dagster.errors import DefinitionError

KEYS = ["a", "b", "c"]


class Add:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, batch: Any) -> Any:
        return {"y": [x + self.number for x in batch["x"].to_pylist()]}


def twice(batch: Any) -> Any:
    pairs = [(id, f"{id}/{n}") for id in batch["id"].to_pylist() for n in (1, 2)]
    return {"id": [id for id, _ in pairs], "part": [part for _, part in pairs]}


def numbers(tmp_path: Path, number: int = 1, columns: Any = None, gpus: float = 0) -> vd.Pipeline:
    for day, key in enumerate(KEYS):
        rows = range(100 * day, 100 * day + 100)
        write_source(tmp_path / "src" / key, {"id": rows, "x": rows})
    made = vd.Pipeline(
        "numbers",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(KEYS),
    )
    even = made.project("even", {"id": "id", "x": "x"}, where="x % 2 = 0")
    added = even.map_batches(
        "added",
        Add,
        schema={"y": "BIGINT"},
        columns=columns,
        fn_constructor_kwargs={"number": number},
        gpus=gpus,
    )
    added.project("last", ["id", "y"])
    return made


def brief(found: Any) -> dict[str, Any]:
    return {s.stage: (s.up_to_date, s.fragments, s.rows, s.rows_are) for s in found.stages}


def causes(found: Any) -> dict[str, Any]:
    return {s.stage: dict(s.causes) for s in found.stages}


def test_a_forecast_is_what_the_run_then_does(tmp_path, materialize):
    store, local = str(tmp_path / "store"), vd.LocalCompute()
    pipeline = numbers(tmp_path)
    first = pipeline.plan("a..b", store=store)
    assert brief(first) == {
        "even": (0, 2, 200, "exact"),
        "added": (0, 2, 200, "at_most"),
        "last": (0, 2, 200, "at_most"),
    }
    assert causes(first)["even"] == {"not computed before": 2}
    assert first.seconds is None
    assert not Path(store).exists()

    for key in ("a", "b"):
        materialize(pipeline, local, key)
    assert pipeline.plan("a..b", store=store).is_up_to_date
    forced = pipeline.plan("a..b", select="added", store=store, force=True)
    assert brief(forced) == {"added": (0, 2, 100, "exact")}
    assert causes(forced)["added"] == {"force or retry_quarantined": 2}
    assert pipeline.plan("a..b", store=store, retry_quarantined=True).is_up_to_date
    rest = pipeline.plan(store=store)
    assert brief(rest)["added"] == (2, 1, 100, "at_most")
    low, high = rest.stages[1].worker_seconds
    assert 0 < low < high
    assert rest.stages[1].load_seconds > 0
    assert rest.seconds is not None

    edited = numbers(tmp_path, number=2)
    found = edited.plan(["a"], store=store)
    assert brief(found) == {
        "even": (1, 0, 0, "exact"),
        "added": (0, 1, 50, "exact"),
        "last": (0, 1, 50, "at_most"),
    }
    assert causes(found)["added"] == {"argument \"fn_constructor_kwargs['number']\" changed": 1}
    assert causes(found)["last"] == {"upstream stage 'added' changed": 1}
    done = materialize(edited, local, "a")
    assert metadata(done, "added")["fragments_computed"] == 1
    assert metadata(done, "added")["dagster/partition_row_count"] == 50


def test_a_run_beyond_a_limit_computes_nothing(tmp_path, materialize):
    store = str(tmp_path / "store")
    materialize(numbers(tmp_path), vd.LocalCompute(), "a")
    on_gpu = numbers(tmp_path, gpus=1)
    refused = (
        r"the run would take \S+ to \S+ GPU hours, and its max_gpu_hours is 1e-09; nothing was "
        r"computed\. Raise max_gpu_hours, or run fewer partitions"
    )
    with pytest.raises(vd.errors.BudgetError, match=refused):
        on_gpu.run("b", store=store, max_gpu_hours=1e-9)
    config = {"max_gpu_hours": 1e-9}
    run = materialize(on_gpu, vd.LocalCompute(), "b", raises=False, config=config)
    assert re.search(refused, failure(run))
    assert brief(on_gpu.plan("b", store=store))["even"] == (0, 1, 100, "exact")
    materialize(numbers(tmp_path), vd.LocalCompute(), "b")
    on_gpu.run("b", store=store, max_gpu_hours=0)  # nothing is due


def test_a_gpu_hour_has_the_price_of_the_compute_resource(tmp_path, local, materialize):
    store = str(tmp_path / "store")
    materialize(numbers(tmp_path), local, "a")
    on_gpu = numbers(tmp_path, gpus=1)
    priced = vd.LocalCompute(prices={"gpu_hour": 3})
    stages = on_gpu.plan("b", store=store, compute=priced).stages
    (found,) = (each for each in stages if each.gpu_hours)
    assert found.cost == pytest.approx([3 * hours for hours in found.gpu_hours])
    assert not any(each.cost for each in on_gpu.plan("b", store=store).stages)
    with pytest.raises(vd.errors.BudgetError, match=r"would cost .*, and its max_cost is 1e-09"):
        on_gpu.run("b", store=store, compute=priced, max_cost=1e-9)
    wrong = vd.LocalCompute(prices={"gpu": 3})
    with pytest.raises(vd.errors.ComputeError, match="expected the price of a GPU for an hour"):
        on_gpu.plan("b", store=store, compute=wrong)


def test_rows_that_may_be_copied_have_no_lowest_cost(tmp_path, local, materialize):
    store = str(tmp_path / "store")
    pipeline = numbers(tmp_path, columns=["x"])
    materialize(pipeline, local, "a")
    assert pipeline.plan("b", store=store).stages[1].worker_seconds[0] > 0
    assert numbers(tmp_path, 2, ["x"]).plan("a", store=store).stages[1].worker_seconds[0] > 0
    write_source(tmp_path / "src" / "a", {"id": [1000], "x": [1000]}, "more.parquet")
    found = pipeline.plan("a", store=store)
    assert causes(found)["even"] == {"new files": 1}
    assert found.stages[1].worker_seconds[0] == 0


def test_input_rows_of_a_join_are_those_of_its_base(tmp_path, local, materialize):
    write_source(tmp_path / "src", {"id": range(40), "x": range(40)})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    odd = docs.project("odd", {"id": "id", "x": "x"}, where="x % 2 = 1")
    every = docs.project("every", {"id": "id", "z": "x"})
    docs.join("joined", odd, every)
    store = str(tmp_path / "store")
    materialize(docs, local, select=["odd", "every"])
    assert brief(docs.plan(store=store))["joined"] == (0, 1, 20, "exact")

    parts = every.map_batches(
        "parts", twice, schema={"id": "BIGINT", "part": "VARCHAR"}, cardinality=vd.Children("part")
    )
    docs.join("each", odd, parts, children="rows")
    docs.join("listed", odd, parts, children="list")
    found = brief(docs.plan(store=store))
    assert found["each"] == (0, 1, 40, "about")
    assert found["listed"] == (0, 1, 20, "exact")


def test_tokens_and_their_price(tmp_path, local, materialize):
    texts = ["one", "three", "fifteen"]

    def asking(question: str) -> vd.Pipeline:
        write_source(tmp_path / "src", {"id": range(3), "text": texts})
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        model = vd.Model("m", prices={"prompt": 1e6, "completion": 2e6})
        docs.prompt("asked", question, provider=Reversed, model=model)
        return docs

    done = materialize(asking("{text}"), local)
    found = asking("Why {text}").plan(store=str(tmp_path / "store")).stages[0]
    assert metadata(done, "asked")["cost"] == 45
    assert found.tokens[0] < 30 < found.tokens[1]
    assert found.cost[0] < 45 < found.cost[1]


def test_a_job_reports_the_plan_in_dagster(tmp_path):
    job = numbers(tmp_path).build_plan_job()
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    config = {"ops": {job.name: {"config": {"partitions": "a..b", "select": "even"}}}}
    done = job.execute_in_process(run_config=config, resources={"store": store})
    (output,) = [e.event_specific_data for e in done.all_events if e.is_successful_output]
    assert "even  2 of 2 partitions: 200 rows in 2 fragments" in output.metadata["plan"].value
    assert output.metadata["up_to_date"].value is False


def test_partitions_of_several_dimensions_are_planned_without_an_instance(tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    write_source(tmp_path / "src" / "x|1", {"id": range(3)})
    made = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
        id="id",
        partitions_def=dg.MultiPartitionsDefinition(
            {name: dg.StaticPartitionsDefinition(keys) for name, keys in (("a", "xy"), ("b", "12"))}
        ),
    )
    made.project("same", ["id"])
    found = made.plan(store=str(tmp_path / "store"))
    assert brief(found) == {"same": (0, 1, 3, "exact")}
    assert sorted(found.unplanned) == ["partition 'x|2'", "partition 'y|1'", "partition 'y|2'"]
    ranged = made.plan("x|1...y|1", store=str(tmp_path / "store"))
    assert sorted(ranged.unplanned) == ["partition 'y|1'"]
    none = made.plan("y|2", store=str(tmp_path / "store"))
    assert ([*none.stages[0].lines()], none.is_up_to_date) == (["not planned"], False)


@pytest.mark.parametrize(
    ("given", "selected"),
    [
        ({"select": "added"}, ["added"]),
        ({"select": "numbers/added+"}, ["added", "last"]),
        ({"select": ["even", "last"]}, ["even", "last"]),
        ({"select": "*"}, ["even", "added", "last"]),
    ],
)
def test_stages_are_selected_as_in_dagster(tmp_path, given, selected):
    found = numbers(tmp_path).plan("a", store=str(tmp_path / "store"), **given)
    assert [stage.stage for stage in found.stages] == selected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"select": "adde"}, "select names 'adde'; expected of 'even', 'added', 'last'"),
        ({"partitions": "a..d"}, "there is no partition 'd'; the first is 'a', the last 'c'"),
        ({"stages": "added"}, "unknown argument 'stages' of Pipeline.plan"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path, given, message):
    with pytest.raises((DefinitionError, TypeError), match=message):
        numbers(tmp_path).plan(store=str(tmp_path / "store"), **given)


def test_stages_below_a_schema_that_no_run_has_inferred_are_not_planned(
    tmp_path, local, materialize
):
    write_source(tmp_path / "src", {"id": range(3), "x": range(3)})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    some = docs.project("some", ["id", "x"])
    some.map_batches("model", Add, schema="infer", fn_constructor_kwargs={"number": 1}).project(
        "last", ["id"]
    )
    found = docs.plan(store=str(tmp_path / "store"))
    assert [*brief(found)] == ["some"]
    reason = "the first run infers the schema of 'model', so what follows is not known"
    assert found.unplanned == {"stage 'model'": reason, "stage 'last'": reason}
    assert not found.is_up_to_date
    materialize(docs, local)
    assert docs.plan(store=str(tmp_path / "store")).is_up_to_date
