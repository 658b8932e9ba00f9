"""What a forecast says, from its figures and from what a store has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import InProcessCompute, compute
from support.prompts import Reversed
from vane_dagster.engine.inference import with_pins
from vane_dagster.errors import BudgetError, DefinitionError
from vane_dagster.planning import forecast
from vane_dagster.planning.definition import inference_definition
from vane_dagster.planning.forecast import NOT_COUNTED, Forecast, StageForecast, check_limits
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin
from vane_dagster.storage.store import Store


def stage(name: str = "model", **figures: Any) -> StageForecast:
    given = {"partitions": 3, "up_to_date": 1, "fragments": 4, "rows": 1200}
    cause = "code of Model changed"
    why = {"due": {key: {cause: 1} for key in ("a", "b")}}
    return StageForecast(**{"stage": name, **given, "rows_are": "exact", **why, **figures})


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        ({"up_to_date": 3, "fragments": 0}, ["up to date"]),
        (
            {
                "worker_seconds": (1.0, 2.0),
                "seconds": (1.0, 2.0),
                "cost": (2.4e-6, 3.1e-5),
                "before_edit": True,
            },
            [
                "2 of 3 partitions: 1,200 rows in 4 fragments",
                "because: code of Model changed in 2 partitions (a, b)",
                "cost: 1.0 s to 2.0 s, a price of 0.0000024 to 0.000031, estimated from results "
                "before the edit; plan --sample 50 measures it",
            ],
        ),
        (
            {
                "up_to_date": 3,
                "fragments": 0,
                "adopted": ["code of A, adopted", "code of B, adopted"],
            },
            ["up to date", "code of B, adopted; and 1 more"],
        ),
        (
            {"fragments": 0, "rows": 0, "adopted": ["code of A, adopted"]},
            [
                "2 of 3 partitions: nothing to compute",
                "code of A, adopted",
                "because: code of Model changed in 2 partitions (a, b)",
            ],
        ),
        (
            {},
            [
                "2 of 3 partitions: 1,200 rows in 4 fragments",
                "because: code of Model changed in 2 partitions (a, b)",
                "cost: unknown without stored results; plan --sample 50 measures it",
            ],
        ),
        (
            {"is_sampled_on_request": False},
            [
                "2 of 3 partitions: 1,200 rows in 4 fragments",
                "because: code of Model changed in 2 partitions (a, b)",
                "cost: unknown without stored results",
            ],
        ),
        (
            {
                "rows_are": "at_most",
                "due": {"a": {"new files": 7}, "b": {"force": 1}},
                "worker_seconds": (300.0, 600.0),
                "seconds": (150.0, 300.0),
                "load_seconds": 12.0,
                "gpu_hours": (0.0, 0.25),
                "tokens": (1e6, 2e6),
                "cost": (0.5, 0.5),
                "sampled": 50,
            },
            [
                "2 of 3 partitions: at most 1,200 rows in 4 fragments",
                "because: 7 new files in 1 partition (a), force in 1 partition (b)",
                "cost: 2 min 30 s to 5 min 0 s (5 min 0 s to 10 min 0 s of worker time), "
                "measured on a sample of 50 rows, "
                "12 s to load the model where it is not loaded, up to 0.25 GPU hours, "
                "1,000,000 to 2,000,000 tokens, a price of 0.5",
            ],
        ),
    ],
)
def test_a_stage_says_what_is_computed_why_and_for_how_much(figures, lines):
    assert list(stage(**figures).lines()) == lines


def test_stages_overlap_at_best_and_follow_each_other_at_worst():
    quick = stage("quick", seconds=(1.0, 2.0), worker_seconds=(1.0, 2.0))
    slow = stage("slow", seconds=(5.0, 9.0), worker_seconds=(5.0, 9.0), load_seconds=3.0)
    done = stage("done", up_to_date=3, fragments=0)
    assert Forecast("docs", [quick, slow, done], {}).seconds == (5.0, 14.0)
    assert Forecast("docs", [quick, stage("new")], {}).seconds is None
    assert Forecast("docs", [done], {}).seconds is None


def test_a_forecast_is_text_and_plain_values():
    known = stage("a<b", seconds=(60.0, 90.0), worker_seconds=(60.0, 90.0))
    held = ["vllm 'm' must start first"]
    given = (
        [known, known],
        {"2026-01-01": "no files", "2026-01-02": "partition '2026-01-02': ?"},
        held,
        ["'x' is a text"],
    )
    found = Forecast("docs", *given)
    assert str(found).splitlines() == [
        "pipeline docs: what a run would compute",
        "  a<b  2 of 3 partitions: 1,200 rows in 4 fragments",
        "       because: code of Model changed in 2 partitions (a, b)",
        "       cost: 1 min 0 s to 1 min 30 s",
        "  a<b  2 of 3 partitions: 1,200 rows in 4 fragments",
        "       because: code of Model changed in 2 partitions (a, b)",
        "       cost: 1 min 0 s to 1 min 30 s",
        "  not planned: partition '2026-01-01': no files",
        "  not planned: partition '2026-01-02': ?",
        "  total: 1 min 0 s to 3 min 0 s elapsed",
        "  may stop or delay it: vllm 'm' must start first",
        "  warning: 'x' is a text",
    ]
    first = json.loads(json.dumps(found.to_dict()))["stages"][0]
    assert first["rows"] == 1200
    assert first["due"] == {key: {"code of Model changed": 1} for key in ("a", "b")}


def test_the_tokens_and_prices_of_all_stages_are_added_up():
    given = {"seconds": (2.0, 3.0), "worker_seconds": (2.0, 3.0)}
    first = stage("a", **given, tokens=(1000.0, 2000.0), cost=(0.5, 1.0))
    second = stage("b", **given, tokens=(10.0, 10.0), cost=(0.25, 0.5))
    known = str(Forecast("docs", [first, stage("io", **given), second], {})).splitlines()
    sums = "1,010 to 2,010 tokens, a price of 0.75 to 1.5"
    assert known[-1] == f"  total: 2.0 s to 9.0 s elapsed, {sums}"
    some = str(Forecast("docs", [first, stage("new"), second], {})).splitlines()
    assert some[-1] == f"  total, without 'new': {sums}"
    assert "total" not in str(Forecast("docs", [first], {}))
    as_dict = Forecast("docs", [first, second], {}).to_dict()
    assert (as_dict["tokens"], as_dict["cost"]) == ((1010.0, 2010.0), (0.75, 1.5))


def test_nothing_to_do_is_known():
    done = stage(up_to_date=3)
    assert Forecast("docs", [done], {}).is_up_to_date
    assert not Forecast("docs", [done, stage()], {}).is_up_to_date
    assert not Forecast("docs", [done], {"a": "no files"}).is_up_to_date


def test_limits_count_the_highest_cost_of_what_is_due(monkeypatch):
    stages = [
        stage("first", gpu_hours=(1.0, 2.0), cost=(5.0, 10.0)),
        stage("second", gpu_hours=(0.0, 1.0), before_edit=True),
        stage("new"),
        stage("done", fragments=0, up_to_date=3),
    ]
    priced = SimpleNamespace(runs_udf=True, gpus=1.0, usage=SimpleNamespace(prices={"prompt": 1.0}))
    specs = {each.stage: SimpleNamespace(spec=priced) for each in stages}
    plan: Any = SimpleNamespace(pipeline=type("Named", (dict,), {"name": "docs"})(specs))
    monkeypatch.setattr(forecast, "forecast", lambda *_: Forecast("docs", stages, {}))
    store: Any = None

    def check(**limits: float) -> list[str]:
        return list(check_limits(plan, store, limits, None, lambda: NOT_COUNTED))

    assert check() == []
    (unknown,) = check(max_gpu_hours=3.0)
    assert unknown.startswith("new: max_gpu_hours does not include it, because it has no stored")
    with pytest.raises(BudgetError, match="would take 1 to 3 GPU hours, and its max_gpu_hours is"):
        check(max_gpu_hours=2.9)
    with pytest.raises(BudgetError, match="would cost 5 to 10, and its max_cost is 9"):
        check(max_gpu_hours=3.0, max_cost=9.0)


# What the store has


class Add:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, batch: Any) -> Any:
        return {"y": [x + self.number for x in batch["x"].to_pylist()]}


class Stored:
    """Pipelines over one source, computed into one store by workers in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(StoragePath(str(folder / "store")))

    def write(self, key: str, *ids: int, name: str = "a.parquet") -> None:
        write_source(self.folder / "src" / key, {"id": ids, "x": ids}, name)

    def docs(self, partitions_def: Any = None, place: str = "") -> vd.Pipeline:
        source = vd.parquet(f"{self.folder}/src/{place}")
        return vd.Pipeline("docs", source=source, id="id", partitions_def=partitions_def)

    def adding(self, number: int = 1, **options: Any) -> vd.Pipeline:
        docs = self.docs(dg.StaticPartitionsDefinition(["a", "b"]), "{partition_key}")
        odd = docs.project("odd", {"id": "id", "x": "x"}, where="x % 2 = 1")
        given = {"fn_constructor_kwargs": {"number": number}, "schema": {"y": "BIGINT"}}
        odd.map_batches("added", Add, **given, **options).project("last", ["id", "y"])
        return docs

    def plan(self, pipeline: vd.Pipeline, *partitions: str, **given: Any) -> Forecast:
        wanted = list(partitions) or None
        return pipeline.plan(wanted, store=vd.FragmentStore(root=self.store.root.path), **given)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def brief(found: Forecast) -> dict[str, Any]:
    return {s.stage: (s.up_to_date, s.fragments, s.rows, s.rows_are) for s in found.stages}


