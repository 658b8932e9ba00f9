"""Row keys: 128 bits over the values of some columns of a row, the same in every process.

A row is encoded as the digest of the columns' types and, for each column, a byte that tells null
from a value, then the value: its bits if all values of the type have the same width, else its
length and its bytes; of a list its length and its items, of a struct its fields. Rows have the same
encoding exactly if their values have the same bits: -0.0 differs from 0.0, and NaNs by their
payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

ENCODING = 1
"""Increment if rows are encoded differently: no row is found under keys of another encoding."""
WIDTH = 16
"""Bytes of a key."""


def row_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.FixedSizeBinaryArray:
    """Compute the keys of rows.

    Args:
        columns: The columns, of one length, in the order in which they count.

    Returns:
        An array of 16 bytes a row.

    Raises:
        TypeError: If a column has a type whose values have no encoding.
    """
    plain = [_plain(column) for column in columns]
    types = "\n".join(str(array.type) for array in plain)
    header = hashlib.blake2b(f"{ENCODING}\n{types}".encode(), digest_size=WIDTH).digest()
    rows = len(plain[0])
    encoded = _joined([_repeated(header, rows), *(_encoded(array) for array in plain)])
    offsets = _offsets(encoded).tolist()
    data = memoryview(encoded.buffers()[2] or b"")
    digest = xxhash.xxh3_128_digest
    keys = b"".join([digest(data[start:end]) for start, end in pairwise(offsets)])
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(WIDTH), rows, [None, pa.py_buffer(keys)])


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array of plain values, without dictionaries and extension types."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pa.types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    return array


def _encoded(array: pa.Array) -> pa.LargeBinaryArray:
    """Encode each value of an array."""
    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return _flags(array)
    if pa.types.is_struct(kind):
        # Values below a null struct are null, whatever their bits are.
        return _joined([_flags(array), *(_encoded(field) for field in array.flatten())])
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.large_list(kind.value_field))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = np.asarray(pc.list_value_length(array).fill_null(0), np.int64)
        items = _encoded(array.flatten())  # without what is below null lists
        ends = np.concatenate(([0], np.cumsum(lengths)))
        return _joined([_flags(array), _fixed(lengths), _binary(items, _offsets(items)[ends])])
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    if _has_bytes(kind):
        values = array.cast(pa.large_binary()).fill_null(b"")
        lengths = np.asarray(pc.binary_length(values), np.int64)
        return _joined([_flags(array), _fixed(lengths), values])
    return _joined([_flags(array), _bits(array)])


def _has_bytes(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )


def _bits(array: pa.Array) -> pa.LargeBinaryArray:
    """Return the bits of values of one width; zeros for null."""
    try:
        width = array.type.byte_width
    except ValueError:
        raise TypeError(f"values of type {array.type} have no row key") from None
    data = array.buffers()[1]
    start = array.offset * width
    found = np.frombuffer(data, np.uint8)[start : start + len(array) * width]
    found = found.reshape(len(array), width)
    if array.null_count:
        found = found.copy()
        found[np.asarray(array.is_null())] = 0
    return _fixed(found)


def _flags(array: pa.Array) -> pa.LargeBinaryArray:
    return _fixed(np.asarray(array.is_valid()).astype(np.uint8))


def _fixed(values: npt.NDArray[Any]) -> pa.LargeBinaryArray:
    """Return the bytes of each row of an array, little-endian."""
    rows = len(values)
    data = np.ascontiguousarray(values)
    width = data.nbytes // rows if rows else 0
    offsets = np.arange(rows + 1, dtype=np.int64) * width
    return _array(offsets, pa.py_buffer(data))


def _repeated(value: bytes, rows: int) -> pa.LargeBinaryArray:
    return _fixed(np.frombuffer(value * rows, np.uint8).reshape(rows, len(value)))


def _binary(values: pa.LargeBinaryArray, offsets: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
    return _array(offsets, values.buffers()[2])


def _array(offsets: npt.NDArray[np.int64], data: pa.Buffer) -> pa.LargeBinaryArray:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), data]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _offsets(array: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    found = np.frombuffer(array.buffers()[1], np.int64)
    return found[array.offset : array.offset + len(array) + 1]


def _joined(arrays: Sequence[pa.LargeBinaryArray]) -> pa.LargeBinaryArray:
    return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.large_binary()))
