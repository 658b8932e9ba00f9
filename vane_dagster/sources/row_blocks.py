"""Division of rows into blocks of a size, and digests of the rows.

Where blocks end depends on the number and size of the rows before. A changed or appended row
changes its own block. An inserted or deleted one also changes those after it; their rows are found
by row keys.

A digest covers the values and types of rows. It is independent of how Arrow divides and encodes
them in memory, and of versions of libraries. Both are part of stored keys: neither may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster.sources.base import FragmentRule

LISTED = FragmentRule(65_536)
"""The blocks of which the identity of a table consists."""
_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows.

    Attributes:
        rows: The rows.
        first: Number of the first row.
        bytes: Their size, which follows from their content.
        digest: Digest of their content, as 40 hex digits.
    """

    rows: pa.Table
    first: int
    bytes: int
    digest: str


def blocks(chunks: Iterable[pa.Table], rule: FragmentRule) -> Iterator[RowBlock]:
    """Divide rows into blocks.

    Args:
        chunks: The rows in order, with plain types. The chunks have no influence on the blocks.
        rule: The size of a block, which ends with the row that reaches it.
    """
    held: list[pa.Table] = []
    first = rows = size = 0
    for chunk in chunks:
        sizes = np.zeros(len(chunk), np.int64)
        for column in chunk.columns:
            sizes += _sizes(_combined(column))
        total = np.cumsum(sizes)
        start, before = 0, 0
        while start < len(chunk):
            last = min(
                start + rule.rows - rows - 1,
                int(np.searchsorted(total, before + rule.bytes - size)),
            )
            is_end, stop = last < len(chunk), min(last + 1, len(chunk))
            held.append(chunk.slice(start, stop - start))
            rows, size = rows + stop - start, size + int(total[stop - 1]) - before
            start, before = stop, int(total[stop - 1])
            if is_end:
                yield _block(held, first, size)
                first, held, rows, size = first + rows, [], 0, 0
    if held:
        yield _block(held, first, size)


def content_digest(table: pa.Table) -> str:
    """Return a digest of the schema and the rows of a table with plain types, as 40 hex digits."""
    state = hashlib.sha256()
    for field, column in zip(table.schema, table.columns):
        state.update(f"{len(field.name)} {field.name} {field.type} {len(column)}\n".encode())
        _feed(state, _combined(column))
    return state.hexdigest()[:40]


def _block(held: list[pa.Table], first: int, size: int) -> RowBlock:
    rows = pa.concat_tables(held)
    return RowBlock(rows, first, size, content_digest(rows))


def _combined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    if not column.num_chunks:
        return pa.array([], column.type)
    return pa.concat_arrays(column.chunks)


def _feed(state: Any, array: pa.Array) -> None:
    """Add the values of an array to a digest."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _feed(state, array.storage)
        return
    if pa.types.is_null(kind):
        return
    if array.null_count:
        state.update(b"n")
        state.update(np.packbits(_is_valid(array)).data)
        array = array.drop_null()
    else:
        state.update(b"v")
    if pa.types.is_boolean(kind):
        state.update(np.packbits(array.to_numpy(zero_copy_only=False)).data)
    elif pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten()):
            state.update(f"{len(field.name)} {field.name}\n".encode())
            _feed(state, child)
    elif pa.types.is_fixed_size_list(kind):
        _feed(state, array.flatten())
    elif _is_variable(kind):
        offsets = _offsets(array)
        state.update(np.diff(offsets).astype("<i8").data)
        low, high = int(offsets[0]), int(offsets[-1])
        if _is_bytes(kind):
            if high > low:
                state.update(memoryview(array.buffers()[2])[low:high])
        elif pa.types.is_map(kind):
            _feed(state, array.keys.slice(low, high - low))
            _feed(state, array.items.slice(low, high - low))
        else:
            _feed(state, array.values.slice(low, high - low))
    elif len(array):
        width = kind.bit_width // 8
        values = memoryview(array.buffers()[1]).cast("B")
        state.update(values[array.offset * width : (array.offset + len(array)) * width])


def _sizes(array: pa.Array) -> _Counts:
    """Return the bytes of each row, the same for equal rows in any array."""
    kind, count = array.type, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if pa.types.is_null(kind):
        return np.zeros(count, np.int64)
    if pa.types.is_struct(kind):
        sizes = np.zeros(count, np.int64)
        for child in array.flatten():
            sizes += _sizes(child)
        return sizes
    if pa.types.is_fixed_size_list(kind):
        child = array.values.slice(array.offset * kind.list_size, count * kind.list_size)
        inner = _sizes(child).reshape(count, kind.list_size).sum(axis=1, dtype=np.int64)
    elif _is_variable(kind):
        offsets = _offsets(array)
        if _is_bytes(kind):
            inner = np.diff(offsets).astype(np.int64)
        else:
            low, high = int(offsets[0]), int(offsets[-1])
            parts = (array.keys, array.items) if pa.types.is_map(kind) else (array.values,)
            inner = np.zeros(count, np.int64)
            for part in parts:
                above = np.cumsum(np.concatenate([[0], _sizes(part.slice(low, high - low))]))
                inner += above[offsets[1:] - low] - above[offsets[:-1] - low]
        inner = inner + 4
    else:
        return np.full(count, max(1, kind.bit_width // 8), np.int64)
    return np.where(_is_valid(array), inner, 0) if array.null_count else inner


def _is_valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _is_variable(kind: pa.DataType) -> bool:
    return _is_bytes(kind) or bool(pa.types.is_list(kind) or pa.types.is_map(kind))


def _offsets(array: pa.Array) -> _Counts:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    start = array.offset * 4
    return np.frombuffer(buffer, np.int32, len(array) + 1, start).astype(np.int64)