def test_a_gpu_hour_has_the_price_of_the_compute_resource(stored):
    for key, first in (("a", 0), ("b", 10)):
        stored.write(key, *range(first, first + 10))
    compute(stored.adding(columns=["x"]), stored.store, ["a"])
    on_gpu = stored.adding(columns=["x"], gpus=1)
    priced = vd.LocalCompute(prices={"gpu_hour": 3})
    (added,) = (s for s in stored.plan(on_gpu, "b", compute=priced).stages if s.gpu_hours)
    assert added.gpu_hours[0] > 0
    assert added.cost == pytest.approx([3 * hours for hours in added.gpu_hours])
    assert not any(each.cost for each in stored.plan(on_gpu, "b").stages)
    wrong = vd.LocalCompute(prices={"gpu": 3})
    with pytest.raises(vd.errors.ComputeError, match="expected the price of a GPU for an hour"):
        stored.plan(on_gpu, "b", compute=wrong)

    # Rows of a partition that has results may be copies of them, unless the definition is another.
    assert stored.plan(stored.adding(2, columns=["x"]), "a").stages[1].worker_seconds[0] > 0
    stored.write("a", 1001, name="more.parquet")
    found = stored.plan(stored.adding(columns=["x"]), "a").stages
    assert (found[0].due, found[1].worker_seconds[0]) == ({"a": {"new files": 1}}, 0)
    assert stored.plan(stored.adding(columns=["x"]), "a", force=True).stages[1].worker_seconds[0]


