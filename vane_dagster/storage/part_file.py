"""Part files: one Parquet file with a stage's output for one fragment. Runs in the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import xxhash

from vane_dagster._lazy import pc, pq
from vane_dagster.storage.column_stats import measure
from vane_dagster.storage.damage import read_whole
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import PartInfo, part_footer, part_name
from vane_dagster.storage.packed_tensors import (
    packed,
    schema_of_rows,
    unpacked,
    without_null_marks,
)
from vane_dagster.storage.sample import sample_rows
from vane_dagster.types.kinds import is_floats
from vane_dagster.types.schema import empty_table
from vane_dagster.types.tensors import is_tensor

DICTIONARY_BYTES = 1 << 17
"""Larger dictionaries cost more time than they save bytes; a column then goes on without."""
_FLOATS = ("FLOAT", "DOUBLE")
_SAMPLED = 1000


@dataclass(frozen=True)
class PartTarget:
    """The location of a part, and how it is written.

    Attributes:
        folder: The folder.
        key: Its fragment key.
        id: Name of the id column; None for rows without one.
        measured: The columns that checks need statistics of.
        compression: The codec of a published file; without one, each column has the best for it,
            and tensors are stored as bytes.
        salt: A text that changes the digest, because a file with the same rows is about to be
            deleted.
        sums: Fields of measured struct columns to add up.
        definition: The definition of the stage that writes it.
        input_id: Name of the column with the ids of its input.
    """

    folder: StoragePath
    key: str
    id: str | None
    measured: tuple[str, ...] = ()
    compression: str | None = None
    salt: str | None = None
    sums: Mapping[str, Sequence[str]] = field(default_factory=dict)
    definition: str = ""
    input_id: str = ""


def write_part(
    table: pa.Table,
    target: PartTarget,
    wasted: Mapping[str, int] | None = None,
    **facts: Any,
) -> PartInfo:
    """Write a table as a part, once and atomically, under its key and the digest of its rows.

    It is on the disk for certain only after `StoragePath.sync`, before a manifest names it.
    """
    ids = pc.min_max(table.column(target.id)).as_py() if target.id else {}  # None without rows
    counted = measure(table, target.measured, target.sums, wasted)
    stored = table if target.compression else without_null_marks(packed(table))
    info = PartInfo(
        target.key, "", table.num_rows, 0, ids.get("min"), ids.get("max"),
        measures=counted, sample=sample_rows(table), input_id=target.input_id, **facts,
    )  # fmt: skip
    data = encoded(
        stored.replace_schema_metadata({"vane": part_footer(info)}),
        target.id,
        dictionary_pagesize_limit=DICTIONARY_BYTES,
        **_column_options(stored, target),
    )
    digest = rows_digest(data, target.salt)
    target.folder.write(part_name(target.key, digest), data, synced=False)
    return replace(info, digest=digest, bytes=data.nbytes)


def write_beside(
    folder: StoragePath,
    key: str,
    suffix: str,
    table: pa.Table,
    id: str | None = None,
    **options: Any,
) -> str:
    """Write a file of a fragment beside its part, before that is written; return its name."""
    data = encoded(table, id, **options)
    name = f"{key}-{xxhash.xxh3_128_hexdigest(data)[:16]}{suffix}"
    folder.write(name, data, synced=False)
    return name


def encoded(table: pa.Table, id: str | None = None, **options: Any) -> memoryview:
    """Return a table as a Parquet file whose pages have checksums; ids that are numbers, packed."""
    if id is not None and pa.types.is_integer(table.schema.field(id).type):
        options["column_encoding"] = {id: "DELTA_BINARY_PACKED"}
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True, write_batch_size=1 << 16, **options)
    return memoryview(sink.getvalue())


def rows_digest(data: memoryview, salt: str | None = None) -> str:
    """Return a digest of a Parquet file's rows and schema, as 16 hex digits.

    The rest of the footer, which names the run, is left out: the same rows written by two runs have
    the same digest.
    """
    footer = int.from_bytes(data[-8:-4], "little") + 8
    state = xxhash.xxh3_128(data[: data.nbytes - footer])
    schema = pq.read_schema(pa.BufferReader(data)).remove_metadata()
    state.update(f"{schema.to_string()}{salt or ''}".encode())
    return state.hexdigest()[:16]


def read_part(folder: StoragePath, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a part, or some of its columns."""
    wanted = None if columns is None else list(columns)

    def read(file: Any) -> pa.Table:
        return pq.read_table(file, columns=wanted, page_checksum_verification=True)

    table = read_whole(folder, name, read).replace_schema_metadata(None)
    return unpacked(table, schema_of_rows(table.schema))


def _column_options(table: pa.Table, target: PartTarget) -> dict[str, Any]:
    """Return the options of `write_table` that name Parquet columns.

    Floats hardly compress, and get the fastest codec. Vectors and tensors hardly repeat, and get no
    dictionary. A column of floats with many distinct values is written as it is in memory, which
    takes a third of the time. Floats and list elements have no statistics, because nothing searches
    parts by them and they take a fourth of the time; readers of published files may use them.
    """
    schema = table.schema
    fields = [field for field in schema_of_rows(schema) if is_tensor(field.type)]
    tensors = {field.name: is_floats(field.type.storage_type) for field in fields}
    sink = pa.BufferOutputStream()
    pq.write_table(empty_table(schema), sink)
    parquet = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    columns = [parquet.column(i) for i in range(len(parquet))]
    floats = {c.path for c in columns if tensors.get(c.path, c.physical_type in _FLOATS)}
    elements = {c.path for c in columns if c.max_repetition_level or c.path in tensors}
    scalars = set() if target.compression else floats.intersection(schema.names) - elements
    varied = {name for name in scalars if _varies(table.column(name))}
    plain = (floats & elements) | tensors.keys() | varied | {target.id}
    codecs = {**dict.fromkeys(floats, "lz4"), **dict.fromkeys(varied, "none")}
    unsearched = elements if target.compression else elements | floats
    paths = [column.path for column in columns]
    return {
        "compression": {p: target.compression or codecs.get(p, "zstd") for p in paths},
        "use_dictionary": [path for path in paths if path not in plain],
        "write_statistics": [path for path in paths if path not in unsearched],
    }


def _varies(column: pa.ChunkedArray) -> bool:
    """Return whether a column has more values than a dictionary is worth, judged by some rows."""
    sample = column.slice(len(column) // 2, _SAMPLED)
    return len(sample.unique()) * 4 > len(sample)
