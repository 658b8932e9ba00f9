"""An ONNX model, run by ONNX Runtime; its file is sent to the workers.

ONNX Runtime uses all cores unless the session says otherwise: a worker's share is in
`OMP_NUM_THREADS`.
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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "wines").absolute()
MODEL = ROOT / "model.onnx"


class Grapes:
    """Predicts the grape of a wine from its chemistry."""

    def __init__(self, model: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
        self.session = onnxruntime.InferenceSession(model, options)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        (chances,) = self.session.run(["chances"], {"rows": batch["chemistry"]})
        return {"grape": chances.argmax(axis=1), "sure": chances.max(axis=1)}


@dg.asset
def wines() -> None:
    """The input: the chemistry of 178 wines, a tensor of 13 numbers each."""
    from sklearn.datasets import load_wine

    (ROOT / "wines").mkdir(parents=True, exist_ok=True)
    chemistry = pa.FixedShapeTensorArray.from_numpy_ndarray(load_wine().data.astype("float32"))
    table = pa.table({"id": range(178), "chemistry": chemistry})
    pq.write_table(table, ROOT / "wines" / "all.parquet")


@dg.asset
def model() -> None:
    """The model: a logistic regression, the same each time."""
    import onnx
    from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
    from sklearn.datasets import load_wine
    from sklearn.linear_model import LogisticRegression

    wine = load_wine()
    mean, scale = wine.data.mean(axis=0), wine.data.std(axis=0)
    fitted = LogisticRegression().fit((wine.data - mean) / scale, wine.target)
    weights = {
        "mean": mean,
        "scale": scale,
        "coefficients": fitted.coef_.T,
        "intercepts": fitted.intercept_,
    }
    graph = make_graph(
        [
            make_node("Sub", ["rows", "mean"], ["centred"]),
            make_node("Div", ["centred", "scale"], ["scaled"]),
            make_node("Gemm", ["scaled", "coefficients", "intercepts"], ["scores"]),
            make_node("Softmax", ["scores"], ["chances"]),
        ],
        "grapes",
        [make_tensor_value_info("rows", onnx.TensorProto.FLOAT, [None, 13])],
        [make_tensor_value_info("chances", onnx.TensorProto.FLOAT, [None, 3])],
        [onnx.numpy_helper.from_array(w.astype("float32"), name) for name, w in weights.items()],
    )
    ROOT.mkdir(parents=True, exist_ok=True)
    onnx.save(make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=8), MODEL)


cellar = vd.Pipeline("cellar", source=vd.parquet(str(ROOT / "wines"), asset=wines), id="id")
cellar.map_batches(
    "tasted",
    functools.partial(Grapes, model=vd.local_file(MODEL)),
    schema={"grape": "BIGINT", "sure": "FLOAT"},
    batch_format="numpy",
    asset=vd.Asset(deps=[model]),
).write("published", str(ROOT / "out"))

assets = [wines, model, cellar.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("cellar_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist()[::80]:
        print(f"wine {row['id']} is of grape {row['grape']} ({row['sure']:.2f})")


if __name__ == "__main__":
    main()
