"""Reading source files: what is read of them, and that it is right.

The bytes of columns that no stage needs are destroyed on disk, so that whoever reads them fails.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import write_source
from support.in_process import committed, compute
from vane_dagster.errors import SourceError
from vane_dagster.planning.source_code import pack_source
from vane_dagster.sources import FragmentRule
from vane_dagster.sources.files import listed_file
from vane_dagster.sources.parquet import ParquetSource
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.types.schema import plain_type
from vane_dagster.types.sql import bind
from vane_dagster.worker.operators import project
from vane_dagster.worker.protocol import Gather, Project, SourceRows, TableRows, Work
from vane_dagster.worker.source_rows import scan

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


def list_files(source: Any, partition: str | None, location: str) -> Any:
    return source.required(source.list_files([partition], location)[partition], partition, location)


def source_rows(
    url: str,
    start: int,
    stop: int,
    schema: pa.Schema,
    file: FileRecord,
    id: str,
) -> SourceRows:
    source = pack_source(vd.parquet("unread"))
    return SourceRows(source, FragmentRecord(url, start, stop, "", 0), schema, (file,), id)


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, ROWS), (ROWS // 2, ROWS), (100, 1_500)], ids=["all", "groups", "inside"]
)
def test_columns_that_are_not_needed_are_not_read(start, stop, elsewhere, source, tmp_path):
    url = f"{source.url}/a.parquet"
    if elsewhere:
        data = Path(url).read_bytes()
        url = f"memory://{tmp_path.name}/a.parquet"
        fsspec.filesystem("memory").pipe_file(url, data)
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    rows = source_rows(url, start, stop, schema, listed_file(url, vd.parquet(url)), "id")
    op = Project((("id", "id"), ("n", "n * 2")), "n >= 0")
    for found in (project(op, rows, [], work(op, rows, schema))[0],
                  scan(rows, work(Gather(), rows, schema))):  # fmt: skip
        assert found["id"].to_pylist() == list(range(start, stop))


@pytest.mark.parametrize("kind", SOURCE_TYPES)
def test_every_type_is_kept_by_reading_and_by_a_project(kind, tmp_path):
    assert_kept(SOURCE_TYPES[kind], tmp_path)


def assert_kept(written: pa.Array, folder: Path) -> None:
    """By row groups, by rows inside one, and through projects of a file and of rows in memory."""
    file = write_source(folder / "src", pa.table({"id": range(3), "x": written}))
    source = vd.parquet(str(file))
    schema = source.split(list_files(source, None, ""), FragmentRule(10), "").schema
    # Parquet itself stores dates of 64 bits and timestamps in seconds as other types.
    array = written.cast(plain_type(pq.read_schema(file).field("x").type))
    assert schema.field("x").type == array.type
    columns = (("id", "id"), ("y", "source.X"), ("n", "id + 1"))
    for start, stop, where in ((0, 3, None), (0, 2, None), (1, 3, None), (0, 3, "id <> 1")):
        rows = source_rows(str(file), start, stop, schema, listed_file(str(file), source), "id")
        left = [i for i in range(start, stop) if where is None or i != 1]
        expected = array.take(pa.array(left))
        read = scan(rows, work(Gather(), rows, schema))
        assert read.column("x").combine_chunks().equals(array.slice(start, stop - start))
        op = Project(columns, where)
        bound = bind(op.columns, where, schema, "here")
        assert bound.field("y").type == array.type
        for given_rows, tables in ((rows, []), (TableRows(0), [read])):
            found, *_ = project(op, given_rows, tables, work(op, given_rows, schema))
            assert found.column("y").combine_chunks().equals(expected)
            assert found.cast(bound).column("n").to_pylist() == [i + 1 for i in left]


def in_file_and_in_memory(
    tmp_path: Path, table: pa.Table, columns: dict[str, str], where: str | None = None
) -> list[Any]:
    """What a project makes of rows in a file, and of the same rows in memory: rows or an error."""
    file = str(write_source(tmp_path, table))
    op = Project(tuple(columns.items()), where)
    rows = source_rows(
        file, 0, table.num_rows, table.schema, listed_file(file, vd.parquet(file)), "id"
    )
    found: list[Any] = []
    for given_rows, tables in ((rows, []), (TableRows(0), [table])):
        try:
            found.append(
                project(op, given_rows, tables, work(op, rows, table.schema))[0].to_pydict()
            )
        except vd.errors.SchemaError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(("where", "ids"), [("isnan(x)", [3]), ("x < 0.5", [1, 2])])
def test_filters_see_nan(where, ids, tmp_path):
    """Statistics of Parquet leave it out."""
    table = pa.table({"id": [1, 2, 3, 4], "x": [0.1, 0.2, math.nan, None]})
    expected = {"id": ids, "nan": [row == 3 for row in ids]}
    found = in_file_and_in_memory(tmp_path, table, {"id": "id", "nan": "isnan(x)"}, where)
    assert found == [expected] * 2


@pytest.mark.parametrize(
    ("columns", "where", "label"),
    [
        ({"id": "id", "x": "s::INT"}, None, "column 'x' = 's::INT'"),
        ({"id": "id", "y": "n", "x": "CASE WHEN n > 5 THEN error('too large') END"}, None,
         "column 'x' = \"CASE"),
        ({"id": "id", "x": "s"}, "s::INT > 0", "where = 's::INT > 0'"),
        ({"id": "id", "x": "9223372036854775807 + n"}, None, "column 'x' ="),
    ],
)  # fmt: skip
def test_an_expression_that_fails_for_a_row_is_named(columns, where, label, tmp_path):
    """The file is whole, and need not be written again."""
    table = pa.table({"id": [1, 2], "n": [5, 6], "s": ["1", "a"]})
    for error in in_file_and_in_memory(tmp_path, table, columns, where):
        assert error.startswith(f"here: {label}")
        assert "fails for the value of a row" in error
        assert "again" not in error


def test_an_expression_over_a_type_that_sql_widens(tmp_path):
    halves = pa.array([[0.5, 1.5], None, [2.5, 3.5]], pa.list_(pa.float16(), 2))
    moments = pa.array([1, None, 3], pa.timestamp("ms", "Europe/Berlin"))
    file = write_source(tmp_path, pa.table({"id": range(3), "v": halves, "t": moments}))
    source = vd.parquet(str(file))
    schema = source.split(list_files(source, None, ""), FragmentRule(10), "").schema
    rows = source_rows(str(file), 0, 3, schema, listed_file(str(file), source), "id")
    columns = (("id", "id"), ("first", "v[1]"), ("twice", "[v, v]"), ("ms", "epoch_ms(t)"))
    op = Project(columns, None)
    bound = bind(columns, None, schema, "here")
    for given_rows, tables in ((rows, []), (TableRows(0), [scan(rows, work(op, rows, schema))])):
        found = project(op, given_rows, tables, work(op, given_rows, schema))[0].cast(bound)
        assert found["first"].to_pylist() == [0.5, None, 2.5]
        assert found["twice"].to_pylist()[0] == [[0.5, 1.5], [0.5, 1.5]]
        assert found["ms"].to_pylist() == [1, None, 3]


def test_a_file_that_was_replaced_since_it_was_planned_is_refused(tmp_path):
    schema = pa.schema([("id", pa.int64()), ("d", pa.duration("s"))])
    given = pa.table({"id": range(9), "d": range(9)}).cast(schema)
    file = str(write_source(tmp_path, given))
    rows = source_rows(file, 3, 9, schema, listed_file(file, vd.parquet(file)), "id")
    op = Project((("id", "id"), ("d", "d")), None)
    write_source(tmp_path, given.slice(0, 5))

    with pytest.raises(vd.errors.SourceError, match="was replaced after it was listed"):
        scan(rows, work(Gather(), rows, schema))
    with pytest.raises(vd.errors.SourceError, match="was replaced after it was listed"):
        project(op, rows, [], work(op, rows, schema))


def work(op: Any, rows: SourceRows, schema: pa.Schema) -> Work:
    return Work("here", op, (rows,), schema, "id", None, True)


# Runs

REUSE = vd.Reuse(version="1")


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


@pytest.mark.parametrize("source", ["several row groups"], indirect=True)
def test_columns_that_no_stage_needs_are_not_read(source, store):
    """By a project, by a map of the source, and below them; fragments are ranges of row groups."""
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=ROWS // 4)
    projected = docs.project("projected", {"sum": "n + m"}, where="m % 2 = 0")
    mapped = docs.map_batches(
        "mapped", double, schema={"double": "BIGINT"}, columns=["n"], reuse=REUSE
    )
    both = docs.join("joined", projected, mapped)
    both.project("differing", ["sum"], where="sum <> double")
    events = compute(docs, store)
    (differing,), (joined,) = committed(events, "differing"), committed(events, "joined")
    assert (joined.manifest.rows, differing.manifest.rows) == (ROWS // 2, 0)

    whole = vd.Pipeline("whole", source=source, id="id")
    whole.map_batches("mapped", double, schema={"double": "BIGINT"}, reuse=REUSE)
    with pytest.raises(SourceError, match=r"a\.parquet' cannot be read"):  # so the proof can fail
        compute(whole, store)
