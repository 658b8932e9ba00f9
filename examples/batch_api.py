"""Prompts at half the price, through OpenAI's batch API.

A run submits its requests as a batch and ends; the provider answers within a day. The sensor polls
the batches and requests the run that continues. As a script, the example waits for the answers.
Needs `pip install 'vane-dagster[openai]'` and OPENAI_API_KEY; OPENAI_BASE_URL names an endpoint
of another provider with batches, and `VANE_EXAMPLES_API_MODEL` its model.
"""

import os
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "letters").absolute()
LETTERS = ["The kettle leaks.", "Where is my parcel?", "Thank you for the quick repair!"]


@dg.asset
def letters() -> None:
    """The input: letters of customers."""
    (ROOT / "letters").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(LETTERS)), "letter": LETTERS})
    pq.write_table(table, ROOT / "letters" / "all.parquet")


post = vd.Pipeline("post", source=vd.parquet(str(ROOT / "letters"), asset=letters), id="id")
summaries = post.prompt(
    "summaries",
    "Summarise in three words: {letter}",
    provider="openai",
    model=vd.Model(
        os.environ.get("VANE_EXAMPLES_API_MODEL", "gpt-4o-mini"),
        options={"base_url": os.environ.get("OPENAI_BASE_URL"), "api_key_env": "OPENAI_API_KEY"},
        mode="batch",
        prices={"prompt": 0.15, "completion": 0.60},  # as for live requests; batches cost half
    ),
    sampling_params={"temperature": 0, "max_tokens": 20},
    include_columns=["letter"],
    on_error="quarantine",
    concurrency=vd.Workers(env_vars=["OPENAI_API_KEY"]),
)
summaries.write("published", str(ROOT / "out"))

assets = [letters, post.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, sensors=[post.build_batch_sensor()], resources=resources)


def main() -> None:
    config = {"ops": {"post_pipeline": {"config": {"wait": True}}}}
    result = dg.materialize(assets, resources=resources, run_config=config)
    for done in result.asset_materializations_for_node("post_pipeline"):
        facts = {name: value.value for name, value in done.metadata.items()}
        print(done.asset_key.path[-1], "computed:", facts["rows_computed"])
        if done.asset_key == summaries.key:
            print(f"this run cost {facts['cost']:.6f} dollars")
    rows = pq.read_table(ROOT / "out").to_pylist()
    print(sum(row["summaries_usage"]["batch_requests"] for row in rows), "requests in batches")
    for row in rows:
        print(f"{row['letter']} -> {row['summaries']}")


if __name__ == "__main__":
    main()
