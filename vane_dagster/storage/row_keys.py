"""Row keys: 128 bits over the values of some columns of a row, the same in every process.

A row is encoded as the digest of the columns' types and the encoding of one value of each column.
The values of a list are encoded together, as are the values of each field of the structs in it: a
byte that is 1 if one of them is null, then a byte for each that is 0 if it is; then their bits if
all values of the type have the same width, else their lengths, and their bytes or items. Rows have
the same encoding exactly if their values have the same bits: -0.0 differs from 0.0, and NaNs by
their payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from vane_dagster._lazy import pc

ENCODING = 2
"""Increment if rows are encoded differently: no row is found under keys of another encoding."""
_PIECE_BYTES, _PIECE_ROWS = 3 << 20, (1 << 14, 1 << 16)
"""What is encoded at a time, so that it stays in caches: about these bytes, at most these rows, the
latter of plain numbers."""
_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_BYTES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_NESTED = {"list", "large_list", "fixed_size_list", "struct", "map"}
_Ends = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_Encoding: TypeAlias = "pa.LargeBinaryArray | npt.NDArray[np.void]"
"""A piece of the encoding of each row; an array of bytes if all rows have as many."""


def row_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> npt.NDArray[np.uint64]:
    """Compute the keys of rows; return the first half of each, and the second."""
    rows = len(columns[0])
    keys = np.empty((2, rows), np.uint64)
    widths = _number_widths([_plain(column.slice(0, 0)) for column in columns])
    pieces = 1 + sum(column.nbytes for column in columns) // _PIECE_BYTES
    size = min(_PIECE_ROWS[bool(widths)], 1 + rows // pieces)
    for start in range(0, rows or 1, size):
        plain = [_plain(column.slice(start, size)) for column in columns]
        halves = _murmur3(_words(plain, widths)) if widths else _digests(encoded_rows(plain))
        keys[0, start : start + size], keys[1, start : start + size] = halves
    return keys


def has_keys(kind: pa.DataType) -> bool:
    """Return whether rows with values of a type have keys."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_keys(kind.storage_type)
    if pa.types.is_dictionary(kind):  # Arrow decodes none of views
        return "view" not in str(kind.value_type) and has_keys(kind.value_type)
    if str(kind).partition("<")[0] in _NESTED:
        return all(has_keys(kind.field(place).type) for place in range(kind.num_fields))
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    is_fixed |= pa.types.is_null(kind) or pa.types.is_fixed_size_binary(kind)
    return is_fixed or str(kind) in _BYTES


