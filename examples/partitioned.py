"""Daily partitions: a schedule for the newest day, and a range of days in one run.

A run for many days loads its model once. In Dagster's UI, select the assets, then Materialize,
then a range of partitions: the pipeline's days become one run, by its default backfill policy.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "sensors").absolute()
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-02-01")


class Anomaly:
    """How many standard deviations a reading is from the sensor's usual value."""

    def __init__(self, mean: float, deviation: float) -> None:
        print("loading the model")  # what a worker prints is in the run's log
        self.mean, self.deviation = mean, deviation

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"anomaly": np.abs(batch["celsius"] - self.mean) / self.deviation}


@dg.asset(partitions_def=DAYS, backfill_policy=dg.BackfillPolicy.single_run())
def readings() -> None:
    """The input: a file for each day, the same each time."""
    for day in dg.AssetExecutionContext.get().partition_keys:
        celsius = np.random.default_rng(int(day.replace("-", ""))).normal(20, 3, 500)
        folder = ROOT / "readings" / day
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": range(500), "celsius": celsius}), folder / "all.parquet")


sensors = vd.Pipeline(
    "sensors",
    source=vd.parquet(str(ROOT / "readings" / "{partition_key}"), asset=readings),
    id="id",
    partitions_def=DAYS,
)
valid = sensors.project("valid", {"celsius": "celsius"}, where="celsius > -273.15")
anomalies = valid.map_batches(
    "anomalies",
    functools.partial(Anomaly, mean=20.0, deviation=3.0),
    schema={"anomaly": "DOUBLE"},
    batch_format="numpy",
)
joined = sensors.join("joined", valid, anomalies)
joined.write("published", str(ROOT / "out" / "{partition_key}"))

daily = dg.define_asset_job("daily", selection=dg.AssetSelection.all())
assets = [readings, sensors.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(
    assets=assets,
    jobs=[daily],
    schedules=[dg.build_schedule_from_partitioned_job(daily)],  # each night, the day that ended
    resources=resources,
)


def main() -> None:
    days = {"start": "2026-01-05", "end": "2026-01-07"}
    tags = {f"dagster/asset_partition_range_{end}": day for end, day in days.items()}
    result = dg.materialize(assets, resources=resources, tags=tags)
    for event in result.get_asset_materialization_events():
        facts = {name: value.value for name, value in event.materialization.metadata.items()}
        if event.asset_key == anomalies.key:
            print(event.partition, "anomalies computed:", facts["rows_computed"])
    for day in days.values():
        table = pq.read_table(ROOT / "out" / day).sort_by([("anomaly", "descending")])
        print(day, "strangest:", table.slice(0, 1).to_pylist()[0])


if __name__ == "__main__":
    main()
