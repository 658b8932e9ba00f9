"""Quarantine: rows that could not be computed, stored beside the parts with their errors.

If a run gives a partition up, its first failed rows are stored in
``<stage>/failed/<partition>/<sequence>-<number>.parquet``, and the next run computes all failed
rows of the partition again. The sequence is that of the manifest in force, so the next commit
outdates the file. The runs that have given the partition up since are numbered.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence

import pyarrow as pa

from vane_dagster.errors import described
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest, ManifestName, PartInfo
from vane_dagster.storage.part_file import encoded, read_part, write_beside
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.store import Store

FAILED = "failed"
"""The folder with the failed rows of runs that gave a partition up."""
PARTITION = "partition"
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
    detached = [pa.ipc.open_stream(pa.py_buffer(data)).read_all() for data in held]
    return concat_faults(detached) if detached else None


def concat_faults(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate records of quarantined rows; earlier releases wrote no parents."""
    return pa.concat_tables(tables, promote_options="default")


def write_faults(folder: StoragePath, key: str, faults: pa.Table) -> str:
    """Write the error records of a fragment beside its part."""
    return write_beside(folder, key, SUFFIX, faults, compression="zstd")


def read_faults(folder: StoragePath, manifest: Manifest) -> pa.Table:
    """Read the records of the quarantined rows of a stage in a partition; possibly empty."""
    id = manifest.keys[manifest.input_key]
    tables = [read_part(folder, part.faults) for part in manifest.parts if part.faults]
    return concat_faults([fault_schema(manifest.schema.field(id).type).empty_table(), *tables])


def first_faults(folder: StoragePath, parts: Sequence[PartInfo], limit: int) -> Sequence[str]:
    """Describe the first quarantined rows of some parts, each in one line."""
    names, columns = (part.faults for part in parts), ["id", "error", "message"]
    tables = (read_part(folder, name, columns) for name in names if name)
    lines = (line for rows in tables for line in fault_lines(rows, limit))
    return list(itertools.islice(lines, limit))


def fault_lines(rows: pa.Table, limit: int = 3) -> list[str]:
    """Describe the first of some failed rows, each in one line."""
    return [
        f"id {row['id']!r}: "
        + " ".join(described(row["message"], row["error"]).split())[:_MAX_SHOWN_CHARACTERS]
        for row in rows.slice(0, limit).to_pylist()
    ]


def write_failed(
    store: Store,
    pipeline: str,
    stage: str,
    partition: str | None,
    former: ManifestName | None,
    number: int,
    tables: Sequence[pa.Table],
) -> None:
    """Store the failed rows of a partition that a run gives up.

    A fragment that started over may have repeated some.
    """
    rows = {row["id"]: row for row in concat_faults(tables).to_pylist()}
    table = pa.Table.from_pylist([*rows.values()], tables[0].schema)
    table = table.append_column(PARTITION, pa.array([partition] * len(table), pa.string()))
    folder = store.root.child(pipeline, stage, FAILED, partition_folder(partition))
    sequence = former.sequence if former else 0
    folder.write(f"{sequence:08d}-{number:04d}.parquet", encoded(table))


def given_up(store: Store, pipeline: str, stage: str) -> dict[str, list[str]]:
    """List the files of the runs that gave partitions up, by the partition's folder."""
    folders = defaultdict[str, list[str]](list)
    for path in sorted(store.root.child(pipeline, stage, FAILED).walk()):
        folder, _, name = path.rpartition("/")
        folders[folder].append(name)
    return folders


def times_given_up(names: Sequence[str], former: ManifestName | None) -> int:
    """Return the number of the last file of a partition since a manifest; 0 without one."""
    start = f"{former.sequence if former else 0:08d}-"
    return max((int(n[len(start) :][:4]) for n in names if n.startswith(start)), default=0)


def read_failed(
    store: Store, pipeline: str, stage: str, partitions: Collection[str | None] | None
) -> dict[str | None, pa.Table]:
    """Read the failed rows of partitions that a run has given up since their last commit."""
    folder, rows_by_key = store.root.child(pipeline, stage, FAILED), {}
    for place, (*_, name) in given_up(store, pipeline, stage).items():
        rows = read_part(folder.child(place), name)
        key = rows[PARTITION][0].as_py()
        if partitions is None or key in partitions:
            former = store.latest(pipeline, stage, [key]).get(key)
            if times_given_up([name], former):
                rows_by_key[key] = rows
    return rows_by_key
