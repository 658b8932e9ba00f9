"""Reading source files: what is read of them, and that it is right.

That a column which no stage needs is never read is proved twice: its bytes are destroyed on disk,
so that whoever reads it fails, and the bytes that are read of a file are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import failure, metadata, read_stage, write_source
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import vane_dagster as vd
from vane_dagster.commit.location import Location
from vane_dagster.declare.sql import bind
from vane_dagster.execute.operations import FileRows, Gather, Project
from vane_dagster.execute.scan import scan, scan_projected
from vane_dagster.execute.work import Work
from vane_dagster.plan.fragment import FragmentRule, read_footers
from vane_dagster.plan.listing import list_files
from vane_dagster.plan.source import listed_file

ROWS = 20_000


def destroy(file: Path, column: str) -> None:
    """Overwrites a column's pages; the footer and all other columns stay as they are."""
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
def source(request: pytest.FixtureRequest, tmp_path: Path) -> vd.ParquetSource:
    """A source with a column of text and one of vectors that cannot be read any more."""
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


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


def test_columns_that_no_stage_needs_are_not_read(source, tmp_path, local, materialize):
    """By a project, by a map of the source, and below them; fragments are ranges of row groups."""
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=ROWS // 4)
    projected = docs.project("projected", {"sum": "n + m"}, where="m % 2 = 0")
    mapped = docs.map_batches("mapped", double, schema={"double": "BIGINT"}, columns=["n"])
    docs.join("joined", projected, mapped)

    result = materialize(docs, local)

    assert metadata(result, "mapped")["fragments_computed"] == 4
    joined = read_stage(tmp_path / "store", "docs", "joined")
    assert joined["id"].to_pylist() == list(range(0, ROWS, 2))
    assert joined["sum"].equals(joined["double"])


@pytest.mark.parametrize("column", ["lost", "vectors"])
def test_a_column_that_is_needed_is_read(column, source, local, materialize):
    """So the proof above can fail."""
    docs = vd.Pipeline("docs", source=source, id="id")
    docs.project("projected", [column])
    result = materialize(docs, local, raises=False)
    assert "a.parquet' cannot be read" in failure(result)


def test_a_map_that_names_no_columns_reads_all(source, local, materialize):
    docs = vd.Pipeline("docs", source=source, id="id")
    docs.map_batches("mapped", double, schema={"double": "BIGINT"})
    result = materialize(docs, local, raises=False)
    assert "a.parquet' cannot be read" in failure(result)


