"""What a forecast says, from its figures."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.errors import BudgetError
from vane_dagster.planning import forecast
from vane_dagster.planning.forecast import Forecast, StageForecast, check_limits


def stage(name: str = "model", **figures: Any) -> StageForecast:
    given = {"partitions": 3, "up_to_date": 1, "fragments": 4, "stored_fragments": 0, "rows": 1200}
    return StageForecast(
        **{"stage": name, **given, "rows_are": "exact", "causes": {"code of Model changed": 2}}
        | figures
    )


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        ({"up_to_date": 3, "fragments": 0}, ["up to date"]),
        (
            {},
            [
                "2 of 3 partitions: 1,200 rows in 4 fragments",
                "because: code of Model changed",
                "cost: unknown, because nothing stored is there to measure by",
            ],
        ),
        (
            {
                "rows_are": "at_most",
                "stored_fragments": 5,
                "causes": {"new files": 7, "force or retry_quarantined": 1},
                "worker_seconds": (300.0, 600.0),
                "seconds": (150.0, 300.0),
                "load_seconds": 12.0,
                "gpu_hours": (0.0, 0.25),
                "tokens": (1e6, 2e6),
                "cost": (0.5, 0.5),
            },
            [
                "2 of 3 partitions: at most 1,200 rows in 4 fragments, 5 more in the store",
                "because: 7 new files, force or retry_quarantined in 1 partition",
                "cost: 2 min 30 s to 5 min 0 s (5 min 0 s to 10 min 0 s of workers), "
                "12 s to load the model where it is not loaded, up to 0.25 GPU hours, "
                "1,000,000 to 2,000,000 tokens, a price of 0.5",
            ],
        ),
        (
            {"fragments": 0, "rows": 0, "stored_fragments": 4},
            [
                "2 of 3 partitions: 0 rows in 0 fragments, 4 more in the store",
                "because: code of Model changed",
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
    found = Forecast("docs", [known, known], {"partition '2026-01-01'": "no files"})
    assert str(found).splitlines() == [
        "pipeline docs: what a run would compute",
        "  a<b  2 of 3 partitions: 1,200 rows in 4 fragments",
        "       because: code of Model changed",
        "       cost: 1 min 0 s to 1 min 30 s",
        "  a<b  2 of 3 partitions: 1,200 rows in 4 fragments",
        "       because: code of Model changed",
        "       cost: 1 min 0 s to 1 min 30 s",
        "  partition '2026-01-01': no files",
        "  in all: 1 min 0 s to 3 min 0 s on the clock",
    ]
    assert json.loads(json.dumps(found.to_dict()))["stages"][0]["rows"] == 1200


def test_nothing_to_do_is_known():
    done = stage(up_to_date=3)
    assert Forecast("docs", [done], {}).is_up_to_date
    assert not Forecast("docs", [done, stage()], {}).is_up_to_date
    assert not Forecast("docs", [done], {"a": "no files"}).is_up_to_date


def test_limits_count_the_highest_cost_of_what_is_due(monkeypatch):
    stages = [
        stage("first", gpu_hours=(1.0, 2.0), cost=(5.0, 10.0)),
        stage("second", gpu_hours=(0.0, 1.0)),
        stage("new"),
        stage("done", fragments=0, up_to_date=3),
    ]
    priced = SimpleNamespace(runs_udf=True, gpus=1.0, usage=SimpleNamespace(prices={"prompt": 1.0}))
    specs = {each.stage: SimpleNamespace(spec=priced) for each in stages}
    plan: Any = SimpleNamespace(pipeline=type("Named", (dict,), {"name": "docs"})(specs))
    monkeypatch.setattr(forecast, "forecast", lambda *_: Forecast("docs", stages, {}))
    store: Any = None

    assert list(check_limits(plan, store, {})) == []
    (unknown,) = check_limits(plan, store, {"max_gpu_hours": 3.0})
    assert unknown.startswith("new: max_gpu_hours does not count it, because nothing stored")
    with pytest.raises(BudgetError, match="would take 1 to 3 GPU hours, and its max_gpu_hours is"):
        list(check_limits(plan, store, {"max_gpu_hours": 2.9}))
    with pytest.raises(BudgetError, match="would cost 5 to 10, and its max_cost is 9"):
        list(check_limits(plan, store, {"max_gpu_hours": 3.0, "max_cost": 9.0}))
