"""A scikit-learn model as a plain function over pandas batches: no class, no GPU.

A function suits a model that loads in milliseconds; `lru_cache` keeps it in each worker. The path
of the model is an argument of the stage, so the content of the file is part of the fragment keys.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "flowers").absolute()
MEASURES = ["sepal_length", "sepal_width", "petal_length", "petal_width"]


@functools.lru_cache
def load_model(path: str) -> Any:
    import joblib

    return joblib.load(path)


def classify(batch: pd.DataFrame, model: str) -> pd.DataFrame:
    """Predicts the species of each flower, with its probability."""
    chances = load_model(model).predict_proba(batch[MEASURES].to_numpy())
    species = load_model(model).classes_[chances.argmax(axis=1)]
    return pd.DataFrame({"id": batch["id"], "species": species, "sure": chances.max(axis=1)})


@dg.asset
def measures() -> None:
    """The input: the measurements of 150 irises."""
    from sklearn.datasets import load_iris

    (ROOT / "measures").mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(load_iris().data, columns=MEASURES)
    frame.insert(0, "id", [f"iris-{number:03}" for number in range(len(frame))])
    frame.to_parquet(ROOT / "measures" / "measures.parquet")


@dg.asset
def model() -> None:
    """The model: trained here, the same each time."""
    import joblib
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    iris = load_iris()
    ROOT.mkdir(parents=True, exist_ok=True)
    fitted = LogisticRegression(max_iter=500).fit(iris.data, iris.target_names[iris.target])
    joblib.dump(fitted, ROOT / "model.joblib")


flowers = vd.Pipeline("flowers", source=vd.parquet(str(ROOT / "measures"), asset=measures), id="id")
classified = flowers.map_batches(
    "classified",
    classify,
    schema={"id": "VARCHAR", "species": "VARCHAR", "sure": "DOUBLE"},
    batch_format="pandas",
    fn_kwargs={"model": str(ROOT / "model.joblib")},
    asset=vd.Asset(deps=[model]),
)
classified.write("published", str(ROOT / "out"))

assets = [measures, model, flowers.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("flowers_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist()[::30]:
        print(f"{row['id']} is a {row['species']} ({row['sure']:.0%})")


if __name__ == "__main__":
    main()
