"""Rows found in other partitions: chains of a backfill, neighbours, and forced runs."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import partitioned, write_source
from support.in_process import committed, compute
from support.reused import upper
from vane_dagster.engine import fragment_queue
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.events import WorkerReady
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import parse_part_name
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store
from vane_dagster.tracing.manifest_index import ManifestIndex
from vane_dagster.tracing.walk import trace_back

DAYS = [f"day{n:02}" for n in range(10)]
ROWS = 50


class Snapshots:
    """A table as it was on each of some days, of which a few rows change from day to day."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fragment_rows, self.options = folder, 20, dict[str, Any]()
        self.stage = "upper"
        self.store = Store(StoragePath(str(folder / "store")))
        self.notes = folder / "notes"

    def write(self, day: str, texts: list[str]) -> None:
        target = self.folder / "src" / day
        target.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), target / "a.parquet")

    def write_days(self, days: list[str], changed: int) -> list[list[str]]:
        texts = [f"text {n}" for n in range(ROWS)]
        found = []
        for number, day in enumerate(days):
            for n in range(changed if number else 0):
                texts[(number * changed + n) % ROWS] += "!"
            self.write(day, texts)
            found.append(list(texts))
        return found

    def run(self, days: list[str], **options: Any) -> int:
        self.notes.write_text("")
        source = vd.parquet(str(self.folder / "src" / "{partition_key}"))
        docs = partitioned(source, DAYS, fragment_rows=self.fragment_rows)
        given = {"version": "1", "on_error": "quarantine", "max_error_rate": 1.0}
        docs.project("clean", ["text"]).map(
            self.stage, upper, output_column="upper", **grouped(given | self.options)
        )
        self.events = compute(docs, self.store, days, keys=DAYS, **options)
        return len(self.notes.read_text().splitlines())

    def rows(self, day: str) -> list[str]:
        manifest = self.store.in_force("docs", self.stage, day)
        assert manifest is not None
        folder = self.store.parts("docs", self.stage, day)
        return [t for p in manifest.parts for t in read_part(folder, p.name)["upper"].to_pylist()]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return Snapshots(tmp_path)


def test_a_backfill_of_snapshots_pays_for_the_first_and_the_changes(world):
    texts = world.write_days(DAYS[:5], changed=1)
    assert world.run(DAYS[:5]) == ROWS + 4
    for day, expected in zip(DAYS, texts):
        assert world.rows(day) == [text.upper() for text in expected]
    stats = [each.stats for each in committed(world.events, "upper")]
    assert sum(each.copied for each in stats) == 4 * (ROWS - 1)


def test_a_renamed_stage_copies_its_rows(world):
    texts = world.write_days(DAYS[:3], changed=2)
    world.options = {"partitions": 0}
    assert world.run(DAYS[:3]) == 3 * ROWS
    assert world.run(DAYS[2:3], force=True) == ROWS
    world.stage = "loud"
    world.write(DAYS[0], [*texts[0], "new"])
    assert world.run(DAYS[:3]) == 1
    assert world.rows(DAYS[0]) == [text.upper() for text in [*texts[0], "new"]]
    world.stage = "upper"
    assert world.run(DAYS[:2]) == 1, "its own results come first"
    world.stage, world.options = "other", {"partitions": 0, "version": "2"}
    assert world.run(DAYS[:2]) == 2 * ROWS + 1
    world.stage = "another"
    assert world.run(DAYS[:3]) == ROWS, "only the last partition has results of another version"


def test_a_renamed_stage_copies_the_latest_results(world):
    texts = [f"text {n}" for n in range(ROWS)]
    for stage, extra, calls in [("b", ["old"], ROWS + 1), ("c", [], 0), ("a", ["old", "new"], 2)]:
        world.stage = stage
        world.write(DAYS[0], [*texts, *extra])
        assert world.run(DAYS[:1]) == calls


def test_a_renamed_stage_copies_rows_of_the_partition_before(world):
    world.write_days(DAYS[:3], changed=1)
    assert world.run(DAYS[:2]) == ROWS + 1
    world.stage = "loud"
    assert world.run(DAYS[2:3]) == 1


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_renamed_stage_keeps_what_force_excludes(world, was_killed):
    """Also if the first run under its name is killed before the commit."""
    texts = [f"text {n}" for n in range(ROWS)]
    for day, given in zip(DAYS, ([*texts, "earlier"], texts)):
        world.write(day, given)
    assert world.run(DAYS[:2]) == ROWS + 1
    assert world.run(DAYS[1:2], force=True) == ROWS
    world.stage = "loud"
    assert world.run(DAYS[:2]) == 0
    if was_killed:
        shutil.rmtree(world.folder / "store" / "docs" / "loud" / "manifests")
        assert world.run(DAYS[:2]) == 0
    for extra, calls in (["earlier", "new"], 2), (["earlier", "new", "newer"], 1):
        world.write(DAYS[1], [*texts, *extra])
        assert world.run(DAYS[1:2]) == calls


