"""A PyTorch predictor over numpy batches, with weights in a file that another asset trains.

The file is sent to the workers, which need no access to it. Its content is part of the fragment
keys, so new weights lead to new predictions.
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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "circle").absolute()
WEIGHTS = ROOT / "weights.pt"


def make_net() -> Any:
    from torch import nn  # imported where it is used: in the workers and in training

    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


class Predictor:
    """Predicts the probability that a point lies inside the unit circle."""

    def __init__(self, weights: str) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.net = make_net().to(self.device).requires_grad_(False)
        self.net.load_state_dict(torch.load(weights, weights_only=True))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        points = torch.tensor(batch["point"], device=self.device)  # of shape (rows, 2)
        return {"id": batch["id"], "inside": self.net(points).sigmoid()[:, 0]}


@dg.asset
def points() -> None:
    """The input: 1,000 random points."""
    (ROOT / "points").mkdir(parents=True, exist_ok=True)
    x, y = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 1000))
    pq.write_table(pa.table({"id": range(1000), "x": x, "y": y}), ROOT / "points" / "all.parquet")


@dg.asset
def weights() -> None:
    """The model: trained here, the same each time."""
    import torch

    torch.manual_seed(0)
    inputs, net = torch.rand(2000, 2) * 3 - 1.5, make_net()
    wanted = (inputs.norm(dim=1) < 1).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(200):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(inputs)[:, 0], wanted)
        net.zero_grad()
        loss.backward()
        optimizer.step()
    ROOT.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), WEIGHTS)


circle = vd.Pipeline("circle", source=vd.parquet(str(ROOT / "points"), asset=points), id="id")
features = circle.project("features", {"point": "[x, y]::FLOAT[2]"})
predicted = features.map_batches(
    "predicted",
    functools.partial(Predictor, weights=vd.local_file(WEIGHTS)),
    schema={"id": "BIGINT", "inside": "FLOAT"},
    batch_format="numpy",
    asset=vd.Asset(deps=[weights]),
)
circle.join("joined", features, predicted).write("published", str(ROOT / "out"))

assets = [points, weights, circle.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("circle_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").slice(0, 4).to_pylist():
        print(f"{np.hypot(*row['point']):.2f} from the centre: inside {row['inside']:.2f}")


if __name__ == "__main__":
    main()
