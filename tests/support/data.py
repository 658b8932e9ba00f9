"""Helpers to write source files and to read rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import vane_dagster as vd

SECRET = "a-secret-that-nobody-writes-down"
"""The secret key of the tests' S3 server."""


def write_source(
    folder: Path, table: pa.Table | Mapping[str, Any], name: str = "a.parquet", **kw: Any
) -> Path:
    """Write a source file; ``row_group_size=`` and similar arguments go to pyarrow."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), folder / name, **kw)
    return folder / name


def partitioned(
    source: Any, keys: Iterable[str], name: str = "docs", **options: Any
) -> vd.Pipeline:
    """Declare a pipeline over a source, or a folder with a folder of Parquet files for each key."""
    import dagster as dg

    import vane_dagster as vd

    if isinstance(source, str | Path):
        source = vd.parquet(f"{source}/{{partition_key}}")
    partitions = dg.StaticPartitionsDefinition([*keys])
    return vd.Pipeline(name, source=source, id="id", partitions_def=partitions, **options)


def same(batch: Any) -> Any:
    return batch


def read_stage(store: Path, pipeline: str, stage: str, partition: str | None = None) -> pa.Table:
    """Read the rows of a stage through its manifest in force, in fragment order."""
    from vane_dagster.storage.filesystem import StoragePath
    from vane_dagster.storage.part_file import read_part
    from vane_dagster.storage.store import Store

    opened = Store(StoragePath(str(store)))
    name = opened.latest(pipeline, stage, [partition])[partition]
    manifest = opened.read(pipeline, stage, partition, name)
    folder = opened.parts(pipeline, stage, partition)
    parts = [read_part(folder, part.name) for part in manifest.parts]
    return pa.concat_tables([manifest.schema.empty_table(), *parts])


def column_of(read: Any, column: str) -> list[Any]:
    import duckdb
    import polars as pl

    if isinstance(read, ds.Dataset):
        read = read.to_table()
    elif isinstance(read, pl.LazyFrame):
        read = read.collect()
    elif isinstance(read, duckdb.DuckDBPyRelation):
        read = read.to_arrow_table()
    elif isinstance(read, pa.RecordBatchReader):
        read = read.read_all()
    return read[column].to_pylist() if isinstance(read, pa.Table) else list(read[column])
