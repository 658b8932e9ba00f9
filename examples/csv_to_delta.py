"""CSV -> XGBoost -> Delta: each day is scored and written to a Delta table in one commit.

Needs ``pip install xgboost pandas 'vane-dagster[delta]'``.
"""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
import numpy as np
import pandas as pd

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "payments").absolute()
MODEL = ROOT / "model.json"
TABLE = str(ROOT / "scored")
DAYS = dg.DailyPartitionsDefinition("2026-05-04", end_date="2026-05-06")


@vd.cls
class FraudModel:
    """Predicts the probability that a payment is fraud."""

    def __init__(self, model: str) -> None:
        import xgboost

        self.booster = xgboost.Booster(model_file=model)

    @vd.method.batch(return_dtype="FLOAT")
    def score(self, amount: np.ndarray, hour: np.ndarray, abroad: np.ndarray) -> np.ndarray:
        return self.booster.inplace_predict(np.stack([amount, hour, abroad], axis=1))


def some_payments(seed: int, count: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    columns = {
        "amount": random.gamma(2, 50, count).round(2),
        "hour": random.integers(0, 24, count),
        "abroad": random.random(count) < 0.3,
    }
    return pd.DataFrame(columns, index=pd.Index([f"{seed}-{i}" for i in range(count)], name="id"))


@dg.asset(partitions_def=DAYS, backfill_policy=dg.BackfillPolicy.single_run())
def payments() -> None:
    """The input: a CSV file a day, the same each time."""
    for day in dg.AssetExecutionContext.get().partition_keys:
        (ROOT / "csv" / day).mkdir(parents=True, exist_ok=True)
        seed = int(day.replace("-", ""))
        some_payments(seed, 500).to_csv(ROOT / "csv" / day / "payments.csv")


@dg.asset
def model() -> None:
    """The model: trained here, the same each time."""
    import xgboost

    known = some_payments(1, 2000)
    is_fraud = known["abroad"] & (known["amount"] > 100)
    options = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1, "seed": 0}
    ROOT.mkdir(parents=True, exist_ok=True)
    rows = xgboost.DMatrix(known.to_numpy("float64"), is_fraud)
    xgboost.train(options, rows, 20).save_model(MODEL)


fraud = vd.Pipeline(
    "fraud",
    source=vd.csv(str(ROOT / "csv" / "{partition_key}" / "*.csv"), asset=payments),
    id="id",
    partitions_def=DAYS,
)
fraud.map(
    "score",
    FraudModel(vd.local_file(MODEL)).score,
    include_columns=["amount", "abroad"],
    asset=vd.Asset(deps=[model]),
).write("published", TABLE, format="delta")

assets = [payments, model, fraud.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    import deltalake

    for day in DAYS.get_partition_keys():
        result = dg.materialize(assets, resources=resources, partition_key=day)
        for done in result.asset_materializations_for_node("fraud_pipeline"):
            print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    scored = deltalake.DeltaTable(TABLE).to_pandas()
    for day, rows in scored[scored["score"] > 0.5].groupby("partition_key"):
        print(f"{day}: {len(rows)} payments look like fraud, {rows['amount'].sum():.2f} euros")


if __name__ == "__main__":
    main()
