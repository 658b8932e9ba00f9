"""Part files: one Parquet file with a stage's output for one fragment. Runs in the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import xxhash

from vane_dagster._lazy import pc, pq
from vane_dagster.storage.column_stats import measure
from vane_dagster.storage.damage import read_whole
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import PartInfo, part_footer, part_name
from vane_dagster.storage.sample import sample_rows
from vane_dagster.types.tensors import holds_tensors, is_tensor, storage_type

_SAMPLE = 4096
_BYTES = (pa.uint8(), pa.int8())


@dataclass(frozen=True)
class PartTarget:
    """The location of a part, and how it is written.

    Attributes:
        folder: The folder.
        key: Its fragment key.
        id: Name of the id column; None for rows without one.
        measured: The columns that checks need statistics of.
        compression: A codec; without one, each column has the best for it.
        salt: A text that changes the digest, because a file with the same rows is about to be
            deleted.
        sums: Fields of measured struct columns to add up.
    """

    folder: Location
    key: str
    id: str | None
    measured: tuple[str, ...] = ()
    compression: str | None = None
    salt: str | None = None
    sums: Mapping[str, Sequence[str]] = field(default_factory=dict)


def write_part(
    table: pa.Table,
    target: PartTarget,
    wasted: Mapping[str, int] | None = None,
    **facts: Any,
) -> PartInfo:
    """Write a table as a part, once and atomically, under its key and the digest of its rows."""
    low, high = id_range(table.column(target.id)) if target.id else (None, None)
    counted = measure(table, target.measured, target.sums, wasted)
    info = PartInfo(
        target.key, "", table.num_rows, 0, low, high,
        measures=counted, sample=sample_rows(table), **facts,
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"vane": part_footer(info)}),
        sink,
        compression=_codecs(table.schema, target.compression),
        use_dictionary=[*repetitive(table)],
        write_page_checksum=True,
    )
    data = memoryview(sink.getvalue())
    digest = rows_digest(data, target.salt)
    target.folder.write(part_name(target.key, digest), data)
    return replace(info, digest=digest, bytes=data.nbytes)


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


def read_part(folder: Location, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a part, or some of its columns."""
    wanted = None if columns is None else list(columns)

    def read(file: Any) -> pa.Table:
        return pq.read_table(file, columns=wanted, page_checksum_verification=True)

    return read_whole(folder, name, read).replace_schema_metadata(None)


def id_range(ids: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return smallest and largest id in their JSON form; a pair of None without rows."""
    if not len(ids):
        return None, None
    if not (pa.types.is_integer(ids.type) or pa.types.is_string(ids.type)):
        ids = ids.cast(pa.string())
    found = pc.min_max(ids).as_py()
    return found["min"], found["max"]


def _codecs(schema: pa.Schema, declared: str | None) -> dict[str, str]:
    """Return the codec of each column; floats hardly compress, and get the fastest."""
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    return {
        path: declared or ("lz4" if pa.types.is_floating(kind) else "zstd") for path, kind in leaves
    }


def repetitive(table: pa.Table) -> Iterator[str]:
    """Yield the Parquet columns that have a dictionary."""
    for name, column in zip(table.column_names, table.columns):
        if is_tensor(column.type) and column.type.value_type in _BYTES:
            yield f"{name}.list.element"  # Parquet's own numbers have 32 bits at least
        elif _is_repetitive(column):
            yield name


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the Parquet columns of a column, with their paths and types."""
    if holds_tensors(kind):
        kind = storage_type(kind)
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path, kind


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary pays off, based on the first rows.

    A dictionary costs the most for distinct values.
    """
    kind = column.type
    if is_tensor(kind) or pa.types.is_nested(kind) or pa.types.is_null(kind):
        return False
    sample = column.slice(0, _SAMPLE)
    return bool(pc.count_distinct(sample).as_py() * 2 <= len(sample))