def test_tokens_and_their_price(stored):
    table = {"id": range(3), "text": ["one", "three", "fifteen"]}
    write_source(stored.folder / "src", table)

    def asking(question: str) -> vd.Pipeline:
        docs = stored.docs()
        model = vd.Model("m", prices={"prompt": 1e6, "completion": 2e6})
        docs.prompt("asked", question, provider=Reversed, model=model)
        return docs

    compute(asking("{text}"), stored.store)  # for 15 tokens of prompts, and of answers
    found = stored.plan(asking("Why {text}")).stages[0]
    assert found.tokens[0] < 30 < found.tokens[1]
    assert found.cost[0] < 45 < found.cost[1]


class Flaky(Reversed):
    """A provider that has no answer to some texts as long as a variable is set."""

    async def submit(self, request: Any) -> Any:
        if "long" in request.messages[-1]["content"] and "FLAKY" in os.environ:
            raise ValueError("no answer now")
        return await super().submit(request)


def asked(stored: Stored, question: str, long: int = 1) -> vd.Pipeline:
    """A prompt of 20 texts in each of two partitions, one of them as long as it is said."""
    for key in "ab":
        texts = [f"text {n:02} of {key}" for n in range(20)]
        texts[7] = f"a long {key * long}"
        write_source(stored.folder / "src" / key, {"id": range(20), "text": texts})
    docs = stored.docs(dg.StaticPartitionsDefinition(["a", "b"]), "{partition_key}")
    docs.prompt("asked", question, provider=Flaky, model=vd.Model("m"), on_error="quarantine")
    return docs


