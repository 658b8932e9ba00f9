"""Quarantine: rows that could not be computed, stored beside the parts with their errors.

If a run gives a partition up, its first failed rows are stored in
``<stage>/failed/<partition>/<sequence>-<content>-<number>.parquet``. Sequence and content belong to
the manifest in force, so the next commit outdates the file. The number counts the runs since that
commit that had too many failed rows, and those that found parts lost. The next run computes these
rows again.
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
    folder.write(f"{_since(former)}{number:04d}.parquet", encoded(table))


def failed_files(store: Store, pipeline: str, stage: str) -> dict[str, dict[str, StoragePath]]:
    """List the files of the runs that gave partitions up, with their place, by its folder."""
    folders = defaultdict[str, dict[str, StoragePath]](dict)
    for each in store.layers:
        place = each.root.child(pipeline, stage, FAILED)
        for path in place.walk():
            folder, _, name = path.rpartition("/")
            folders[folder][name] = place.child(folder)
    return folders


def last_failed(names: Collection[str], former: ManifestName | None) -> str | None:
    """Return the last of some files that was written while a manifest was in force."""
    return max((name for name in names if name.startswith(_since(former))), default=None)


def times_given_up(names: Collection[str], former: ManifestName | None) -> int:
    """Return how many runs gave a partition up because of failed rows, by the names of files."""
    last = last_failed(names, former)
    return int(last.removeprefix(_since(former)).removesuffix(".parquet")) if last else 0


def read_failed(
    store: Store, pipeline: str, stage: str, partitions: Collection[str | None] | None
) -> dict[str | None, pa.Table]:
    """Read the failed rows of partitions that a run has given up since their last commit."""
    rows_by_key = {}
    for files in failed_files(store, pipeline, stage).values():
        name, place = max(files.items())
        key = read_part(place, name, [PARTITION])[PARTITION][0].as_py()
        if partitions is None or key in partitions:
            last = last_failed(files, store.latest(pipeline, stage, [key]).get(key))
            if last is not None:
                rows_by_key[key] = read_part(files[last], last)
    return rows_by_key


def _since(former: ManifestName | None) -> str:
    """Return what the names of files begin with that are written while a manifest is in force."""
    return f"{former.sequence:08d}-{former.content}-" if former else "none-"
