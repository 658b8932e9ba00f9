"""A forecast beside the runs that follow it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import failure, metadata

KEYS = ["a", "b", "c"]


class Add:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, batch: Any) -> Any:
        return {"y": [x + self.number for x in batch["x"].to_pylist()]}


def numbers(tmp_path: Path, number: int = 1, gpus: float = 0) -> vd.Pipeline:
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

    # Before the first run.
    first = pipeline.plan("a..b", store=store)
    assert brief(first) == {
        "even": (0, 2, 200, "exact"),
        "added": (0, 2, 200, "at_most"),
        "last": (0, 2, 200, "at_most"),
    }
    assert causes(first)["even"] == {"not computed before": 2}
    assert first.seconds is None
    assert not Path(store).exists()

    # Two partitions have results.
    for key in ("a", "b"):
        materialize(pipeline, local, key)
    assert pipeline.plan("a..b", store=store).is_up_to_date
    forced = pipeline.plan("a..b", select="added", store=store, force=True)
    assert brief(forced) == {"added": (0, 2, 100, "exact")}
    assert causes(forced)["added"] == {"force": 2}
    assert pipeline.plan("a..b", store=store, retry_quarantined=True).is_up_to_date
    rest = pipeline.plan(store=store)
    assert brief(rest)["added"] == (2, 1, 100, "at_most")
    low, high = rest.stages[1].worker_seconds
    assert 0 < low < high
    assert rest.stages[1].load_seconds > 0
    assert rest.seconds is not None

    # The job for Dagster's UI reports the same.
    job = pipeline.build_plan_job()
    config = {"ops": {f"{job.name}_step": {"config": {"partitions": "a..b", "select": "even"}}}}
    resources = {"store": vd.FragmentStore(root=store)}
    done = job.execute_in_process(run_config=config, resources=resources)
    (output,) = [e.event_specific_data for e in done.all_events if e.is_successful_output]
    assert "even  up to date" in output.metadata["plan"].value
    assert output.metadata["up_to_date"].value is True

    # Runs beyond a limit compute nothing.
    on_gpu, most = numbers(tmp_path, gpus=1), {"max_gpu_hours": 1e-9}
    refused = (
        r"the run would take \S+ to \S+ GPU hours, and its max_gpu_hours is 1e-09; nothing was "
        r"computed\. Raise max_gpu_hours, or run fewer partitions"
    )
    with pytest.raises(vd.errors.BudgetError, match=refused):
        on_gpu.run("c", store=store, **most)
    assert re.search(refused, failure(materialize(on_gpu, local, "c", raises=False, config=most)))
    priced = vd.LocalCompute(prices={"gpu_hour": 3})
    with pytest.raises(vd.errors.BudgetError, match=r"would cost .*, and its max_cost is 1e-09"):
        on_gpu.run("c", store=store, compute=priced, max_cost=1e-9)
    assert brief(on_gpu.plan("c", store=store))["even"] == (0, 1, 100, "exact")
    on_gpu.run("b", store=store, max_gpu_hours=0)  # nothing is due

    # An edit.
    edited = numbers(tmp_path, number=2)
    found = edited.plan(["a"], store=store)
    assert brief(found) == {
        "even": (1, 0, 0, "exact"),
        "added": (0, 1, 50, "exact"),
        "last": (0, 1, 50, "at_most"),
    }
    assert causes(found)["added"] == {"argument \"fn_constructor_kwargs['number']\" changed": 1}
    assert causes(found)["last"] == {"upstream stage 'added' changed": 1}
    assert [*found.stages[1].edits][1:] == [
        "+++ fn_constructor_kwargs['number']", "@@ -1 +1 @@", "-1", "+2",
    ]  # fmt: skip
    done = materialize(edited, local, "a")
    assert metadata(done, "added")["fragments_computed"] == 1
    assert metadata(done, "added")["dagster/partition_row_count"] == 50