def test_a_retry_of_some_rows_is_not_the_measure_of_others(stored, monkeypatch):
    docs = asked(stored, "{text}", long=2000)
    monkeypatch.setenv("FLAKY", "1")
    compute(docs, stored.store, ["a"])
    first = stored.plan(docs, "b").stages[0]
    monkeypatch.delenv("FLAKY")
    compute(docs, stored.store, ["a"], retry_quarantined=True)
    latest = stored.store.in_force("docs", "asked", "a")
    assert latest is not None
    assert [part.rows_in - part.copied for part in latest.parts] == [1]
    found = stored.plan(docs, "b").stages[0]
    assert 0.9 * first.tokens[0] < found.tokens[0] < found.tokens[1] < 1.1 * first.tokens[1]


def test_results_from_before_an_edit_are_a_measure_that_is_named_and_sampled(stored):
    docs, edited = asked(stored, "{text}"), asked(stored, "Answer at length, and twice: {text}")
    compute(docs, stored.store, ["a"])
    assert not stored.plan(docs, "b").stages[0].before_edit
    found = stored.plan(edited, "b").stages[0]
    assert found.before_edit
    assert [*found.lines()][2].endswith(
        "estimated from results before the edit; plan --sample 50 measures it"
    )

    sampled = stored.plan(edited, "b", compute=InProcessCompute(), sample=5).stages[0]
    assert (sampled.before_edit, sampled.sampled) == (False, 5)
    assert sampled.tokens[0] > found.tokens[1]
    assert "measured on a sample of 5 rows" in [*sampled.lines()][2]

    # One computed partition is the measure, whatever others have from before.
    compute(edited, stored.store, ["a"])
    compute(docs, stored.store, ["b"])
    later = stored.plan(edited, "b").stages[0]
    assert (later.before_edit, later.tokens[1] > found.tokens[1]) == (False, True)
    unmeasured = stored.plan(edited, "b", compute=InProcessCompute(), sample=5).stages[0]
    assert unmeasured.sampled == 0


class Limited(Reversed):
    """A provider whose workers share limits, which it does not keep."""

    OPERATIONAL = frozenset({"requests_per_minute", "tokens_per_minute"})

    def __init__(self, model: str, **limits: float) -> None:
        super().__init__(model)

    def shared_by(self, workers: int) -> None:
        pass

    def batch_api(self) -> None:
        pass


def test_requests_take_as_long_as_their_limits_or_their_batches(stored):
    write_source(stored.folder / "src", {"id": range(3), "text": ["one", "three", "fifteen"]})

    def asking(question: str, mode: Any = None, **limits: float) -> vd.Pipeline:
        docs = stored.docs()
        model = vd.Model("m", options=limits, mode=mode)
        docs.prompt("asked", question, provider=Limited, model=model)
        return docs

    def seconds(**given: Any) -> Any:
        return stored.plan(asking("Why {text}", **given)).stages[0].seconds

    compute(asking("{text}"), stored.store)  # for 15 tokens of prompts, and of answers
    assert seconds()[1] < 60
    assert seconds(requests_per_minute=1) == (180, 180)
    assert seconds(requests_per_minute=600, tokens_per_minute=10)[1] > 180
    assert seconds(mode="batch", requests_per_minute=1) == (0, 24 * 3600)


