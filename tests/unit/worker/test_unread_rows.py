"""Rows that the source could not read, in each operation that reads the source."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import cloudpickle
import pyarrow as pa
import pytest

from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.pipeline.keys import JoinShape, JoinSide
from vane_dagster.retries import Policy
from vane_dagster.sources.base import ROW_ERROR, ROW_ERROR_TYPE, SourceReader
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.quarantine import fault_lines
from vane_dagster.worker.host import Host
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import (
    CallUdf,
    Gather,
    Join,
    Project,
    Reject,
    SourceRows,
    TableRows,
    Work,
)

READ = pa.schema([("id", pa.string()), ("n", pa.int64())])


@dataclass(frozen=True)
class Damaged(SourceReader):
    """Reads rows a to d, of which b and d are damaged."""

    def read(self, fragment, schema, context):
        errors = [(kind, "damaged") for kind in ("ValueError", "TimeoutError")]
        columns = {
            "id": pa.array(list("abcd")),
            "n": pa.array([1, None, 3, None]),
            ROW_ERROR: pa.array([None, errors[0], None, errors[1]], ROW_ERROR_TYPE),
        }
        return pa.table({name: columns[name] for name in (*schema.names, ROW_ERROR)})

    def current(self, file):
        return file


ROWS = SourceRows(
    cloudpickle.dumps(Damaged()),
    FragmentRecord("x", 0, 4, "", 0),
    READ,
    (FileRecord("x", 1, "1"),),
    "id",
)


def tenfold(batch):
    assert batch.column_names == ["id", "n"], "only rows that were read, without their errors"
    return {"ten": [10 * n for n in batch["n"].to_pylist()]}


def work(op, inputs, schema, target=None) -> Work:
    return Work("stage 'p/s', fragment 0", op, inputs, schema, "id", target, True, stage="p/s")


def call(on_error: str) -> CallUdf:
    return CallUdf(
        cloudpickle.dumps({}), None, BatchCall("pyarrow"), None, "one_to_one", 1, ("id",),
        ("ten",), policy=Policy(on_error), max_faults=0,
    )  # fmt: skip


@pytest.fixture
def host(monkeypatch) -> Host:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a host taps
    monkeypatch.setattr(OutputTap, "_instance", None)
    found = Host()
    found.hold(ModelSpec("tenfold", False, b""), tenfold)
    return found


def test_a_row_that_ends_its_workers_may_be_one_failed_row_too_many(host):
    rows = pa.table({"id": [7], "n": [1]})
    given = replace(call("quarantine"), max_faults=1)
    rejecting = Reject(given, "tenfold", "WorkerDied", "ended 2 workers", 2)
    schema = pa.schema([("id", pa.int64()), ("ten", pa.int64())])
    _, report = host.run(work(rejecting, (TableRows(0),), schema), rows)
    assert (report.fault, report.tally.quarantined) == (None, 1)
    rejecting = replace(rejecting, call=call("quarantine"))
    _, report = host.run(work(rejecting, (TableRows(0),), schema), rows)
    assert report.fault.kind == "FailedRowsError"
    assert "ended 2 workers" in report.fault.message


@pytest.fixture
def target(tmp_path) -> PartTarget:
    return PartTarget(StoragePath(str(tmp_path / "parts")), "0" * 40, "id")


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_a_call_quarantines_them(host, target, on_error):
    schema = pa.schema([("id", pa.string()), ("ten", pa.int64())])
    table, report = host.run(work(call(on_error), (ROWS,), schema, target))
    assert report.fault is None
    assert table.to_pydict() == {"id": ["a", "c"], "ten": [10, 30]}
    tally = report.tally
    assert (tally.rows_in, tally.quarantined, tally.unread, tally.filtered) == (4, 2, 2, 0)
    assert tally.faults == 2
    assert (report.part.quarantined, report.part.unread) == (2, 2)
    lines = ["id 'b': ValueError: damaged", "id 'd': TimeoutError: damaged"]
    assert fault_lines(report.faults) == lines
    assert report.faults["transient"].to_pylist() == [False, True]


def test_a_call_that_keeps_failed_rows_has_nulls_for_them(host):
    schema = pa.schema([("id", pa.string()), ("ten", pa.int64()), ("error", pa.string())])
    table, report = host.run(work(call("null"), (ROWS,), schema))
    assert table.column("id").to_pylist() == list("abcd")
    assert table.column("ten").to_pylist() == [10, None, 30, None]
    assert table.column("error").to_pylist() == [
        None, "ValueError: damaged", None, "TimeoutError: damaged"
    ]  # fmt: skip
    assert (report.tally.nulled, report.tally.unread, report.tally.faults) == (2, 2, 2)


def test_slices_of_loaded_rows_quarantine_their_own(host):
    loaded, report = host.run(work(Gather(), (ROWS,), READ))
    assert loaded.column_names == ["id", "n", ROW_ERROR]
    assert report.rows_out == 4
    schema = pa.schema([("id", pa.string()), ("ten", pa.int64())])
    found = []
    for start in (0, 1, 2):
        rows = TableRows(0, start, start + 1, ("id", "n"))
        table, report = host.run(work(call("raise"), (rows,), schema), loaded)
        found.append((table.num_rows, report.tally.rows_in, report.tally.unread))
    assert found == [(1, 1, 0), (0, 1, 1), (1, 1, 0)]


@pytest.mark.parametrize("op", [Gather(), Project((("n", "n"),), "n > 1")])
def test_an_id_that_is_unknown_for_them_is_refused(op, host):
    table, report = host.run(work(op, (replace(ROWS, id="n"),), READ))
    assert table is None
    assert report.fault is not None
    message = report.fault.message
    assert "2 rows of the source could not be read, so no id 'n' is known" in message
    assert message.endswith("; the first error: ValueError: damaged")


def test_a_project_quarantines_them(host, target):
    schema = pa.schema([("id", pa.string()), ("more", pa.int64())])
    op = Project((("id", "id"), ("more", "n + 1")), "n > 1")
    table, report = host.run(work(op, (ROWS,), schema, target))
    assert table.to_pydict() == {"id": ["c"], "more": [4]}
    tally = report.tally
    assert (tally.rows_in, tally.filtered, tally.quarantined, tally.unread) == (4, 1, 2, 2)
    assert report.part.faults


def test_a_join_quarantines_rows_that_match_them(host):
    sizes = pa.table({"id": ["a", "b"], "size": [5, 6]})
    schema = pa.schema([("id", pa.string()), ("size", pa.int64()), ("n", pa.int64())])
    shape = JoinShape("sized", "id", (JoinSide("source", "id", ("id",)),))
    op = Join("left", shape, ("sized", "source"), {"source": (("n", "n"),)})
    table, report = host.run(work(op, (TableRows(0), ROWS), schema), sizes)
    assert table.to_pylist() == [{"id": "a", "size": 5, "n": 1}]
    assert (report.tally.rows_in, report.tally.quarantined, report.tally.unread) == (2, 1, 1)
    inner = replace(op, how="inner")
    table, report = host.run(work(inner, (TableRows(0), ROWS), schema), sizes)
    assert table["id"].to_pylist() == ["a"]