def test_partitions_in_reverse_order_find_each_others_rows(world):
    world.write_days(DAYS[:4], changed=1)
    assert world.run(DAYS[:4][::-1]) == ROWS + 3


def test_models_are_loaded_when_the_first_row_is_no_copy(world):
    def loads() -> int:
        return sum(isinstance(event, WorkerReady) for event in world.events)

    (texts,) = world.write_days(DAYS[:1], changed=0)
    assert world.run(DAYS[:1]) == ROWS
    assert loads() == 2
    world.write(DAYS[0], texts[::-1])
    assert world.run(DAYS[:1]) == 0
    assert loads() == 0
    assert world.rows(DAYS[0]) == [text.upper() for text in texts[::-1]]
    world.write(DAYS[0], [*texts[:-1], "new"])
    assert world.run(DAYS[:1]) == 1
    assert loads() == 2


@pytest.mark.parametrize(("is_costly", "calls"), [(True, 1), (False, 20)])
def test_a_fast_function_is_called_for_equal_rows(world, monkeypatch, is_costly, calls):
    monkeypatch.setattr(SliceSizer, "is_costly", lambda self, stage: is_costly)
    world.write(DAYS[0], ["same"] * 20)
    assert world.run(DAYS[:1]) == calls
    world.write(DAYS[0], ["same"] * 20 + ["other"])
    assert world.run(DAYS[:1]) == 1
    assert world.rows(DAYS[0]) == ["SAME"] * 20 + ["OTHER"]


def test_rows_that_move_to_the_next_partition_are_found_in_one_run(world):
    for day in DAYS[:3]:
        world.write(day, [f"{day} {n}" for n in range(ROWS)])
    assert world.run(DAYS[:3]) == 3 * ROWS
    for before, day in zip(["new", *DAYS], DAYS[:3]):
        world.write(day, [f"{before if n < 10 else day} {n}" for n in range(ROWS)])
    assert world.run(DAYS[:3]) == 10
    assert world.rows(DAYS[1]) == [f"{DAYS[0 if n < 10 else 1]} {n}".upper() for n in range(ROWS)]


def test_partitions_in_reverse_order_do_not_wait_forever(world, monkeypatch):
    monkeypatch.setattr(fragment_queue, "_MAX_WAITING", 3)
    texts = world.write_days(DAYS[:8], changed=1)
    assert world.run(DAYS[:8][::-1]) <= 8 * ROWS
    assert [world.rows(day) for day in DAYS[:8]] == [[t.upper() for t in day] for day in texts]


def test_partitions_that_lack_only_a_manifest_are_committed_without_recursion(world, monkeypatch):
    world.fragment_rows, depths, real = 64, [], RunState._commit
    world.write_days(DAYS[:4], changed=1)
    world.run(DAYS[:4])

    def commit(*args: Any) -> Any:
        depths.append(len([*traceback.walk_stack(None)]))
        return real(*args)

    monkeypatch.setattr(RunState, "_commit", commit)
    world.fragment_rows = 100
    assert world.run(DAYS[:4]) == 0
    assert depths == [depths[0]] * 2 * 4


@pytest.mark.parametrize("suffix", [".rows.parquet", ".faults.parquet", "part"])
@pytest.mark.parametrize(("damage", "own"), [("deleted", True), ("cut", False)])
def test_rows_that_cannot_be_copied_are_computed(tmp_path, world, suffix, damage, own):
    world.fragment_rows = 64
    texts = [f"text {n}" for n in range(ROWS)] + ["bad"]
    world.write(DAYS[0], texts)
    world.run(DAYS[:1])
    files = [
        file
        for file in (tmp_path / "store/docs/upper/parts" / DAYS[0]).iterdir()
        if (suffix == "part" and parse_part_name(file.name)) or file.name.endswith(suffix)
    ]
    assert files
    for file in files:
        if damage == "deleted":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-20])
    day = DAYS[0] if own else DAYS[1]
    world.write(day, [*texts, "another"])
    world.run([day])
    assert world.rows(day) == [text.upper() for text in [*texts[:-1], "another"]]