def test_partitions_of_several_dimensions_are_planned_without_an_instance(stored):
    stored.write("x|1", 1, 2, 3)
    dimensions = {"a": "xy", "b": "12"}
    made = stored.docs(
        dg.MultiPartitionsDefinition(
            {name: dg.StaticPartitionsDefinition([*keys]) for name, keys in dimensions.items()}
        ),
        "{partition_key}",
    )
    made.project("same", ["id"])
    found = stored.plan(made)
    assert brief(found) == {"same": (0, 1, 3, "exact")}
    assert sorted(found.unplanned) == ["x|2", "y|1", "y|2"]
    assert [*stored.plan(made, "x|1...y|1").unplanned] == ["y|1"]
    none = stored.plan(made, "y|2")
    assert ([*none.stages[0].lines()], none.is_up_to_date) == (["not planned"], False)


def test_stages_are_selected_as_in_dagster(stored):
    stored.write("a", 1)
    for select, names in (
        ("added", ["added"]),
        ("docs/added+", ["added", "last"]),
        (["odd", "last"], ["odd", "last"]),
        ("*", ["odd", "added", "last"]),
    ):
        found = stored.plan(stored.adding(), "a", select=select)
        assert [stage.stage for stage in found.stages] == names


@pytest.mark.parametrize(
    ("partitions", "given", "message"),
    [
        ([], {"select": "adde"}, "has no stage 'adde'; it has 'odd', 'added', 'last'"),
        (["a..d"], {}, "there is no partition 'd'; the first is 'a', the last 'b'"),
        ([], {"stages": "added"}, "unknown argument 'stages' of Pipeline.plan"),
    ],
)
def test_what_does_not_exist_is_refused(stored, partitions, given, message):
    with pytest.raises((DefinitionError, TypeError), match=message):
        stored.plan(stored.adding(), *partitions, **given)


def test_warnings_of_several_partitions_are_one_and_the_types_are_the_kept_ones(stored):
    (stored.folder / "src").mkdir()
    docs = partitioned(vd.csv(str(stored.folder / "src" / "{partition_key}.csv")), ["a", "b", "c"])
    docs.project("same", ["id", "price"])
    for key, row in (("a", "1,1"), ("b", "2,2,new"), ("c", "3,3.5,new")):
        names = "id,price,more"[: 8 if key == "a" else None]
        (stored.folder / "src" / f"{key}.csv").write_text(f"{names}\n{row}\n")
    assert docs.source_schema(stored.store).field("price").type == pa.float64()
    assert list(stored.plan(docs, "a").warnings) == []
    (text,) = stored.plan(docs).warnings
    assert text.startswith(
        "2 partitions (b, c), the first: pipeline 'docs', partition 'b': columns that the first "
        "run's files lacked are not read: 'more' in "
    )
    kept = docs.source_schema(stored.store)
    assert (kept.names, kept.field("price").type) == (["id", "price"], pa.int64())


def inferring(stored: Stored, number: int, *read: str, some: str = "x > 0") -> vd.Pipeline:
    docs = stored.docs()
    model = docs.project("some", ["id", "x"], where=some).map_batches(
        "model", Add, columns=["x"], schema="infer", fn_constructor_kwargs={"number": number}
    )
    model.project("last", ["id", *read])
    return docs


def test_a_schema_that_no_run_has_inferred_is_not_needed_for_a_plan(stored):
    stored.write("", 1, 2)
    found = stored.plan(inferring(stored, 1, "y"), rows=True)
    assert brief(found) == {
        "some": (0, 1, 2, "exact"),
        "model": (0, 1, 2, "at_most"),
        "last": (0, 1, 2, "at_most"),
    }
    assert {*found.stages[2].due[None]} == {"not computed before"}
    assert list(found.warnings) == []
    assert not found.is_up_to_date


