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
from support.typed_source import (
    ROWS,
    SOURCE_TYPES,
    source,  # noqa: F401  # fixtures
)
from vane_dagster.planning.source_code import pack_source
from vane_dagster.sources import FragmentRule
from vane_dagster.sources.files import listed_file
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.types.schema import plain_type
from vane_dagster.types.sql import bind
from vane_dagster.worker.operators import project
from vane_dagster.worker.protocol import Gather, Project, SourceRows, TableRows, Work
from vane_dagster.worker.source_rows import scan


def list_files(source: Any, partition: str | None, location: str) -> Any:
    """The source's files in one partition."""
    return source.required(source.list_files([partition], location)[partition], partition, location)


def source_rows(
    url: str,
    start: int,
    stop: int,
    schema: pa.Schema,
    file: FileRecord,
    id: str,
    options: dict[str, Any] | None = None,
) -> SourceRows:
    """Rows of a Parquet file."""
    source = pack_source(vd.parquet("unread", storage_options=options))
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


@pytest.mark.parametrize(
    ("columns", "where", "expected"),
    [
        ({"id": "id", "split": "'train'"}, None, {"id": [1, 2], "split": ["train"] * 2}),
        ({"id": "id", "x": "1 + 1", "y": "pi() > 3"}, None,
         {"id": [1, 2], "x": [2, 2], "y": [True] * 2}),
        ({"id": "id", "x": "1"}, "n > 5", {"id": [2], "x": [1]}),
        ({"id": "id"}, "1 > 2", {"id": []}),
    ],
)  # fmt: skip
def test_expressions_that_name_no_column(columns, where, expected, tmp_path):
    table = pa.table({"z": [7, 8], "id": [1, 2], "n": [5, 6]})
    assert in_file_and_in_memory(tmp_path, table, columns, where) == [expected] * 2


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


def test_a_file_that_is_damaged_is_not_taken_for_an_expression_that_fails(source):
    file = listed_file(f"{source.url}/a.parquet", source)
    schema = plain_schema(pq.read_schema(file.url))
    rows = source_rows(file.url, 0, ROWS, schema, file, "id")
    op = Project((("id", "id"), ("x", "upper(lost)")), None)
    with pytest.raises(vd.errors.SourceError, match=r"cannot be read.*Write it again"):
        project(op, rows, [], work(op, rows, schema))


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

    with pytest.raises(vd.errors.SourceError, match="was replaced while the run read it"):
        scan(rows, work(Gather(), rows, schema))
    with pytest.raises(vd.errors.SourceError, match="was replaced while the run read it"):
        project(op, rows, [], work(op, rows, schema))


def work(op: Any, rows: SourceRows, schema: pa.Schema) -> Work:
    return Work("here", op, (rows,), schema, "id", None, True)
