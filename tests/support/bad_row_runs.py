"""A pipeline of functions that fail for some rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from support.arguments import grouped
from support.bad_rows import double
from support.data import write_source

ROWS = 200


def pipeline(tmp_path: Path, rows: int = ROWS, **kwargs) -> vd.Pipeline:
    ids = pa.array(range(rows), pa.int64())
    if not (tmp_path / "source").exists():
        write_source(tmp_path / "source", {"id": ids, "x": ids})
    docs = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=50
    )
    fn = kwargs.pop("fn", double)
    options = {"schema": {"y": "BIGINT"}, "on_error": "quarantine", "max_error_rate": 0.1}
    docs.map_batches("double", fn, **grouped({**options, **kwargs}))
    return docs
