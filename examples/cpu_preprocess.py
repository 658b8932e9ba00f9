"""CPU preprocessing by a function before a model: the next rows are prepared while the model runs.

These are two stages, so each has the resources that it needs, and an edit of the model does not
repeat the preprocessing. Rows between them stay in shared memory.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "mails").absolute()
HTML = re.compile(r"<[^>]+>")


def prepare(batch: pd.DataFrame) -> pd.DataFrame:
    """Strips the markup and counts the words; the id comes along by itself."""
    text = batch["html"].str.replace(HTML, " ", regex=True).str.split().str.join(" ")
    return pd.DataFrame({"text": text.str.lower(), "words": text.str.count(" ") + 1})


class Urgency:
    """Scores texts with a vocabulary that is loaded once; put your model here."""

    def __init__(self, weights: dict[str, float]) -> None:
        from sklearn.feature_extraction.text import CountVectorizer

        self.counter = CountVectorizer(vocabulary=list(weights), binary=True)
        self.weights = list(weights.values())

    def __call__(self, batch: pd.DataFrame) -> dict[str, Any]:
        return {"urgency": self.counter.transform(batch["text"]) @ self.weights}


@dg.asset
def inbox() -> None:
    """The input: 300 mails in HTML."""
    lines = ["<p>Please <b>reply</b> today</p>", "<i>Our</i> newsletter", "Server down, reply NOW"]
    (ROOT / "inbox").mkdir(parents=True, exist_ok=True)
    mails = pd.DataFrame({"id": range(300), "html": [lines[i % 3] for i in range(300)]})
    mails.to_parquet(ROOT / "inbox" / "mails.parquet")


mails = vd.Pipeline("mails", source=vd.parquet(str(ROOT / "inbox"), asset=inbox), id="id")
prepared = mails.map_batches(
    "prepared",
    prepare,
    schema={"text": "VARCHAR", "words": "BIGINT"},
    batch_format="pandas",
    concurrency=vd.Workers(num_cpus=1),
)
scored = prepared.map_batches(
    "scored",
    functools.partial(Urgency, weights={"reply": 1.0, "today": 1.0, "down": 3.0, "now": 2.0}),
    schema={"urgency": "DOUBLE"},
    columns=["text"],
    batch_format="pandas",
    batch_size=128,
)
mails.join("joined", prepared, scored).write("published", str(ROOT / "out"))

assets = [inbox, mails.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("mails_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").slice(0, 3).to_pylist():
        print(f"urgency {row['urgency']:.0f}: {row['text']} ({row['words']} words)")


if __name__ == "__main__":
    main()
