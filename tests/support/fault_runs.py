"""Pipelines that faults are injected into, and what is left of their rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from support.doublers import Doubler, double

ROWS = 20


def pipeline(tmp_path: Path, fn=double, **given) -> vd.Pipeline:
    """source -> made -> published, four fragments of five rows."""
    if not (tmp_path / "src").exists():
        write_source(tmp_path / "src", {"id": range(ROWS), "x": range(ROWS)}, row_group_size=5)
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=5)
    schema = {"y": "BIGINT", **({"known": "VARCHAR"} if fn is Doubler else {})}
    made = docs.map_batches("made", fn, schema=schema, **grouped({"max_error_rate": 0.2, **given}))
    made.write("published", f"{tmp_path}/out")
    return docs


def quarantined(tmp_path: Path) -> dict[int, str]:
    rows = vd.quarantine("docs/made", store=vd.FragmentStore(root=f"{tmp_path}/store"))
    return {row["id"]: row["error"] for row in rows.to_pylist()}


def published(tmp_path: Path) -> list[int]:
    files = sorted((tmp_path / "out").glob("*.parquet"))
    return sorted(y for file in files for y in pq.read_table(file)["y"].to_pylist())


def doubles(*without: int) -> list[int]:
    return [2 * x for x in range(ROWS) if x not in without]