def test_a_collection_keeps_the_records_of_what_is_in_force_alone(tmp_path, world):
    world.write_days(DAYS[:2], changed=3)
    world.run(DAYS[:2])
    world.write(DAYS[0], ["other", "bad"])
    world.run(DAYS[:1])
    for _ in range(2):
        list(collect(world.store, GcPolicy(time.time() + 60, keep=0, grace=-60)))
    for day in DAYS[:2]:
        manifest = world.store.in_force("docs", "upper", day)
        assert manifest is not None
        named = {file for part in manifest.parts for file in part.files}
        assert len(named) == 2 * len(manifest.parts) + (day == DAYS[0])
        assert {f.name for f in (tmp_path / "store/docs/upper/parts" / day).iterdir()} == named
    texts = world.rows(DAYS[1])
    world.write(DAYS[1], [*(text.lower() for text in texts), "one more"])
    assert world.run(DAYS[1:2]) == 1, "rows whose origin was collected are still found"


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_manifest_of_an_earlier_release_has_the_floor_of_its_stage(world, is_earlier):
    world.options = {"partitions": 0}
    world.write_days(DAYS[:2], 0)
    assert world.run(DAYS[:2]) == 2 * ROWS
    assert world.run(DAYS[:1], force=True) == ROWS
    if is_earlier:
        (file,) = (world.folder / "store/docs/upper/manifests" / DAYS[1]).glob("*.json")
        record = json.loads(file.read_text())
        assert record.pop("row_floor") == 0
        file.write_text(json.dumps(record))
    rows = [f"text {n}" for n in range(ROWS)]
    world.write(DAYS[1], [*rows[:-1], "new"])
    assert world.run(DAYS[1:2]) == (ROWS if is_earlier else 1)


def test_the_failure_of_a_row_that_was_not_read_is_not_that_of_an_equal_one(tmp_path):
    """A value that does not fit its column is null in its row."""
    docs = vd.Pipeline("docs", source=vd.csv(tmp_path / "a.csv", types={"n": "BIGINT"}), id="id")
    lenient = vd.Failures("quarantine", 1)
    docs.map("is_null", lambda n: n is None, schema="BOOLEAN", on_error=lenient)
    store = Store(StoragePath(str(tmp_path / "store")))
    found = []
    for text in ("id,n\n1,x\n2,2\n", "id,n\n1,\n2,2\n"):
        (tmp_path / "a.csv").write_text(text)
        compute(docs, store)
        (part,) = store.in_force("docs", "is_null", None).parts
        found.append((part.quarantined, part.rows))
    assert found == [(1, 1), (0, 2)]


def test_a_trace_says_where_a_copied_row_was_computed(tmp_path, world):
    world.write_days(DAYS[:2], changed=3)
    world.run(DAYS[:1], run_id="first")
    world.run(DAYS[1:2], run_id="second")

    def step(id: int) -> Any:
        index = ManifestIndex(world.store, "docs", DAYS[1])
        return next(s for s in trace_back(index, "upper", id).steps if s.stage == "docs/upper")

    copied, computed = step(20), step(4)
    assert copied.run_id == computed.run_id == "second"
    assert computed.copied_from is None
    assert (copied.copied_from.run_id, copied.copied_from.model) == ("first", "upper")
    assert copied.copied_from.code_version == copied.code_version
    assert "copied: computed by run first, 2" in str(
        trace_back(ManifestIndex(world.store, "docs", DAYS[1]), "upper", 20)
    )
    for file in (tmp_path / "store/docs/upper/parts" / DAYS[1]).glob("*.rows.parquet"):
        file.unlink()
    assert step(20).copied_from is None, "unknown"


def test_code_that_names_the_store_does_not_change_with_it(tmp_path):
    write_source(tmp_path / "src", {"id": range(4), "text": list("abcd")})
    for root, folder in (("store", "store"), ("a/store", "a/store/docs"), ("b/c/store", "b")):
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
        given = {"fn_kwargs": {"folder": f"{tmp_path}/{folder}"}, "schema": "VARCHAR"}
        docs.map("said", said, **given)
        store = Store(StoragePath(f"{tmp_path}/{root}"))
        assert [len(committed(compute(docs, store), "said")) for _ in range(3)] == [1, 0, 0]


def said(text: str, folder: str) -> str:
    return f"{text} in {folder}"