def test_a_plan_of_other_code_assumes_the_schema_that_was_inferred_last(stored):
    stored.write("", 1, 2)
    docs, pin = inferring(stored, 1, "y"), SchemaPin(pa.schema([("y", "int64")]), 2, "run", 1.0)
    keep_pin(stored.store, "docs", "model", inference_definition(docs, "model"), pin)
    compute(with_pins(docs, ["last"], stored.store), stored.store)
    assert stored.plan(docs).is_up_to_date

    found = stored.plan(inferring(stored, 1, "y", some="x > 1"), rows=True)
    assert brief(found)["model"] == (0, 1, 0, "exact")  # the only row left equals a stored one
    assert found.stages[1].copied == 1
    (warning,) = found.warnings
    assert warning == (
        "stage 'model': the run infers its schema again; the plan assumes that it stays the same"
    )
    # A schema that does not fit what reads it, or that is damaged, is not assumed.
    found = stored.plan(inferring(stored, 2, "z"))
    assert {stage.stage: stage.up_to_date for stage in found.stages} == {
        "some": 1, "model": 0, "last": 0,
    }  # fmt: skip
    argument = "argument \"fn_constructor_kwargs['number']\" changed"
    assert {*found.stages[1].due[None]} == {argument, "its schema is inferred again"}
    assert list(found.warnings) == []
    (stored.folder / "store/docs/model/schemas/0.json").write_text("{")
    assert list(stored.plan(inferring(stored, 2, "y")).warnings) == []


def test_of_several_schemas_a_plan_assumes_that_of_the_stored_rows(stored):
    stored.write("", 1, 2)
    docs = inferring(stored, 1, "y")
    for number, kind in ((1, "int64"), (2, "double")):
        pin = SchemaPin(pa.schema([("y", kind)]), 2, "run", float(number))
        definition = inference_definition(inferring(stored, number, "y"), "model")
        keep_pin(stored.store, "docs", "model", definition, pin)
    compute(with_pins(docs, ["last"], stored.store), stored.store)
    assert brief(stored.plan(inferring(stored, 1, "y", some="x > 1"), rows=True))["model"][2] == 0


def test_a_partition_that_cannot_be_planned_leaves_the_schemas_of_others(stored):
    stored.write("a", 1, 2)
    days = dg.StaticPartitionsDefinition(["a", "b"])

    def docs(some: str) -> vd.Pipeline:
        made = stored.docs(days, "{partition_key}")
        made.project("some", ["id", "x"], where=some).map_batches(
            "model", Add, columns=["x"], schema="infer", fn_constructor_kwargs={"number": 1}
        )
        return made

    pin = SchemaPin(pa.schema([("y", "int64")]), 2, "run", 1.0)
    keep_pin(stored.store, "docs", "model", inference_definition(docs("x > 0"), "model"), pin)
    compute(with_pins(docs("x > 0"), ["model"], stored.store), stored.store, ["a"])
    found = stored.plan(docs("x > 1"), rows=True)
    assert list(found.unplanned) == ["b"]
    assert brief(found)["model"] == (0, 1, 0, "exact")


def test_a_plan_says_why_a_changed_row_costs_its_fragment(stored):
    for key in ("a", "b"):
        stored.write(key, 1, 3)
    compute(stored.adding(), stored.store, ["a"])
    stored.write("a", 1, 3, 5)

    def why(*partitions: str, number: int = 1, **options: Any) -> str:
        planned = stored.plan(stored.adding(number, **options), *partitions)
        return next(each.by_fragment for each in planned.stages if each.stage == "added")

    reason = "a row is found by the columns that the code reads; name them in columns="
    assert why("a") == reason
    assert f"  by whole fragments: {reason}\n" in f"{stored.plan(stored.adding(), 'a')}"
    assert (why("b"), why("a", number=2), why("a", columns=["x"])) == ("", "", "")
