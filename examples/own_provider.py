"""Typed fields from texts, by a model behind your own provider.

A provider is a class with one method. This one stands for a client of your company's model server;
`provider="openai"` or `"transformers"` need no class. A pydantic model validates each answer, which
becomes a struct column; a row whose answer does not fit is quarantined.
"""

import asyncio
import json
import os
import re
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

import vane_dagster as vd
from vane_dagster.providers.base import Answer, Request

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "orders").absolute()
TEXTS = [
    "Please send 3 lamps to Rome.",
    "I'd like 12 chairs, to Oslo please!",
    "Where is my parcel?",
    "We need 7 desks in Paris by Friday.",
]


class Order(BaseModel):
    """An order, as extracted from a text."""

    item: str
    count: int = Field(gt=0)
    city: str


class HouseModel:
    """Answers requests, many at the same time in one event loop."""

    OPERATIONAL = frozenset({"url"})  # changes no answer, so it is not part of fragment keys

    def __init__(self, model: str, *, url: str) -> None:
        self.url = url  # connect here: this runs once per worker, which stays warm

    async def submit(self, request: Request) -> Answer:
        """Extract number, item and city; a real provider calls its server here."""
        await asyncio.sleep(0.01)
        text = request.messages[-1]["content"]
        found = re.search(r"(\d+) (\w+).*\b(?:to|in) (\w+)", text)
        if found is None:
            return Answer("I can see no order there.", len(text.split()), 6)
        count, item, city = found.groups()
        order = json.dumps({"item": item, "count": int(count), "city": city})
        return Answer(order, len(text.split()), len(order.split()))


@dg.asset
def mails() -> None:
    """The input: four texts."""
    ROOT.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(4), "text": TEXTS}), ROOT / "mails.parquet")


orders = vd.Pipeline("orders", source=vd.parquet(str(ROOT / "*.parquet"), asset=mails), id="id")
orders.prompt(
    "extracted",
    "Which order is in this mail? {text}",
    provider=HouseModel,
    model=vd.Model(
        "house-1",
        options={"url": "https://models.example.com"},
        prices={"prompt": 0.1, "completion": 0.4},
    ),
    system="Answer with JSON.",
    return_format=Order,
    output_column="order",
    include_columns=["text"],
    on_error=vd.Failures("quarantine", max_error_rate=0.5),
)

assets = orders.build_assets()
store = vd.FragmentStore(root=str(ROOT / "store"))
defs = dg.Definitions(
    assets=[mails, assets], resources={"compute": vd.RayCompute(), "store": store}
)

if __name__ == "__main__":
    dg.materialize([mails])
    result = dg.materialize([assets], resources={"compute": vd.RayCompute(), "store": store})
    for row in vd.load("orders/extracted", store=store).to_pylist():
        print(f"{row['order']['count']} {row['order']['item']} to {row['order']['city']}")
    for row in vd.quarantine("orders/extracted", store=store.root).to_pylist():
        print(f"quarantined, id {row['id']}: {row['message']}")
    for event in result.get_asset_materialization_events():
        facts = {name: value.value for name, value in event.materialization.metadata.items()}
        print(f"this run cost {facts['cost']:.6f}")
        print(f"{event.asset_key.path[-1]} computed: {facts['rows_computed']}")