class Metered(MemoryFileSystem):
    """Files in memory that count the bytes read of them."""

    protocol = "metered"
    store: ClassVar[dict[str, MemoryFile]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    read: ClassVar[list[int]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("metered://"))

    def _open(self, path: str, mode: str = "rb", **given: Any) -> Any:
        opened = super()._open(path, mode, **given)
        return Meter(opened.getvalue()) if mode == "rb" else opened


class Meter(MemoryFile):
    """Counts what is read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None, None, data)

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        Metered.read.append(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        Metered.read.append(size)
        return size


fsspec.register_implementation("metered", Metered, clobber=True)


@pytest.fixture(scope="module")
def heavy() -> int:
    """Writes a file of which nearly all is one column; gives its size."""
    random = np.random.default_rng(7)
    blobs = pa.array([random.bytes(200) for _ in range(ROWS)])
    table = pa.table({"id": range(ROWS), "n": range(ROWS), "heavy": blobs})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROWS // 2)
    data = sink.getvalue().to_pybytes()
    fsspec.filesystem("metered").pipe_file("/src/a.parquet", data)
    assert len(data) > 200 * ROWS
    return len(data)


@pytest.mark.parametrize(
    ("start", "stop", "project"),
    [
        (0, ROWS, False),  # by row groups
        (ROWS // 2, ROWS, False),
        (100, 5_000, False),  # inside one
        (0, ROWS, True),
        (100, 5_000, True),
    ],
)
def test_few_bytes_are_read_of_a_file_elsewhere(start, stop, project, heavy):
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    url = "metered://src/a.parquet"
    rows = FileRows(url, start, stop, schema, listed_file(url, vd.parquet(url)), "id")
    op = Project((("id", "id"), ("n", "n * 2")), "n >= 0") if project else Gather()
    work = Work("here", op, (rows,), schema, "id", None, True)
    Metered.read.clear()
    table = scan_projected(op, rows, work) if isinstance(op, Project) else scan(rows, work)
    assert table["id"].to_pylist() == list(range(start, stop))
    assert 0 < sum(Metered.read) < heavy / 5


@pytest.mark.parametrize("name", ["a[1]", "a*", "a1"])
@pytest.mark.parametrize("url", ["metered://names", "local"])
def test_a_name_with_glob_characters_is_that_file_alone(name, url, tmp_path):
    """Read inside a row group, which is DuckDB's part: it would take the others too."""
    url = str(tmp_path) if url == "local" else url
    schema = pa.schema([("id", pa.int64())])
    for first, other in enumerate(("a[1]", "a*", "a1")):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": [10 * first, 10 * first + 1, 10 * first + 2]}), sink)
        Location(url).write(f"{other}.parquet", sink.getvalue().to_pybytes())
    file = f"{url}/{name}.parquet"
    rows = FileRows(file, 0, 2, schema, listed_file(file, vd.parquet(file)), "id")
    found = scan(rows, Work("here", Gather(), (rows,), schema, "id", None, True))
    assert found["id"].to_pylist() == {"a[1]": [0, 1], "a*": [10, 11], "a1": [20, 21]}[name]


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
    "list": pa.array([[1], None, []]),
    "large list": pa.array([[1], None, []], pa.large_list(pa.int64())),
    "vector": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
    "vectors": pa.array([[[1, 2]], None, []], pa.list_(pa.list_(pa.float32(), 2))),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("kind", SOURCE_TYPES)
def test_every_type_is_read_as_planned(kind, tmp_path):
    """By row groups, by rows inside one, and through a project: the type that the plan tells."""
    array = SOURCE_TYPES[kind]
    table = pa.table({"id": range(3), "x": array})
    file = write_source(tmp_path / "src", table)
    source = vd.parquet(str(file))
    files = list_files(source, None, "here")
    schema = read_footers(files, source, FragmentRule(10), "here").schema
    expected = array.cast(schema.field("x").type).to_pylist()
    for stop in (3, 2):
        rows = FileRows(
            str(file), 0, stop, schema, listed_file(str(file), vd.parquet(str(file))), "id"
        )
        work = Work("here", Gather(), (rows,), schema, "id", None, True)
        assert scan(rows, work)["x"].to_pylist() == expected[:stop]
        op = Project((("id", "id"), ("x", "x")), None)
        bound = bind(op.columns, None, schema, "here")
        assert bound == schema
        projected = scan_projected(op, rows, work).cast(bound)
        assert projected["x"].to_pylist() == expected[:stop]


def test_one_protocol_at_two_places_is_read_at_the_right_one(tmp_path):
    """A warm worker serves pipelines whose stores differ by endpoint or credentials alone."""
    schema = pa.schema([("id", pa.int64())])
    found = []
    for place in ("a", "b", "a"):
        write_source(tmp_path / place, {"id": [ord(place), 0, 1]})
        options = {"path": str(tmp_path / place), "target_protocol": "file"}
        source = vd.parquet("dir://a.parquet", storage_options=options)
        file = listed_file(source.url, source)
        rows = FileRows(source.url, 0, 1, schema, file, "id", options)
        project = Project((("id", "id"),), None)
        found += scan_projected(project, rows, work(project, rows, schema))["id"].to_pylist()

    assert found == [ord("a"), ord("b"), ord("a")]


def test_a_file_that_was_replaced_since_it_was_planned_is_refused(tmp_path):
    schema = pa.schema([("id", pa.int64())])
    file = str(write_source(tmp_path, {"id": [1, 2, 3]}))
    rows = FileRows(file, 0, 3, schema, listed_file(file, vd.parquet(file)), "id")
    write_source(tmp_path, {"id": [1, 2, 3, 4]})

    with pytest.raises(vd.SourceError, match="was replaced while the run read it"):
        scan(rows, work(Gather(), rows, schema))


def work(op: Any, rows: FileRows, schema: pa.Schema) -> Work:
    return Work("here", op, (rows,), schema, "id", None, True)
