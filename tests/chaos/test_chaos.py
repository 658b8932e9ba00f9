"""Kills at random times, full disks, failing storage: and then one run that puts all of it right.

``VANE_CHAOS_ROUNDS=500`` makes more rounds, ``VANE_CHAOS_SEED=17 VANE_CHAOS_ROUNDS=1`` repeats one;
the kills of a round come at the same moments then, while the processes run at their own speed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chaos_driver import RAN
from support.chaos_harness import Place, can_mount, small_disk
from support.chaos_pipeline import FRAGMENT_ROWS, KEYED, KEYS, STAGES
from support.chaos_plan import Plan, drawn
from support.data import read_stage, write_source
from support.pools_process import CLUSTER
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.errors import VaneError
from vane_dagster.storage.filesystem import TEMPORARY, Location
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.quarantine import read_faults
from vane_dagster.storage.store import Store

ROUNDS = int(os.environ.get("VANE_CHAOS_ROUNDS", "12"))
SEED = int(os.environ.get("VANE_CHAOS_SEED", "1"))
FILES, FILE_ROWS = 2, 150
IDS = {
    key: range(1000 * n, 1000 * n + FILES * FILE_ROWS) for n, key in enumerate(KEYS, start=1)
}  # fmt: skip

on_ray = [("ray", SEED + n) for n in range(ROUNDS)]
on_subprocesses = [("local", SEED + n) for n in range(max(1, ROUNDS // 3))]


@pytest.fixture
def blocks() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of two files, three fragments each."""
    folder = tmp_path_factory.mktemp("chaos") / "src"
    for key, ids in IDS.items():
        for file in range(FILES):
            own = list(ids[file * FILE_ROWS : (file + 1) * FILE_ROWS])
            rows = {"id": own, "n": [7 * i % 101 for i in own], "text": [f"t{i * i}" for i in own]}
            write_source(folder / key, rows, f"{file}.parquet", row_group_size=FRAGMENT_ROWS)
    return folder


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> bool:
    return can_mount(tmp_path_factory.mktemp("mounts") / "disk")


@pytest.fixture(scope="module")
def undisturbed(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, dict[str, Any]]]:
    """The rows that the pipeline publishes where nothing happens, by partition and id."""
    root = tmp_path_factory.mktemp("undisturbed")
    with contextlib.ExitStack() as blocks:
        place = Place(source, None, None, blocks)
        assert place.run(root, "quarantine", []) == RAN, place.summary(root)
    rows = {
        key: {row["id"]: row for row in table.to_pylist()} for key, table in published(root).items()
    }
    assert {key: list(found) for key, found in rows.items()} == {k: list(v) for k, v in IDS.items()}
    return rows


def published(root: Path) -> dict[str, pa.Table]:
    """What readers of the target find, by partition, in the order of the ids."""
    found = {}
    for key in KEYS:
        files = sorted((root / "out" / key).glob("*.parquet"))
        assert files, f"nothing is published of {key}"
        found[key] = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("id")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("compute", "seed"), [*on_ray, *on_subprocesses])
def test_one_run_puts_right_whatever_has_happened(
    compute, seed, source, mounts, undisturbed, tmp_path, blocks, request
):
    place = Place(source, None, None, blocks)
    kinds = ("worker",)
    if compute == "ray":
        request.getfixturevalue("cluster").connect()
        head = LocalHead(**CLUSTER).find()
        place = Place(source, CLUSTER, psutil.Process(head.raylet_pid), blocks)
        kinds = ("worker",) * 5 + ("pool_manager", "idle")
    plan = drawn(seed, [i for ids in IDS.values() for i in ids], kinds, mounts)
    print(plan)
    poison = plan.poison.faults()
    with contextlib.ExitStack() as disks:
        grow = disks.enter_context(small_disk(tmp_path / "store", plan.tiny)) if plan.tiny else None
        if plan.former:
            assert place.run(tmp_path, plan.labels, [], former=True) == RAN, place.summary(tmp_path)
        for run in plan.runs:
            place.run(tmp_path, plan.labels, [*poison, *run.faults], run.partition, run.kills)
            report_failure(plan, place, tmp_path, check_in_force)
        if grow is not None:
            grow()
        report_failure(plan, place, tmp_path, lambda root: place.finish(root, plan.labels, poison))
        print(*place.happened, sep="\n")
        report_failure(plan, place, tmp_path, lambda root: check(root, plan, undisturbed))
    shutil.rmtree(tmp_path)


