"""An XGBoost model over numpy batches; the model's file is sent to the workers."""

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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "loans").absolute()
MODEL = ROOT / "model.json"
FEATURES = ["income", "debt", "age"]


class Risk:
    """Predicts the probability that a loan is not repaid."""

    def __init__(self, model: str) -> None:
        import xgboost

        self.booster = xgboost.Booster(model_file=model)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        rows = np.stack([batch[name] for name in FEATURES], axis=1)
        return {"risk": self.booster.inplace_predict(rows)}


def people(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "income": random.uniform(20, 120, count).round(1),
        "debt": random.uniform(0, 100, count).round(1),
        "age": random.integers(18, 80, count).astype("float64"),
    }


@dg.asset
def loans() -> None:
    """The input: 500 applications."""
    (ROOT / "loans").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(500), **people(500, 0)}), ROOT / "loans" / "all.parquet")


@dg.asset
def model() -> None:
    """The model: trained here, the same each time."""
    import xgboost

    known = people(2000, 1)
    rows = np.stack([known[name] for name in FEATURES], axis=1)
    lost = known["debt"] > known["income"]
    options = {"objective": "binary:logistic", "max_depth": 4, "nthread": 1, "seed": 0}
    ROOT.mkdir(parents=True, exist_ok=True)
    xgboost.train(options, xgboost.DMatrix(rows, lost), 20).save_model(MODEL)


risks = vd.Pipeline("risks", source=vd.parquet(str(ROOT / "loans"), asset=loans), id="id")
risks.map_batches(
    "rated",
    functools.partial(Risk, model=vd.local_file(MODEL)),
    schema={"risk": "FLOAT"},
    include_columns=["income", "debt"],
    batch_format="numpy",
    asset=vd.Asset(deps=[model]),
).write("published", str(ROOT / "out"))

assets = [loans, model, risks.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("risks_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    rows = sorted(pq.read_table(ROOT / "out").to_pylist(), key=lambda row: row["risk"])
    for row in (rows[0], rows[-1]):
        print(f"income {row['income']}, debt {row['debt']}: risk {row['risk']:.1f}")


if __name__ == "__main__":
    main()
