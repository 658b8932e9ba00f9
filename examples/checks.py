"""Checks of a stage's rows in each partition: built-in checks and your own.

Every stage has default checks. A blocking check that fails withholds the downstream stages in its
partition; failures of other checks are shown in Dagster and stop nothing.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "ratings").absolute()
DAYS = dg.StaticPartitionsDefinition(["monday", "tuesday"])
GOOD = {"good", "fast", "love"}
LINES = {
    "monday": ["good and fast", "too slow", "i love it", "it came on time"],
    "tuesday": ["too slow", "too slow", "it came on time", "broken"],
}


def rate(batch: pa.Table) -> dict[str, Any]:
    """Counts good words; put your model here."""
    found = [len(GOOD & set(text.split())) for text in batch["text"].to_pylist()]
    return {"stars": found, "label": ["good" if stars else "" for stars in found]}


@dg.asset(partitions_def=DAYS)
def reviews(context: dg.AssetExecutionContext) -> None:
    """The input: 400 reviews a day, with worse ones on tuesday."""
    day = context.partition_key
    (ROOT / "reviews" / day).mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(400), "text": LINES[day] * 100})
    pq.write_table(table, ROOT / "reviews" / day / "all.parquet")


ratings = vd.Pipeline(
    "ratings",
    source=vd.parquet(str(ROOT / "reviews" / "{partition_key}"), asset=reviews),
    id="id",
    partitions_def=DAYS,
)
rated = ratings.map_batches(
    "rated",
    rate,
    schema={"stars": "BIGINT", "label": "VARCHAR"},
    asset=vd.Asset(
        checks=[
            # A separate check, which blocks; by default, `quality` warns if over half are null.
            vd.checks.NullRate(0.0, blocking=True, severity="ERROR"),
            vd.checks.Off("text"),  # an empty label is valid here
            # Does the day have the same distribution as the day before?
            vd.checks.Drift("stars", max_psi=0.2, min_rows=100),
            # The expected output for some ids; use a file for more cases.
            vd.checks.Golden({"id": [1, 3], "stars": [0, 0]}),
        ]
    ),
)
rated.write("published", str(ROOT / "out" / "{partition_key}"))


@dg.asset_check(asset=rated.key, partitions_def=DAYS)
def stars_are_few(rated: pa.Table) -> dg.AssetCheckResult:
    """An ordinary check of your own: it gets the stage's rows as it annotates them."""
    most = pc.max(rated["stars"]).as_py()
    return dg.AssetCheckResult(passed=most <= 3, metadata={"most": most})


assets = [reviews, ratings.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, asset_checks=[stars_are_few], resources=resources)


def main() -> None:
    for day in DAYS.get_partition_keys():
        result = dg.materialize([*assets, stars_are_few], resources=resources, partition_key=day)
        for done in result.asset_materializations_for_node("ratings_pipeline"):
            count = done.metadata["rows_computed"].value
            print(f"{day}: {done.asset_key.path[-1]} computed: {count}")
        for found in result.get_asset_check_evaluations():
            passed = "passed" if found.passed else f"{found.severity.value}: {found.description}"
            print(f"{day}: {found.asset_key.path[-1]}/{found.check_name} {passed}")


if __name__ == "__main__":
    main()
