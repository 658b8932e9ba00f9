"""Captions of photos by a model behind OpenAI's API; a broken file fails only its row.

Large photos are scaled down before they are sent. Needs `pip install
'vane-dagster[openai,images]'` and OPENAI_API_KEY; OPENAI_BASE_URL names another endpoint, such as
that of `vllm serve`, and `VANE_EXAMPLES_VISION_API_MODEL` its model. The same prompt works
with "anthropic", and with "vllm" and "transformers", which load a vision model.
"""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "captions").absolute()
SIZES = {"sunset": (1200, 800), "sea": (300, 200), "forest": (320, 240)}
COLORS = {"sunset": "orange", "sea": "navy", "forest": "darkgreen"}


@dg.asset
def photos() -> None:
    """The input: three photos, one of them large, and a file that is none."""
    from PIL import Image

    (ROOT / "jpg").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        Image.new("RGB", size, COLORS[name]).save(ROOT / "jpg" / f"{name}.jpg")
    (ROOT / "jpg" / "broken.jpg").write_bytes(b"no image")


album = vd.Pipeline("captions", source=vd.images(str(ROOT / "jpg" / "*.jpg"), asset=photos))
captions = album.prompt(
    "captions",
    ["Write a caption for this photo, in at most ten words.", vd.image("image", max_pixels=96_000)],
    provider="openai",
    model=vd.Model(
        os.environ.get("VANE_EXAMPLES_VISION_API_MODEL", "gpt-5-mini"),
        options={"base_url": os.environ.get("OPENAI_BASE_URL")},
        prices={"prompt": 0.25, "completion": 2.0},  # dollars a million tokens
        cost_budget=0.50,  # dollars, after which a run begins nothing more; the next one continues
    ),
    sampling_params={"max_completion_tokens": 1000},
    output_column="caption",
    concurrency=vd.Workers(env_vars=["OPENAI_API_KEY"]),
    on_error=vd.Failures("quarantine", max_error_rate=0.5),
)
captions.write("published", str(ROOT / "out"))

assets = [photos, album.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("captions_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{Path(row['path']).name}: {row['caption']}")
    for row in vd.quarantine(captions, store=store).to_pylist():
        print(f"{Path(row['id']).name}: {row['message']}")


if __name__ == "__main__":
    main()
