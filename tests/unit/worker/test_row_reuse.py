"""Rows that are known, beside rows that are computed: the result is that of computing all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vane_dagster.errors import DamagedPartError
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.retries import Policy
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.storage.quarantine import write_faults
from vane_dagster.storage.row_records import (
    Outcome,
    RecordedPart,
    parse_code,
    records_schema,
    write_records,
)
from vane_dagster.types.schema import ERROR_COLUMN
from vane_dagster.worker import recorded_rows
from vane_dagster.worker.protocol import (
    Arrange,
    CallUdf,
    RecordGroup,
    Restore,
    RowKeying,
    RowLookup,
    Work,
)
from vane_dagster.worker.recorded_rows import take_rows
from vane_dagster.worker.reports import Computed, Tally
from vane_dagster.worker.retry import RowFault
from vane_dagster.worker.row_errors import fault_table, null_row
from vane_dagster.worker.row_reuse import COMPUTED, DUPLICATE, _KnownPlaces, arrange, restore

INPUT = pa.schema([("id", pa.string()), ("text", pa.string()), ("page", pa.int64())])


@dataclass
class Model:
    """What a stage does with a text: it fails for "bad", drops "none", else makes it upper case."""

    calls: list[str] = field(default_factory=list)

    def outcome(self, text: str) -> str | Exception | None:
        self.calls.append(text)
        if text.startswith("bad"):
            return ConnectionError("passing") if "passing" in text else ValueError("bad")
        return None if text.startswith("none") else text.upper()


def rows(*given_: tuple[str, str]) -> pa.Table:
    found = [{"id": id, "text": text, "page": n} for n, (id, text) in enumerate(given_)]
    return pa.Table.from_pylist(found, schema=INPUT)


@dataclass
class Stage:
    """A stage and its store."""

    folder: Path
    nulls: bool = False
    many: bool = False
    model: Model = field(default_factory=Model)

    @property
    def call(self) -> CallUdf:
        policy = Policy("null" if self.nulls else "quarantine")
        parent = "doc" if self.many else None
        return CallUdf(
            b"", ("text",), BatchCall(), 1, "filter", 1, ("id",), ("upper",), parent, policy=policy
        )

    def work(self, run_id: str = "run") -> Work:
        fields = [("id", pa.string()), ("page", pa.int64()), ("upper", pa.string())]
        fields = (
            [("chunk", pa.string()), ("doc", pa.string()), *fields[1:]] if self.many else fields
        )
        fields += [(ERROR_COLUMN, pa.string())] if self.nulls else []
        keying = RowKeying(("text",), (), "Model", "code", 1)
        id = "chunk" if self.many else "id"
        target = PartTarget(StoragePath(str(self.folder)), run_id.encode().hex().zfill(40), id)
        return Work(
            "here", self.call, (), pa.schema(fields), id, target, False,
            run_id=run_id, stage="docs/m", fragment="f", keying=keying,
        )  # fmt: skip

    def compute(self, table: pa.Table, work: Work) -> tuple[pa.Table, pa.Table | None]:
        made: list[pa.Table] = []
        faults = []
        for place, row in enumerate(table.to_pylist()):
            found = self.model.outcome(row["text"])
            if isinstance(found, Exception):
                transient = isinstance(found, ConnectionError)
                faults.append(RowFault(table.slice(place, 1), found, 1, transient=transient))
                if self.nulls:
                    made.append(null_row(faults[-1], work, self.call))
            elif found is not None:
                own = {"id": row["id"], "page": row["page"], ERROR_COLUMN: None}
                several = [{"upper": found}]
                if self.many:
                    several = [
                        {"upper": each, "doc": row["id"], "chunk": f"{row['id']}-{n}"}
                        for n, each in enumerate(found.split())
                    ]
                records = [own | each for each in several]
                made.append(pa.Table.from_pylist(records, schema=work.schema))
        records = fault_table(faults, work, ["id"], "Model") if faults else None
        empty = work.schema.empty_table()
        return pa.concat_tables([empty, *made]), records

    def run(self, table: pa.Table, known: Any = None, run_id: str = "run") -> Computed:
        """Compute a fragment as the engine does."""
        work = self.work(run_id)
        found = arrange(table, Arrange(keying=work.keying, known=known))
        arranged, count = found.rows, found.report.tally.rows_in
        made, faults = self.compute(arranged.slice(0, count), work)
        work = replace(work, tally=Tally())
        cut = made.num_rows // 2
        pieces = [made.slice(0, cut), made.slice(cut)]
        return restore(pieces, arranged, Restore(self.call, ("upper",), known), work, faults)

    def write(self, computed: Computed, run_id: str = "run") -> RecordedPart:
        target = self.work(run_id).target
        assert target is not None
        faults = computed.fault_records
        name = write_faults(target.folder, target.key, faults) if faults else ""
        assert computed.row_records is not None
        records = write_records(target.folder, target.key, computed.row_records)
        info = write_part(computed.rows, target)
        return RecordedPart(target.folder, info.name, records, name)

    @property
    def id(self) -> str:
        return "doc" if self.many else "id"

    def lookup(self, *parts: RecordedPart, own: bool = True, **options: Any) -> RowLookup:
        _, row_definition = parse_code("code")
        given_ = {"inherits_failures": True, "equal_rows": (row_definition,), **options}
        return RowLookup((RecordGroup(parts, self.id, own),), **given_)


def plain(computed: Computed) -> tuple[Any, ...]:
    """What a result shows, besides where and when rows were computed."""
    faults = computed.fault_records
    found = [] if faults is None else faults.select(["id", "error", "message"]).to_pylist()
    tally = replace(computed.report.tally, workers=(), seconds=0.0)
    return computed.rows.to_pylist(), sorted(found, key=lambda each: each["id"]), tally


TEXTS = st.sampled_from(["a", "b c", "none", "bad", "bad passing", "d", "e f g", ""])
TABLES = st.lists(TEXTS, max_size=8).map(
    lambda texts: rows(*((f"{n}", text) for n, text in enumerate(texts)))
)


KINDS = st.sampled_from([(False, False), (True, False), (False, True)])


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@settings(max_examples=20)
@given(before=TABLES, now=TABLES, kind=KINDS)
def test_known_rows_have_the_outcome_that_they_would_be_computed_with(
    tmp_path_factory, before, now, kind
):
    stage = Stage(tmp_path_factory.mktemp("parts"), *kind)
    part = stage.write(stage.run(before, RowLookup()))
    expected = plain(stage.run(now))
    stage.model.calls.clear()
    reused = stage.run(now, stage.lookup(part), "again")
    assert plain(reused) == expected
    stored = {text for text in before["text"].to_pylist() if text != "bad passing"}
    missing = {*now["text"].to_pylist()} - stored
    assert Counter(stage.model.calls) == Counter(missing)
    assert reused.copied + len(missing) == now.num_rows


def test_records_say_where_a_row_was_first_computed(stage):
    first = stage.write(stage.run(rows(("1", "a")), run_id="first"), "first")
    second = stage.write(
        stage.run(rows(("2", "a"), ("3", "b")), stage.lookup(first), "second"), "second"
    )
    third = stage.run(rows(("4", "b"), ("5", "a")), stage.lookup(second), "third")
    assert third.row_records is not None
    found = third.row_records.select(["id", "run_id", "model", "code", "epoch"]).to_pylist()
    assert [tuple(each.values()) for each in found] == [
        ("4", "second", "Model", "code", 1), ("5", "first", "Model", "code", 1),
    ]  # fmt: skip
    assert (third.copied, third.report.tally.rows_in) == (2, 2)


def test_failures_are_inherited_in_their_own_partition_alone(stage):
    table = rows(("1", "bad"), ("2", "a"))
    part = stage.write(stage.run(table))
    for own, calls in ((True, []), (False, ["bad"])):
        stage.model.calls.clear()
        stage.run(table, stage.lookup(part, own=own))
        assert stage.model.calls == calls
    stage.model.calls.clear()
    stage.run(table, stage.lookup(part, inherits_failures=False))
    assert stage.model.calls == ["bad"]


def test_a_retry_computes_the_failed_rows_of_a_part_alone(tmp_path, stage):
    table = rows(("1", "a"), ("2", "bad"), ("3", "none"), ("4", "bad passing"), ("5", "bad"))
    part = stage.write(stage.run(table, run_id="first"), "first")
    stage.model.calls.clear()
    again = stage.run(table, stage.lookup(part, inherits_failures=False), "again")
    assert stage.model.calls == ["bad", "bad passing"]
    assert plain(again) == plain(Stage(tmp_path).run(table))
    assert again.row_records is not None
    assert again.row_records["run_id"].to_pylist() == ["first", "again", "first", "again", "again"]
    assert again.row_records["outcome"].to_pylist() == [0, 2, 1, 3, 2]


def test_a_part_that_lacks_recorded_rows_is_damaged(stage):
    table = rows(("1", "a"), ("2", "b"))
    computed = stage.run(table)
    part = stage.write(replace(computed, rows=computed.rows.slice(1)))
    with pytest.raises(DamagedPartError, match="lacks rows that its records"):
        stage.run(table, stage.lookup(part))


def test_records_are_in_the_order_of_the_input(stage):
    first = stage.write(stage.run(rows(("1", "b"))))
    part = stage.write(stage.run(rows(("3", "b"), ("2", "a")), stage.lookup(first)), "second")
    assert read_part(part.folder, part.records, ["id"])["id"].to_pylist() == ["3", "2"]


def test_keys_that_share_a_half_are_different() -> None:
    known = _KnownPlaces(5)
    high, low = np.array([1, 1, 1, 1, 2], np.uint64), np.array([5, 5, 6, 6, 5], np.uint64)
    known.look_up(RowLookup((), 0), rows(*[("a", "a")] * 5), high, low)
    assert known.part.tolist() == [COMPUTED, DUPLICATE, COMPUTED, COMPUTED, COMPUTED]
    assert known.record.tolist() == [-1, 0, -1, -1, -1]


IDS = ["a", "b", "c", "d"]
OUTCOMES = [Outcome.OUTPUT, Outcome.FILTERED, Outcome.OUTPUT, Outcome.FAILED]
WORDS = [("c", 0, [3.0]), ("a", 0, [1.0]), ("a", 1, None), ("d", 0, None)]
"""Output rows, of which those of "d" are nulls in the place of a failed row."""


@pytest.fixture
def part(tmp_path) -> RecordedPart:
    folder = StoragePath(str(tmp_path / "store"))
    schema = records_schema(pa.string())
    keys = dict.fromkeys(("key_high", "key_low"), range(4))
    columns = {"id": IDS, "outcome": OUTCOMES, "run_id": ["x", "y", "x", "y"], **keys}
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    records = write_records(folder, "k", pa.Table.from_pylist(rows, schema))
    names = ("id", "n", "values")
    kinds = [pa.string(), pa.int64(), pa.list_(pa.float32(), 1)]
    table = pa.Table.from_pylist(
        [dict(zip(names, row)) for row in WORDS], pa.schema(list(zip(names, kinds)))
    )
    info = write_part(table, PartTarget(folder, "k", "id"))
    return RecordedPart(folder, info.name, records, rows=1000)


@pytest.fixture
def node(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recorded_rows, "worker_folder", lambda kind: tmp_path)


def read(part: RecordedPart, wanted: int = 1) -> Any:
    return recorded_rows.stored_rows(part, "id", ["n", "values"], wanted)


@pytest.mark.parametrize("wanted", [1, 125])
def test_rows_come_in_the_order_that_is_asked_for(tmp_path, part, wanted, node):
    for _ in range(2):
        records, values, count = take_rows(read(part, wanted), np.array([2, 0, 3, 1, 0]))
        assert records["id"].to_pylist() == ["c", "a", "d", "b", "a"]
        assert records["run_id"].to_pylist() == ["x", "x", "y", "y", "x"]
        assert count.tolist() == [1, 2, 0, 0, 2]
        assert values.to_pylist() == [
            {"n": n, "values": v}
            for n, v in [(0, [3.0]), (0, [1.0]), (1, None), (0, [1.0]), (1, None)]
        ]
    assert bool(list(tmp_path.glob("*.used"))) == (wanted == 1)


def test_a_process_keeps_the_rows_of_a_part_mapped(part, monkeypatch, node):
    monkeypatch.setattr(recorded_rows, "_open", {})
    first = read(part)
    assert read(part) is first
    monkeypatch.setattr(recorded_rows, "_MOST_OPEN", 1)
    recorded_rows.stored_rows(part, "id", ["n"], 1)
    assert read(part) is not first


def test_what_a_process_has_long_mapped_is_unmapped_with_the_next(part, monkeypatch, node):
    """Mapped files that were deleted take disk space, and a pool of workers may run for weeks."""
    monkeypatch.setattr(recorded_rows, "_open", {})
    first = read(part)
    for identity, (since, tables) in recorded_rows._open.items():
        recorded_rows._open[identity] = since - 3601, tables
    recorded_rows.stored_rows(part, "id", ["n"], 1)
    assert len(recorded_rows._open) == 1
    assert read(part) is not first
    assert len(recorded_rows._open) == 2


def test_rows_are_read_from_the_part_if_the_node_has_no_room(tmp_path, part, monkeypatch, node):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorded_rows, "write_table", full)
    assert take_rows(read(part), np.array([0]))[2].tolist() == [2]
    assert not list(tmp_path.glob("*/values"))
