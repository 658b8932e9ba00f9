"""Records of what people decide about rows: waivers and patches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.manifests import manifest, part
from vane_dagster.errors import StoreError
from vane_dagster.storage.decisions import (
    PATCH_ID,
    copy_decisions,
    count_waived,
    decisions,
    patch,
    undo,
    waive,
)
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import MANIFEST, Manifest
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.row_records import Outcome, records_schema, write_records
from vane_dagster.storage.store import Store

OUTPUT, FAILED, PASSING = Outcome.OUTPUT, Outcome.FAILED, Outcome.PASSING


def stored(store: Store, *fragments: dict[int, Any], partition: str | None = "p") -> Manifest:
    """A manifest with a part for each fragment; of its rows key and outcome by id."""
    folder = store.parts("docs", "s", partition)
    parts = []
    for number, rows in enumerate(fragments):
        records = {name: [None] * len(rows) for name in ("run_id", "model", "code", "at")}
        records |= {"id": list(rows), "epoch": [0] * len(rows)}
        records |= {"key_high": [key for key, _ in rows.values()]}
        records |= {"key_low": [key for key, _ in rows.values()]}
        records |= {"outcome": [outcome for _, outcome in rows.values()]}
        table = pa.table({n.name: records[n.name] for n in SCHEMA}, schema=SCHEMA)
        name = write_records(folder, f"{number}" * 40, table)
        failed = sum(outcome in (FAILED, PASSING) for _, outcome in rows.values())
        info = part(folder, list(rows), key=f"{number}" * 40)
        parts.append(replace(info, row_records=name, rows_in=len(rows), quarantined=failed))
    made = manifest(parts, partition)
    return replace(
        made,
        fragments=[replace(each, identity=f"f{n}") for n, each in enumerate(made.fragments)],
    )


SCHEMA = records_schema(pa.int64())
FRAGMENTS = ({1: (1, OUTPUT), 2: (2, FAILED)}, {3: (3, PASSING), 4: (1, OUTPUT)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoragePath(str(tmp_path)))


def test_a_patch_holds_outputs_and_the_fragments_that_have_none_of_its_rows(store):
    columns = pa.table({"y": [40, 20], "z": [None, [1.0]]})

    made = patch(store, stored(store, *FRAGMENTS), pa.chunked_array([[2, 1]]), columns, "here")

    assert decisions(store, "docs", ["s"]) == {("s", "p"): (made,)}
    assert made.elsewhere == {"f1"}
    outputs = made.part()
    assert read_part(outputs.folder, outputs.part).to_pylist() == [
        {PATCH_ID: 1, "y": 20, "z": [1.0]}, {PATCH_ID: 2, "y": 40, "z": None},
    ]  # fmt: skip
    records = read_part(outputs.folder, outputs.records)
    assert records["id"].to_pylist() == [1, 2]
    assert {*records["outcome"].to_pylist()} == {Outcome.PATCHED}
    assert {f"{name}.json" for name in records["run_id"].to_pylist()} == {made.name}


def test_a_waiver_counts_while_the_row_fails_with_its_values_and_then_ends(store):
    before = stored(store, *FRAGMENTS)
    waiver = waive(store, before, [2, 3], "empty", "here")
    folder = store.parts("docs", "s", "p")

    counted = count_waived(folder, before, [waiver])
    assert [part.waived for part in counted.parts] == [1, 1]
    assert counted.decisions == {waiver.name: [2, 3]}
    assert MANIFEST.load(json.loads(counted.dumps())).decisions == counted.decisions

    changed = stored(store, {1: (1, OUTPUT), 2: (9, FAILED)}, FRAGMENTS[1])
    counted = count_waived(folder, changed, [waiver.covering(counted)])
    assert [part.waived for part in counted.parts] == [0, 1]
    assert waiver.covering(counted).ids == (3,)
    assert waiver.covering(counted).keys == (f"{3:016x}" * 2,)
    again = count_waived(folder, before, [waiver.covering(counted)])
    assert [part.waived for part in again.parts] == [0, 1], "the row failed with other values"
    computed = stored(store, FRAGMENTS[0], {3: (3, OUTPUT)})
    ended = count_waived(folder, computed, [waiver.covering(again)])
    assert ended.decisions == {waiver.name: []}
    assert count_waived(folder, replace(counted, decisions={}), []).parts[1].waived == 0


def test_a_decision_that_was_undone_for_an_id_counts_for_the_others(store):
    made = stored(store, *FRAGMENTS)
    waiver = waive(store, made, [2, 3], "empty", "here")
    outputs = pa.table({"y": [10, 20]})
    patched = patch(store, made, pa.chunked_array([[1, 2]]), outputs, "here")

    undone = [undo(store, "docs", each, {2}) for each in (waiver, patched)]

    found = decisions(store, "docs", ["s"])["s", "p"]
    assert [(each.kind, each.ids, each.undoes) for each in found] == [
        ("waived", (3,), ""), ("patched", (1,), ""),
        ("unwaived", (2,), waiver.name), ("unpatched", (2,), patched.name),
    ]  # fmt: skip
    assert found[1].part().undone == (2,)
    assert [each.changes("f0") for each in found] == [False, True, False, True]
    assert not any(each.changes("f1") for each in found)
    counted = count_waived(store.parts("docs", "s", "p"), made, found)
    assert [part.waived for part in counted.parts] == [0, 1]
    assert counted.decisions.keys() == {each.name for each in (waiver, patched, *undone)}
    again = waive(store, made, [2], "gone", "here")
    assert decisions(store, "docs", ["s"])["s", "p"][-1] == again


def test_a_copy_that_is_killed_puts_nothing_in_force_that_was_undone(store, tmp_path, monkeypatch):
    made = stored(store, *FRAGMENTS)
    outputs = pa.table({"y": [10]})
    patched = patch(store, made, pa.chunked_array([[1]]), outputs, "here")
    undone = undo(store, "docs", patched, {1})
    target, create, written = Store(StoragePath(str(tmp_path / "other"))), StoragePath.create, []

    def killed(folder: StoragePath, name: str, data: Any) -> bool:
        if written:
            raise KeyboardInterrupt
        written.append(name)
        return create(folder, name, data)

    made = replace(made, decisions={patched.name: [], undone.name: []})
    copy_decisions(store, Store(StoragePath(str(tmp_path / "whole"))), made)
    for path in (tmp_path / "whole" / "docs" / "s").rglob("*.parquet"):  # what it names is there
        target.root.child("docs", "s", "patches").write(path.name, path.read_bytes())
    monkeypatch.setattr(StoragePath, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        copy_decisions(store, target, made)
    assert written == [undone.name]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "there is no id"),
        ([2, 7], "no input row with id 7"),
        (["x"], "Failed to parse string: 'x'"),
    ],
)
def test_ids_that_the_partition_lacks_are_refused(store, ids, message):
    with pytest.raises(StoreError, match=message):
        waive(store, stored(store, *FRAGMENTS), ids, "empty", "here")
    assert decisions(store, "docs", ["s"]) == {}


def test_a_damaged_record_stops_plans(store):
    waiver = waive(store, stored(store, *FRAGMENTS), [2], "empty", "here")
    store.root.child("docs").write(waiver.name, b"{")
    with pytest.raises(StoreError, match="without it, the decision is lost"):
        decisions(store, "docs", ["s"])
