"""Which rows a function is called for after a table was edited, reordered or extended."""

import os
import shutil
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "reuse").absolute()
CALLS = ROOT / "calls.txt"


def shout(text: str, calls: str) -> str:
    """Stands for a model."""
    with open(calls, "a") as file:
        file.write(f"{text}\n")
    return text.upper()


docs = vd.Pipeline("docs", source=vd.parquet(str(ROOT / "docs.parquet")), id="id")
clean = docs.project("clean", {"id": "id", "text": "trim(text)"})
clean.map("loud", shout, columns={"text": "text"}, fn_kwargs={"calls": str(CALLS)})


def run(rows: dict[int, str]) -> list[str]:
    """Write the table, run the pipeline, and return the texts that were computed."""
    table = pa.table({"id": list(rows), "text": list(rows.values())})
    pq.write_table(table, ROOT / "docs.parquet")
    CALLS.write_text("")
    resources = {"compute": vd.LocalCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
    dg.materialize([docs.build_assets()], resources=resources)
    return sorted(CALLS.read_text().split())


if __name__ == "__main__":
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    print("first run", run({1: "red", 2: "green", 3: "blue"}))
    print("one row changed", run({1: "red", 2: "pink", 3: "blue"}))
    print("reordered, a new id, a new row", run({3: "blue", 9: "red", 2: "pink", 4: "gold"}))
    print("the same after trim", run({3: "blue ", 9: " red", 2: "pink", 4: "gold"}))
    print("a row twice", run({3: "blue", 9: "red", 2: "pink", 4: "gold", 5: "gold"}))
    # Computed again: only the results of the last run are searched, and it had no "green".
    print("back again", run({1: "green"}))
