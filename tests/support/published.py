"""A pipeline that publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster.sources.parquet import ParquetSource


def docs(
    root: Path | str,
    where: str | None = None,
    columns: Any = ("n", "text"),
    source: ParquetSource | None = None,
    keys: list[str] | None = None,
    fragment_rows: int = 10,
    out: str | None = None,
    **written: Any,
) -> vd.Pipeline:
    """Declare source -> clean -> out; `out` gets the rest."""
    in_folders = written.get("format", "parquet") == "parquet"
    placeholder = "/{partition_key}" if keys and in_folders else ""
    docs = vd.Pipeline(
        "docs",
        source=source or vd.parquet(f"{root}/src" + ("/{partition_key}" if keys else "")),
        id="id",
        fragment_rows=fragment_rows,
        partitions_def=dg.StaticPartitionsDefinition(keys) if keys else None,
    )
    clean = docs.project("clean", columns, where=where)
    clean.write("out", out or f"{root}/out{placeholder}", **grouped(written))
    return docs
