"""Plans and previews by jobs in Dagster's UI, and runs that would exceed their limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.results import failure


class Add:
    def __call__(self, batch: Any) -> Any:
        if 296 in batch["x"].to_pylist():
            raise ValueError("296 cannot be added to")
        return {"y": [x + 1 for x in batch["x"].to_pylist()]}


def numbers(tmp_path: Path, **given: Any) -> vd.Pipeline:
    for day, key in enumerate("abc"):
        rows = range(100 * day, 100 * day + 100)
        write_source(tmp_path / "src" / key, {"id": rows, "x": rows})
    made = vd.Pipeline(
        "numbers",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition([*"abc"]),
    )
    even = made.project("even", {"id": "id", "x": "x"}, where="x % 2 = 0")
    even.map_batches("added", Add, schema={"y": "BIGINT"}, **given)
    return made


def test_a_plan_is_a_job_and_a_limit_of_a_run(tmp_path, materialize):
    store, pipeline, compute = str(tmp_path / "store"), numbers(tmp_path), InProcessCompute()
    for key in "ab":
        materialize(pipeline, compute, key)

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
        r"the run would take \S+ to \S+ GPU hours, and its max_gpu_hours is 0\.0+1; nothing was "
        r"computed\. Raise max_gpu_hours, or run fewer partitions"
    )
    assert re.search(refused, failure(materialize(on_gpu, compute, "c", raises=False, config=most)))
    assert [stage.fragments for stage in on_gpu.plan("c", store=store).stages] == [1, 1]
