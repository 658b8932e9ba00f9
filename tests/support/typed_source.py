"""A source with columns of every type, and unreadable files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster.sources.parquet import ParquetSource

ROWS = 4_000


def destroy(file: Path, column: str) -> None:
    """Overwrite a column's pages; the footer and all other columns stay intact."""
    footer = pq.read_metadata(file)
    data = bytearray(file.read_bytes())
    for i in range(footer.num_row_groups):
        for j in range(footer.num_columns):
            found = footer.row_group(i).column(j)
            if found.path_in_schema.split(".")[0] == column:
                start = found.dictionary_page_offset or found.data_page_offset
                size = found.total_compressed_size
                data[start : start + size] = b"\xff" * size
    file.write_bytes(data)
    with pytest.raises((OSError, ValueError)):
        pq.read_table(file, columns=[column])


@pytest.fixture(params=["one large row group", "several row groups"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ParquetSource:
    """A source with a text column and a vector column that are no longer readable."""
    table = pa.table(
        {
            "id": range(ROWS),
            "lost": [f"t{n % 1000}" for n in range(ROWS)],
            "n": range(ROWS),
            "vectors": pa.array([[n, n] for n in range(ROWS)], pa.list_(pa.float32(), 2)),
            "m": range(ROWS),
        }
    )
    size = ROWS if request.param == "one large row group" else ROWS // 4
    file = write_source(tmp_path / "src", table, row_group_size=size)
    destroy(file, "lost")
    destroy(file, "vectors")
    return vd.parquet(str(tmp_path / "src"))


SOURCE_TYPES = {
    "int": pa.array([1, None, 3]),
    "uint64": pa.array([1, None, 2**64 - 1], pa.uint64()),
    "half": pa.array([0.5, None, 2.5], pa.float16()),
    "decimal": pa.array([1, None, 3], pa.decimal128(10, 2)),
    "large decimal": pa.array([1, None, 3], pa.decimal256(50, 2)),
    "text": pa.array(["a", None, "ä"]),
    "large text": pa.array(["a", None, "c"], pa.large_string()),
    "view of text": pa.array(["a", None, "c"], pa.string_view()),
    "dictionary": pa.array(["a", None, "a"]).dictionary_encode(),
    "bytes": pa.array([b"a", None, b""]),
    "fixed bytes": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "bool": pa.array([True, None, False]),
    "date": pa.array([1, None, 3], pa.date32()),
    "date64": pa.array([86_400_000, None, 0], pa.date64()),
    "time": pa.array([1, None, 3], pa.time64("us")),
    "time32": pa.array([1, None, 3], pa.time32("s")),
    "seconds": pa.array([1, None, 3], pa.timestamp("s")),
    "nanoseconds": pa.array([1, None, 3], pa.timestamp("ns")),
    "zoned": pa.array([1, None, 3], pa.timestamp("us", "Europe/Berlin")),
    "duration": pa.array([1, None, 3], pa.duration("us")),
    "uuid": pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([b"0123456789abcdef", None, bytes(16)], pa.binary(16))
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [1, 2]),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
    ),
    "list": pa.array([[1], None, []]),
    "large list": pa.array([[1], None, []], pa.large_list(pa.int64())),
    "vector": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
    "vectors": pa.array([[[1, 2]], None, []], pa.list_(pa.list_(pa.float32(), 2))),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
}
