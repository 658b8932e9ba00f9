"""A pipeline with a model that may be unhealthy."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source

ROWS = 200


def noted(folder: str, name: str) -> int:
    """Add a line to a file; return the number of lines."""
    with open(os.path.join(folder, name), "a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        return len(file.readlines())


def pipeline(tmp_path: Path, fn, arguments=None, **kwargs) -> vd.Pipeline:
    ids = pa.array(range(ROWS), pa.int64())
    if not (tmp_path / "source").exists():
        write_source(tmp_path / "source", {"id": ids, "x": ids})
    docs = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=20
    )
    given = {"folder": str(tmp_path), **(arguments or {})}
    options = {"schema": {"y": "BIGINT", "pid": "BIGINT"}, "batch_size": 10, "version": "1"}
    docs.map_batches("double", fn, fn_constructor_kwargs=given, **grouped({**options, **kwargs}))
    return docs
