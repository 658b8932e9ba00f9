"""A Keras model on TensorFlow over numpy batches; its weights are sent to the workers."""

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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "ring").absolute()
WEIGHTS = ROOT / "ring.weights.h5"


def make_net() -> Any:
    import keras  # imported where it is used: in the workers and in training

    layers = [keras.Input((2,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, "sigmoid")]
    return keras.Sequential(layers)


class Predictor:
    """Predicts the probability that a point lies in the ring."""

    def __init__(self, weights: str) -> None:
        self.net = make_net()
        self.net.load_weights(weights)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        points = np.stack([batch["x"], batch["y"]], axis=1)
        return {"inside": self.net(points)[:, 0]}  # a TensorFlow tensor


@dg.asset
def points() -> None:
    """The input: 1,000 random points."""
    (ROOT / "points").mkdir(parents=True, exist_ok=True)
    x, y = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 1000)).astype("float32")
    pq.write_table(pa.table({"id": range(1000), "x": x, "y": y}), ROOT / "points" / "all.parquet")


@dg.asset
def weights() -> None:
    """The model: trained here, unless it is there already."""
    if WEIGHTS.exists():
        return
    import keras

    keras.utils.set_random_seed(0)
    inputs, net = np.random.default_rng(1).uniform(-1.5, 1.5, (2000, 2)), make_net()
    net.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
    net.fit(inputs, np.hypot(*inputs.T) < 1, batch_size=200, epochs=30, verbose=0)
    ROOT.mkdir(parents=True, exist_ok=True)
    net.save_weights(WEIGHTS)


ring = vd.Pipeline("ring", source=vd.parquet(str(ROOT / "points"), asset=points), id="id")
ring.map_batches(
    "predicted",
    functools.partial(Predictor, weights=vd.local_file(WEIGHTS)),
    schema={"inside": "FLOAT"},
    include_columns=["x", "y"],
    batch_format="numpy",
    asset=vd.Asset(deps=[weights]),
).write("published", str(ROOT / "out"))

assets = [points, weights, ring.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("ring_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").slice(0, 4).to_pylist():
        print(f"{np.hypot(row['x'], row['y']):.2f} from the centre: inside {row['inside']:.1f}")


if __name__ == "__main__":
    main()
