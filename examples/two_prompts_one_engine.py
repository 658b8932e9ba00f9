"""Two prompts over the same texts, answered by one engine, joined and written.

Stages with the same model, provider options and resources share its worker, whatever their prompts.
So the model is loaded once, and stays loaded for later runs and other pipelines. Needs
`pip install 'vane-dagster[vllm]'`; `VANE_EXAMPLES_MODEL` names another model.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "letters").absolute()
TEXTS = [
    "The kettle boils in a minute and looks fine on the table. I would buy it again.",
    "After two weeks the handle broke, and nobody answers my mails.",
    "It is a kettle. It came on Tuesday.",
]
ENGINE: dict[str, Any] = {
    "provider": "vllm",
    "model": vd.Model(
        os.environ.get("VANE_EXAMPLES_MODEL", "Qwen/Qwen2.5-0.5B-Instruct"),
        options={
            "engine_kwargs": {
                "max_model_len": 4096,
                # For a quick start anywhere; leave both out if the model has its own GPU.
                "enforce_eager": True,
                "kv_cache_memory_bytes": 2**30,
            }
        },
    ),
    "gpus": 1 if shutil.which("nvidia-smi") else 0,
}


@dg.asset
def letters() -> None:
    """The input: what customers wrote."""
    (ROOT / "letters").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, ROOT / "letters" / "all.parquet")


service = vd.Pipeline("service", source=vd.parquet(str(ROOT / "letters"), asset=letters), id="id")
moods = service.prompt(
    "moods",
    "Is the writer content? {text}",
    return_format=["content", "neutral", "angry"],
    sampling_params={"temperature": 0},
    output_column="mood",
    **ENGINE,
)
replies = service.prompt(
    "replies",
    "Write a friendly reply of one sentence to this letter. {text}",
    sampling_params={"temperature": 0.7, "max_tokens": 48, "seed": 1},
    output_column="reply",
    include_columns=["text"],
    **ENGINE,
)
service.join(
    "joined", replies, moods, columns={"replies": ["text", "reply"], "moods": ["mood"]}
).write("published", str(ROOT / "out"))

assets = [letters, service.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("service_pipeline"):
        facts = {name: value.value for name, value in done.metadata.items()}
        print(done.asset_key.path[-1], "computed:", facts["rows_computed"])
        if facts.get("model_loads"):
            print("the engine was loaded")
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['mood']:8} {row['text']} -> {row['reply']}")


if __name__ == "__main__":
    main()
