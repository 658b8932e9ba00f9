"""Typed fields from texts, and SQL over them.

A pydantic model defines a valid answer. If an answer does not fit, the model is asked again with
the reason; if it still does not fit, the fields are null and `error` has the reason. Runs on a
laptop: `pip install 'vane-dagster[transformers]'`. `VANE_EXAMPLES_MODEL` names another model,
`VANE_EXAMPLES_PROVIDER` another provider: vllm constrains the model's tokens to the schema.
"""

import os
import shutil
from pathlib import Path
from typing import Literal

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "offers").absolute()
TEXTS = [
    "Bicycle, ridden for two summers, 120 euros.",
    "For 45 euros: a desk lamp, still in its box.",
    "An old piano. 600, and you carry it.",
    "Looking for my cat!",
]


class Offer(BaseModel):
    """What is for sale."""

    item: str = Field(max_length=40)
    euros: int = Field(ge=1, le=100_000)
    condition: Literal["new", "used"]


@dg.asset
def adverts() -> None:
    """The input: small ads."""
    (ROOT / "adverts").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, ROOT / "adverts" / "all.parquet")


market = vd.Pipeline("market", source=vd.parquet(str(ROOT / "adverts"), asset=adverts), id="id")
read = market.prompt(
    "read",
    "What is for sale here? {text}",
    system="Answer with JSON: item, euros (a whole number), condition (new or used).",
    provider=os.environ.get("VANE_EXAMPLES_PROVIDER", "transformers"),
    model=os.environ.get("VANE_EXAMPLES_MODEL", "Qwen/Qwen2.5-0.5B-Instruct"),
    return_format=Offer,
    sampling_params={"temperature": 0, "max_tokens": 64},
    output_column="offer",
    gpus=1 if shutil.which("nvidia-smi") else 0,
    on_error=vd.Failures("null", max_error_rate=0.5, explain_errors=1),
)
fields = {"item": "offer.item", "condition": "offer.condition", "cents": "offer.euros * 100"}
read.project("offers", fields, where="offer IS NOT NULL").write("published", str(ROOT / "out"))

assets = [adverts, market.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("market_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['item']}, {row['condition']}: {row['cents'] / 100:.2f} euros")
    for row in vd.load("market/read", store=store).to_pylist():
        if row["offer"] is None:
            print(f"no offer in advert {row['id']}: {row['error']}")


if __name__ == "__main__":
    main()
