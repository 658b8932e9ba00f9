"""Daily documents summarised by vLLM, in the worker itself.

The engine gets all rows at once. Their prompts begin with the same long instruction, which the
engine computes once. Needs `pip install 'vane-dagster[vllm]'`; `VANE_EXAMPLES_MODEL` names another
model, from the Hugging Face hub or a folder.
"""

import os
import shutil
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "reports").absolute()
MODEL = os.environ.get("VANE_EXAMPLES_MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
DAYS = dg.DailyPartitionsDefinition("2026-03-01", end_date="2026-04-01")
LINES = [
    "Pump {n} stopped at 4:10 with a hot bearing. The night shift changed the bearing and ran it "
    "for an hour. It holds its temperature.",
    "Line {n} stood still for twenty minutes since the labels had run out. Nobody had ordered new "
    "ones. We took labels from the other hall.",
    "Guests from the town saw hall {n}. They asked about noise at night, and were told that the "
    "new doors come in May.",
]
ASKED = """You write the morning bulletin of a factory. Summarise the report below for readers who
have ten seconds.
- One sentence, of at most twenty words, in the past tense.
- Say first what happened, then what was done about it, then what is still open.
- Keep numbers, times and the names of machines as they are; leave people out.
- Add nothing that the report does not say, and no heading.

Report {id}: {text}"""


@dg.asset(partitions_def=DAYS, backfill_policy=dg.BackfillPolicy.single_run())
def reports() -> None:
    """The input: a file for each day."""
    for day in dg.AssetExecutionContext.get().partition_keys:
        texts = [line.format(n=int(day[-2:])) for line in LINES]
        (ROOT / "reports" / day).mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": range(len(texts)), "text": texts})
        pq.write_table(table, ROOT / "reports" / day / "all.parquet")


bulletin = vd.Pipeline(
    "bulletin",
    source=vd.parquet(str(ROOT / "reports" / "{partition_key}"), asset=reports),
    id="id",
    partitions_def=DAYS,
)
summaries = bulletin.prompt(
    "summaries",
    ASKED,
    provider="vllm",
    model=vd.Model(
        MODEL,
        options={
            "engine_kwargs": {
                "max_model_len": 4096,
                # For a quick start anywhere; leave both out if the model has its own GPU.
                "enforce_eager": True,
                "kv_cache_memory_bytes": 2**30,
            }
        },
    ),
    sampling_params={"temperature": 0, "max_tokens": 48},
    output_column="summary",
    include_columns=["text"],
    gpus=1 if shutil.which("nvidia-smi") else 0,
)
summaries.write("published", str(ROOT / "out" / "{partition_key}"))

assets = [reports, bulletin.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    days = {"start": "2026-03-02", "end": "2026-03-03"}
    tags = {f"dagster/asset_partition_range_{end}": day for end, day in days.items()}
    result = dg.materialize(assets, resources=resources, tags=tags)
    for event in result.get_asset_materialization_events():
        if event.asset_key == summaries.key:
            facts = {name: value.value for name, value in event.materialization.metadata.items()}
            print(event.partition, "summaries computed:", facts["rows_computed"])
    for day in days.values():
        rows = pq.read_table(ROOT / "out" / day).to_pylist()
        usage = [row["summary_usage"] for row in rows]
        read, cached = (sum(u[f"{kind}_tokens"] for u in usage) for kind in ("prompt", "cached"))
        print(f"{read} tokens read, {cached / read:.0%} of them from the engine's cache")
        for row in rows:
            print(f"{day} {row['id']}: {row['summary']}")


if __name__ == "__main__":
    main()
