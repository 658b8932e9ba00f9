"""Documents cut into chunks, each embedded: many rows from one, and the way back to the document.

Each chunk has its own id and the id of its document. So a join can collect the chunks of a
document in a list, or add the document to each of its chunks.
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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "manuals").absolute()
MANUALS = {
    "kettle": "Fill the kettle with fresh water. Switch it on. It turns itself off when it boils. "
    "Remove limescale with vinegar once a month.",
    "lamp": "Screw the bulb into the lamp. Turn the knob to dim the light.",
    "radio": "Pull out the antenna. Turn the left knob to find a station. The right knob sets how "
    "loud it is. Take out the batteries before you store the radio.",
}


def split(batch: pa.Table) -> dict[str, Any]:
    """A row for each sentence, with the id of its document; the id of the chunk is made."""
    found = [
        (document, sentence.strip(" .") + ".")
        for document, text in zip(batch["manual"].to_pylist(), batch["text"].to_pylist())
        for sentence in text.split(". ")
    ]
    return {"manual": [row[0] for row in found], "sentence": [row[1] for row in found]}


@functools.lru_cache
def vectorizer(dimensions: int) -> Any:
    """Counts words and pairs of letters, without any training or loading."""
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(n_features=dimensions, analyzer="char_wb", ngram_range=(3, 5))


def embed(batch: pa.Table, dimensions: int) -> dict[str, Any]:
    """A vector of length 1 for each sentence; put your model here."""
    vectors = vectorizer(dimensions).transform(batch["sentence"].to_pylist()).toarray()
    return {"vector": vectors.astype(np.float32)}


@dg.asset
def manuals() -> None:
    """The input: a text for each device."""
    (ROOT / "manuals").mkdir(parents=True, exist_ok=True)
    table = pa.table({"manual": list(MANUALS), "text": list(MANUALS.values())})
    pq.write_table(table, ROOT / "manuals" / "all.parquet")


help_ = vd.Pipeline("help", source=vd.parquet(str(ROOT / "manuals"), asset=manuals), id="manual")
texts = help_.project("texts", ["text"])
chunks = texts.map_batches(
    "chunks",
    split,
    schema={"sentence": "VARCHAR"},
    columns=["text"],
    # Each sentence has an id, such as "kettle-0": the key of the downstream stages.
    cardinality=vd.Children("chunk_id"),
)
vectors = chunks.map_batches(
    "vectors",
    embed,
    schema={"vector": "FLOAT[512]"},
    columns=["sentence"],
    fn_kwargs={"dimensions": 512},
)
# A row for each document, with its chunks as a list; and a row for each chunk, with its document.
whole = help_.join("whole", texts, chunks, children="list")
rows = help_.join("rows", texts, chunks, vectors, children="rows", columns={"texts": []})
rows.write("published", str(ROOT / "out"))

assets = [manuals, help_.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("help_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in vd.load(whole, store=store).to_pylist():
        print(f"{row['manual']}: {len(row['chunks'])} chunks, the first: {row['chunks'][0]}")
    table = pq.read_table(ROOT / "out")
    question = embed(pa.table({"sentence": ["How do I find another radio station?"]}), 512)
    scores = np.stack(table["vector"].to_numpy()) @ question["vector"][0]
    best = table.slice(int(scores.argmax()), 1).to_pylist()[0]
    print(f"found in {best['chunk_id']} of {best['manual']}: {best['sentence']}")


if __name__ == "__main__":
    main()
