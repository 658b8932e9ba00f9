"""Quarantine: rows that could not be computed, stored beside the parts with their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vane_dagster.errors import described
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.part_file import read_part, write_beside

SUFFIX = ".faults.parquet"
PARENTS = "parents"
TRANSIENT = "transient"
_MAX_SHOWN_CHARACTERS = 200
_METADATA = b"vane_faults"


def fault_schema(id_type: pa.DataType, parents: Sequence[pa.Field] = ()) -> pa.Schema:
    """Return the schema of the records of failed rows."""
    return pa.schema(
        [
            ("id", id_type),
            *([(PARENTS, pa.struct(list(parents)))] if parents else []),
            ("stage", pa.string()),
            ("fragment", pa.string()),
            ("error", pa.string()),
            ("message", pa.string()),
            ("traceback", pa.string()),
            ("attempts", pa.int32()),
            (TRANSIENT, pa.bool_()),
            ("run_id", pa.string()),
            ("model", pa.string()),
            ("worker", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
        ]
    )


def attach(table: pa.Table, faults: pa.Table | None) -> pa.Table:
    """Attach error records to a table, to pass them on with the rows."""
    if faults is None or not faults.num_rows:
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, faults.schema) as writer:
        writer.write_table(faults)
    return table.replace_schema_metadata({_METADATA: sink.getvalue().to_pybytes()})


def detach(tables: Sequence[pa.Table]) -> pa.Table | None:
    """Return the concatenated error records that tables carry; None if there are none."""
    held = [m[_METADATA] for table in tables if _METADATA in (m := table.schema.metadata or {})]
    found = [pa.ipc.open_stream(pa.py_buffer(data)).read_all() for data in held]
    return concat_faults(found) if found else None


def concat_faults(found: Sequence[pa.Table]) -> pa.Table:
    """Concatenate records of quarantined rows; earlier releases wrote no parents."""
    return pa.concat_tables(found, promote_options="default")


def write_faults(folder: Location, key: str, faults: pa.Table) -> str:
    """Write the error records of a fragment beside its part."""
    return write_beside(folder, key, SUFFIX, faults, compression="zstd")


def read_faults(folder: Location, manifest: Manifest) -> pa.Table:
    """Read the records of the quarantined rows of a stage in a partition; possibly empty."""
    id = manifest.keys[manifest.input_key]
    found: list[Any] = [fault_schema(manifest.schema.field(id).type).empty_table()]
    for part in manifest.parts:
        if part.faults:
            found.append(read_part(folder, part.faults))
    return concat_faults(found)


def first_faults(folder: Location, manifest: Manifest, limit: int) -> Sequence[str]:
    """Describe the first quarantined rows of a stage in a partition, each in one line."""
    found: list[str] = []
    for name in filter(None, (part.faults for part in manifest.parts)):
        rows = read_part(folder, name, ["id", "error", "message"])
        for row in rows.slice(0, limit - len(found)).to_pylist():
            message = " ".join(described(row["message"], row["error"]).split())
            found.append(f"id {row['id']!r}: {message[:_MAX_SHOWN_CHARACTERS]}")
        if len(found) == limit:
            break
    return found