def encoded_rows(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.LargeBinaryArray:
    """Return the encodings of rows; see `row_keys`."""
    plain = [_plain(column) for column in columns]
    header = _header(plain)
    rows = len(plain[0])
    ends = np.arange(rows + 1)
    values = [encoding for array in plain for encoding in _encoded(array, ends)]
    return _joined([_cut(np.full(rows, np.void(header)), ends), *values])


def _digests(encoded: pa.LargeBinaryArray) -> npt.NDArray[np.uint64]:
    """Return the XXH3 digests of encodings."""
    offsets, data = _offsets(encoded), memoryview(encoded.buffers()[2] or b"")
    rows: Iterable[Any] = (data[start:end] for start, end in pairwise(offsets.tolist()))
    if (width := _same_width(offsets)) is not None:  # copies are faster than views
        rows = np.frombuffer(data, f"V{width}", len(encoded), offsets[0]).tolist()
    digests = b"".join(map(xxhash.xxh3_128_digest, rows))
    return np.frombuffer(digests, "<u8").reshape(-1, 2).T


def _header(columns: Sequence[pa.Array]) -> bytes:
    types = "\n".join(str(array.type) for array in columns)
    return hashlib.blake2b(f"{ENCODING}\n{types}".encode(), digest_size=16).digest()


def _number_widths(columns: Sequence[pa.Array]) -> list[int]:
    """Return the bytes of a value of each column; none unless all are plain numbers."""
    kinds = [pa.uint8() if pa.types.is_boolean(each.type) else each.type for each in columns]
    plain = (pa.types.is_primitive, pa.types.is_decimal)
    widths = [kind.bit_width // 8 if any(is_(kind) for is_ in plain) else 0 for kind in kinds]
    return widths if {*widths} <= {1, 2, 4, 8, 16, 32} else []


def _words(columns: Sequence[pa.Array], widths: Sequence[int]) -> list[_Words]:
    """Return the words of rows: the header, the bits of their values, and which are null.

    Each is an array of all rows, or of one number that is the same in all rows. The widest values
    come first, so that each is aligned.
    """
    rows, header = len(columns[0]), np.frombuffer(_header(columns), np.uint64)
    bits, ends = sum(widths), np.cumsum(sorted(widths, reverse=True))
    words = [*header.reshape(2, 1), *np.zeros((2 * -(-(bits + len(columns)) // 16), 1), np.uint64)]

    def place(values: npt.NDArray[Any], byte: int) -> None:
        """Write the bytes of each row's value into its words."""
        if len(words[byte // 8]) != rows:
            words[byte // 8] = np.zeros(rows, np.uint64)
        unit = values.itemsize
        words[byte // 8].view(values.dtype)[byte % 8 // unit :: 8 // unit] = values

    order = sorted(range(len(columns)), key=lambda number: -widths[number])
    for number, end in zip(order, ends.tolist()):
        array, unit = columns[number], min(widths[number], 8)
        plain = _bits(array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array)
        pieces = np.ascontiguousarray(plain).view(f"u{unit}")
        for piece in range(pieces.shape[1]):
            place(pieces[:, piece], 16 + end - widths[number] + 8 * piece)
        if array.null_count:
            place(np.asarray(array.is_null()).view(np.uint8), 16 + bits + number)
    return words


def _murmur3(words: Sequence[_Words]) -> tuple[_Words, _Words]:
    """Return MurmurHash3_x64_128 (Austin Appleby, public domain) of each row, with the seed 0."""
    low = high = np.zeros(1, np.uint64)
    for first, second in zip(words[::2], words[1::2]):
        low = low ^ _rotated(first * _C1, 31) * _C2
        low = (_rotated(low, 27) + high) * np.uint64(5) + np.uint64(0x52DCE729)
        high = high ^ _rotated(second * _C2, 33) * _C1
        high = (_rotated(high, 31) + low) * np.uint64(5) + np.uint64(0x38495AB5)
    low, high = low ^ np.uint64(8 * len(words)), high ^ np.uint64(8 * len(words))
    low = low + high
    low, high = _mixed(low), _mixed(high + low)
    low += high
    return low, high + low


def _rotated(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _mixed(words: _Words) -> _Words:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = (words ^ (words >> np.uint64(33))) * np.uint64(factor)
    return words ^ (words >> np.uint64(33))


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array of plain values, without dictionaries and extension types."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pa.types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    return array


def _encoded(array: pa.Array, ends: _Ends) -> Iterator[_Encoding]:
    """Yield encodings of values; concatenated, they encode all values of a row."""
    array = _plain(array)
    kind = array.type
    yield from _flags(array, ends)
    if pa.types.is_null(kind):
        return
    if pa.types.is_struct(kind):
        for field in array.flatten():  # values below a null struct are null, whatever they hold
            yield from _encoded(field, ends)
        return
    if pa.types.is_map(kind):
        array = map_entries(array)
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if is_list or pa.types.is_fixed_size_list(kind):
        lengths = np.asarray(pc.list_value_length(array).fill_null(0), np.int64)
        yield _cut(lengths, ends)
        # Flattened, it is without what is below null lists.
        yield from _encoded(array.flatten(), np.concatenate(([0], np.cumsum(lengths)))[ends])
    elif str(kind) in _BYTES:
        values = array.cast(pa.large_binary()).fill_null(b"")
        yield _cut(np.asarray(pc.binary_length(values), np.int64), ends)
        yield _array(_offsets(values)[ends], values.buffers()[2])
    else:
        is_bool = pa.types.is_boolean(kind)
        yield _cut(_bits(array.cast(pa.uint8()) if is_bool else array), ends)


def _flags(array: pa.Array, ends: _Ends) -> Iterator[_Encoding]:
    """Yield whether values of a row are null, and of rows with such values, which."""
    rows = len(ends) - 1
    if not array.null_count:
        yield _cut(np.zeros(rows, np.uint8), np.arange(rows + 1))
        return
    valid = np.asarray(array.is_valid()).astype(np.uint8)
    before = np.concatenate(([0], np.cumsum(valid == 0)))
    has_null = np.diff(before[ends]) > 0
    yield _cut(has_null.astype(np.uint8), np.arange(rows + 1))
    counts = np.diff(ends)
    flags = valid[ends[0] : ends[-1]][np.repeat(has_null, counts)]
    yield _cut(flags, np.concatenate(([0], np.cumsum(counts * has_null))))


def map_entries(array: pa.MapArray) -> pa.ListArray:
    """Return maps as lists of their entries. Arrow's cast crashes on values of type null."""
    entries = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    offsets = pa.py_buffer(np.ascontiguousarray(np.asarray(array.offsets)))
    valid = pa.array(np.asarray(array.is_valid())).buffers()[1] if array.null_count else None
    kind = pa.list_(entries.type)
    return pa.ListArray.from_buffers(kind, len(array), [valid, offsets], children=[entries])


def _bits(array: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of values of one width; zeros for null."""
    try:
        width = array.type.byte_width
    except ValueError:
        raise TypeError(f"values of type {array.type} have no row key") from None
    data = array.buffers()[1]
    start = array.offset * width
    values = np.frombuffer(data, np.uint8)[start : start + len(array) * width]
    values = values.reshape(len(array), width)
    if array.null_count:
        values = values.copy()
        values[np.asarray(array.is_null())] = 0
    return values


def _cut(values: npt.NDArray[Any], ends: _Ends) -> _Encoding:
    """Return the bytes of the values of each row, little-endian."""
    data = np.ascontiguousarray(values)
    width = data.nbytes // len(data) if len(data) else 0
    ends = ends * width
    if same := _same_width(ends):
        return np.frombuffer(data, f"V{same}", len(ends) - 1, ends[0])
    return _array(ends, pa.py_buffer(data))


def _same_width(ends: _Ends) -> int | None:
    """Return the number of bytes of every row; None if rows differ in it, or there are none."""
    widths = np.diff(ends)
    return int(widths[0]) if len(widths) and (widths == widths[0]).all() else None


def _array(offsets: _Ends, data: pa.Buffer) -> pa.LargeBinaryArray:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), data]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _offsets(array: pa.LargeBinaryArray) -> _Ends:
    offsets = np.frombuffer(array.buffers()[1], np.int64)
    return offsets[array.offset : array.offset + len(array) + 1]


def _joined(pieces: Sequence[_Encoding]) -> pa.LargeBinaryArray:
    """Concatenate the pieces of each row; adjacent ones of one width are copied side by side."""
    arrays: list[pa.LargeBinaryArray] = []
    for is_fixed, pieces_of_kind in groupby(pieces, lambda piece: isinstance(piece, np.ndarray)):
        group = [*pieces_of_kind]
        arrays += [_side_by_side(group)] if is_fixed else group
    if len(arrays) == 1:
        return arrays[0]
    return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.large_binary()))


def _side_by_side(pieces: Sequence[npt.NDArray[np.void]]) -> pa.LargeBinaryArray:
    rows = np.empty(len(pieces[0]), [(f"f{n}", piece.dtype) for n, piece in enumerate(pieces)])
    for name, piece in zip(rows.dtype.names or (), pieces):
        rows[name] = piece
    ends = np.arange(len(rows) + 1) * rows.dtype.itemsize
    return _array(ends, pa.py_buffer(rows.view(np.uint8)))
