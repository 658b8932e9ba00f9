"""Texts classified by a language model, with checks of its answers.

The prompt explains the labels to the model. Every run compares known answers, and a custom
check verifies the distribution of labels. Runs on a laptop: `pip install
'vane-dagster[transformers]'`. `VANE_EXAMPLES_MODEL` names another model, `VANE_EXAMPLES_PROVIDER`
another provider: vllm restricts the model to the labels.
"""

import os
import shutil
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "comments").absolute()
LABELS = {
    "praise": "the writer is glad about something",
    "complaint": "something is broken, late or wrong",
    "question": "the writer wants to know something",
}
TEXTS = [
    "Thank you, the chair is lovely!",
    "The chair came with three legs.",
    "Can I order the chair in green?",
    "Best shop in town.",
    "I have been waiting for five weeks.",
    "Do you deliver to Norway?",
]


@dg.asset
def comments() -> None:
    """The input: what customers wrote."""
    (ROOT / "comments").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, ROOT / "comments" / "all.parquet")


desk = vd.Pipeline("desk", source=vd.parquet(str(ROOT / "comments"), asset=comments), id="id")
labelled = desk.classify(
    "labelled",
    "text",
    LABELS,
    provider=os.environ.get("VANE_EXAMPLES_PROVIDER", "transformers"),
    model=os.environ.get("VANE_EXAMPLES_MODEL", "Qwen/Qwen2.5-0.5B-Instruct"),
    output_column="label",
    include_columns=["text"],
    gpus=1 if shutil.which("nvidia-smi") else 0,
    # An answer that is not one of the labels is an error of its row.
    on_error=vd.Failures("quarantine", max_error_rate=0.2),
    asset=vd.Asset(
        checks=[
            vd.checks.Golden({"id": [1, 2], "label": ["complaint", "question"]}, severity="WARN")
        ]
    ),
)
labelled.project("labels", ["text", "label"]).write("published", str(ROOT / "out"))


@dg.asset_check(asset=labelled.key)
def no_label_takes_all(labelled: pa.Table) -> dg.AssetCheckResult:
    """Whether no label has more than two thirds of the rows."""
    counts = {
        each["values"]: each["counts"] for each in pc.value_counts(labelled["label"]).tolist()
    }
    passed = max(counts.values()) <= 2 / 3 * labelled.num_rows
    return dg.AssetCheckResult(passed=passed, metadata=counts)


assets = [comments, desk.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, asset_checks=[no_label_takes_all], resources=resources)


def main() -> None:
    result = dg.materialize([*assets, no_label_takes_all], resources=resources)
    for done in result.asset_materializations_for_node("desk_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for found in result.get_asset_check_evaluations():
        if found.check_name in ("golden", "no_label_takes_all"):
            print(found.check_name, "passed" if found.passed else f"failed: {found.description}")
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['label']:10} {row['text']}")


if __name__ == "__main__":
    main()