def report_failure(plan: Plan, place: Place, root: Path, looked: Callable[[Path], None]) -> None:
    """Check the files of a round; its error has the plan and the events of the round."""
    try:
        looked(root)
    except (AssertionError, VaneError) as error:
        raise AssertionError(f"{error}\n{plan}\n{place.summary(root)}") from error


def check_in_force(root: Path) -> None:
    """What holds at any moment: all files that a manifest in force names are there."""
    store = Store(Location(str(root / "store")))
    for stage in STAGES:
        for key in KEYS:
            manifest = store.in_force("chaos", stage, key)
            if manifest is None:
                continue
            folder = Path(store.parts("chaos", stage, key).path)
            if stage == "published":
                folder = root / "out" / key
            there = {file.name for file in folder.glob("*.parquet")}
            lost = {part.name for part in manifest.parts} - there
            assert not lost, f"{stage} of {key} lacks {lost}"


def check(root: Path, plan: Plan, undisturbed: dict[str, dict[int, dict[str, Any]]]) -> None:
    """What holds after the last run, whatever came before it."""
    store = Store(Location(str(root / "store")))
    faults = {
        stage: [
            row
            for key in KEYS
            for row in read_faults(
                store.parts("chaos", stage, key), store.in_force("chaos", stage, key)
            ).to_pylist()
        ]
        for stage in ("scores", "labels")
    }
    for stage, rows in faults.items():
        assert len(rows) == len({row["id"] for row in rows}), f"{stage}: a row is quarantined twice"
        found = {row["id"]: row["error"] for row in rows}
        assert found == plan.poison.errors(stage), f"{stage}: other rows are quarantined"

    check_rows(root, plan, undisturbed)
    check_files(root, store)
    for _ in range(2):
        list(collect(store, GcPolicy(time.time() + 60, keep=0, grace=-60)))
    check_files(root, store, collected=True)
    check_rows(root, plan, undisturbed)


def check_rows(root: Path, plan: Plan, undisturbed: dict[str, dict[int, dict[str, Any]]]) -> None:
    gone = plan.poison.ids("scores")
    if plan.labels == "quarantine":
        gone |= plan.poison.ids("labels")
    nulls = plan.poison.ids("labels") - gone
    for key, table in published(root).items():
        ids = table["id"].to_pylist()
        assert ids == [i for i in IDS[key] if i not in gone], f"{key}: other ids are published"
        for row in table.to_pylist():
            error = row.pop("error", None)
            expected = undisturbed[key][row["id"]]
            if row["id"] in nulls:
                expected = {**expected, "label": None}
                kind = plan.poison.errors("labels")[row["id"]]
                assert error.startswith(f"{kind}: "), f"id {row['id']}: {error}"
            else:
                assert error is None, f"id {row['id']}: {error}"
            assert row == expected, f"{key}: other values"
        assert read_stage(root / "store", "chaos", "joined", key).num_rows == len(ids)


def check_files(root: Path, store: Store, collected: bool = False) -> None:
    """Every manifest's files are there, and what nobody names is garbage in its proper place."""
    wanted: dict[Path, set[str]] = {}
    for stage in STAGES:
        for key in KEYS:
            manifest = store.in_force("chaos", stage, key)
            assert manifest is not None, f"{stage} of {key} has no manifest"
            assert all(part.rows_in for part in manifest.parts)
            folder = Path(store.parts("chaos", stage, key).path)
            names = {part.name for part in manifest.parts}
            if stage == "published":
                folder = root / "out" / key
                assert set(manifest.published_files) == names
            names |= {part.faults for part in manifest.parts if part.faults}
            names |= {part.row_records for part in manifest.parts if part.row_records}
            assert all(part.row_records for part in manifest.parts) == (stage in KEYED)
            there = {file.name for file in folder.glob("*") if file.is_file()}
            assert names <= there, f"{stage} of {key} lacks {names - there}"
            wanted[folder] = names
            if collected or stage == "published":
                assert there == names, f"{stage} of {key} has {there - names} besides"
    for key in KEYS:
        below = {path.name for path in (root / "out" / key).iterdir() if path.is_dir()}
        assert below <= {STAGING}, f"{key}: {below} in the target"
    assert {path.name for path in (root / "out").iterdir()} == set(KEYS)
    announced = list((root / "store").rglob("publishing-*"))
    assert not announced, f"{announced} are left"
    if collected:
        left = list((root / "out").rglob(f"{STAGING}/*"))
        left += (root / "store").rglob(f"{TEMPORARY}*")
        assert not left, f"{left} are left"
