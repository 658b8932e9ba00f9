"""Division of rows into blocks, and digests of the rows.

Blocks end at multiples of a number of rows; those of large rows are halved until they are small.
So a changed or appended row changes its own block alone. An inserted or deleted one also changes
those after it; their rows are found by row keys.

A digest covers the values and types of rows. It is independent of how Arrow divides and encodes
them in memory, and of versions of libraries. Both are part of stored keys: neither may change.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster.storage.stored_tables import Piece

BLOCK_ROWS = 1_024
"""The maximum number of rows of a block."""
_BLOCK_BYTES = 8 << 20
_MOST_BYTES = 1 << 30


def blocks(chunks: Iterable[pa.Table]) -> Iterator[tuple[Piece, pa.Table]]:
    """Divide rows into blocks.

    Args:
        chunks: The rows in order, with plain types. Each chunk but the last has a multiple of
            `BLOCK_ROWS`.

    Yields:
        The block, identified by its content, and its rows. Of equal blocks, which are different
        rows, all but the first also have a number in their identity.
    """
    seen: Counter[str] = Counter()
    for chunk in chunks:
        for first in range(0, len(chunk), BLOCK_ROWS):
            for digest, size, rows in _halved(chunk.slice(first, BLOCK_ROWS)):
                count = seen[digest]
                seen[digest] += 1
                identity = f"{digest}~{count}" if count else digest
                yield Piece(identity, len(rows), size, ()), rows


def _halved(rows: pa.Table) -> Iterator[tuple[str, int, pa.Table]]:
    """Yield the digest, size and rows of parts that are small enough."""
    half = len(rows) // 2
    # What is surely too large is not put together.
    content = list(_content(rows)) if rows.nbytes < _MOST_BYTES or not half else []
    size = sum(memoryview(each).nbytes for each in content)
    if half and (size > _BLOCK_BYTES or not content):
        yield from _halved(rows.slice(0, half))
        yield from _halved(rows.slice(half))
    else:
        state = hashlib.sha256()
        for each in content:
            state.update(each)
        yield state.hexdigest()[:40], size, rows


def _content(table: pa.Table) -> Iterator[Any]:
    """Yield the schema and the values of a table as bytes, without a copy if that is possible."""
    for field, column in zip(table.schema, table.columns):
        yield f"{len(field.name)} {field.name} {field.type} {len(column)}\n".encode()
        yield from _values(_combined(column))


def _combined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    if not column.num_chunks:
        return pa.array([], column.type)
    return pa.concat_arrays(column.chunks)


def _values(array: pa.Array) -> Iterator[Any]:
    """Yield the values of an array as bytes."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _values(array.storage)
        return
    if pa.types.is_null(kind):
        return
    if array.null_count:
        yield b"n"
        yield np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).data
        array = array.drop_null()
    else:
        yield b"v"
    if pa.types.is_boolean(kind):
        yield np.packbits(array.to_numpy(zero_copy_only=False)).data
    elif pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten()):
            yield f"{len(field.name)} {field.name}\n".encode()
            yield from _values(child)
    elif pa.types.is_fixed_size_list(kind):
        yield from _values(array.flatten())
    elif _is_bytes(kind) or pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        yield np.diff(offsets).astype("<i8").data
        low, high = int(offsets[0]), int(offsets[-1])
        if _is_bytes(kind):
            if high > low:
                yield memoryview(array.buffers()[2])[low:high]
        elif pa.types.is_map(kind):
            yield from _values(array.keys.slice(low, high - low))
            yield from _values(array.items.slice(low, high - low))
        else:
            yield from _values(array.values.slice(low, high - low))
    elif len(array):
        width = kind.bit_width // 8
        values = memoryview(array.buffers()[1]).cast("B")
        yield values[array.offset * width : (array.offset + len(array)) * width]


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    start = array.offset * 4
    return np.frombuffer(buffer, np.int32, len(array) + 1, start).astype(np.int64)
