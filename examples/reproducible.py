"""A check that recomputes some stored rows and detects changes that fragment keys do not cover.

The prices come from a file that the function reads when it is called, so an edit of it recomputes
nothing: rows keep prices that are out of date. `Reproducible` recomputes a sample of them with
the current code, packages and data, and reports which rows differ.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "prices").absolute()
RATES = ROOT / "rates.json"


def in_euros(batch: pa.Table) -> dict[str, Any]:
    """Reads a file in each call; better pass its content as an argument, which is keyed."""
    rates = json.loads(RATES.read_text())
    pairs = zip(batch["amount"].to_pylist(), batch["currency"].to_pylist())
    return {"euros": [amount / rates[currency] for amount, currency in pairs]}


@dg.asset
def sales() -> None:
    """The input: 100 sales in two currencies, and rates to begin with."""
    (ROOT / "sales").mkdir(parents=True, exist_ok=True)
    if not RATES.exists():
        set_rates(EUR=1.0, USD=1.25)
    columns = {"id": range(100), "amount": [float(n) for n in range(100)]}
    table = pa.table({**columns, "currency": ["EUR", "USD"] * 50})
    pq.write_table(table, ROOT / "sales" / "all.parquet")


shop = vd.Pipeline("shop", source=vd.parquet(str(ROOT / "sales"), asset=sales), id="id")
priced = shop.map_batches(
    "priced",
    in_euros,
    schema={"euros": "DOUBLE"},
    # Values must be equal; floating-point numbers may differ by this much, absolute or relative.
    asset=vd.Asset(checks=[vd.checks.Reproducible(rows=20, tolerance=1e-5)]),
)

# The check alone, run manually from this job's page, and by the schedule every Monday.
check = dg.AssetCheckKey(priced.key, "reproducible")
verify = dg.define_asset_job("verify", selection=dg.AssetSelection.checks(check))
weekly = dg.ScheduleDefinition(job=verify, cron_schedule="0 6 * * 1")

assets = [sales, shop.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, jobs=[verify], schedules=[weekly], resources=resources)


def main() -> None:
    set_rates(EUR=1.0, USD=1.25)
    run = functools.partial(dg.materialize, assets, resources=resources)
    for done in run().asset_materializations_for_node("shop_pipeline"):
        print(f"{done.asset_key.path[-1]} computed: {done.metadata['rows_computed'].value}")

    tell(run(selection=verify.selection))
    set_rates(EUR=1.0, USD=1.5)
    tell(run(selection=verify.selection))


def set_rates(**rates: float) -> None:
    ROOT.mkdir(parents=True, exist_ok=True)
    RATES.write_text(json.dumps(rates))


def tell(result: dg.ExecuteInProcessResult) -> None:
    for found in result.get_asset_check_evaluations():
        print(f"{found.check_name} {'passed' if found.passed else 'failed'}: {found.description}")
        if not found.passed:
            for record in found.metadata["differences"].records[:3]:
                line = "  id {id}: {column} is stored as {stored}, now {computed}"
                print(line.format(**record.data))


if __name__ == "__main__":
    main()
