"""Kills at random times and failing storage: and then one run that puts all of it right.

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

from support.chaos_rounds import Disturbed, Place, Plan, drawn
from support.chaos_run import FRAGMENT_ROWS, KEYED, KEYS, RAN, STAGES
from support.data import read_stage, write_source
from support.pools_process import CLUSTER
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.errors import VaneError
from vane_dagster.storage.filesystem import TEMPORARY, Location
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.quarantine import read_faults
from vane_dagster.storage.store import Store

ROUNDS = int(os.environ.get("VANE_CHAOS_ROUNDS", "8"))
SEED = int(os.environ.get("VANE_CHAOS_SEED", "1"))
FILES, FILE_ROWS = 2, 150
IDS = {
    key: range(1000 * n, 1000 * n + FILES * FILE_ROWS) for n, key in enumerate(KEYS, start=1)
}  # fmt: skip
Rows = dict[str, dict[int, dict[str, Any]]]
"""Published rows by partition and id."""

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
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows that the pipeline publishes where nothing happens."""
    root = tmp_path_factory.mktemp("undisturbed")
    with contextlib.ExitStack() as blocks:
        place = Place(source, None, None, blocks)
        assert place.run(root, "quarantine", Disturbed(None, (), ())) == RAN, place.summary(root)
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
    compute, seed, source, undisturbed, tmp_path, blocks, request
):
    place = Place(source, None, None, blocks)
    kinds = ("worker",)
    if compute == "ray":
        request.getfixturevalue("cluster").connect()
        head = LocalHead(**CLUSTER).find()
        place = Place(source, CLUSTER, psutil.Process(head.raylet_pid), blocks)
        kinds = ("worker",) * 5 + ("pool_manager", "idle")
    plan = drawn(seed, [i for ids in IDS.values() for i in ids], kinds)
    print(plan)

    def explained(look: Callable[[], None]) -> None:
        """Check the files of a round; its error has the plan and the events of the round."""
        try:
            look()
        except (AssertionError, VaneError) as error:
            raise AssertionError(f"{error}\n{plan}\n{place.summary(tmp_path)}") from error

    for run in plan.runs:
        faults = (*plan.poison(), *run.faults)
        place.run(tmp_path, plan.labels, run._replace(faults=faults))
        explained(lambda: check_in_force(tmp_path))
    explained(lambda: place.finish(tmp_path, plan))
    print(*place.happened, sep="\n")
    explained(lambda: check(tmp_path, plan, undisturbed))
    shutil.rmtree(tmp_path)


def in_force(root: Path) -> Iterator[tuple[str, Path, Manifest | None]]:
    """Each stage and partition: its name, the folder of its files and its manifest."""
    store = Store(Location(str(root / "store")))
    for stage in STAGES:
        for key in KEYS:
            folder = Path(store.parts("chaos", stage, key).path)
            folder = root / "out" / key if stage == "published" else folder
            yield f"{stage} of {key}", folder, store.in_force("chaos", stage, key)


def check_in_force(root: Path) -> None:
    """What holds at any moment: all files that a manifest in force names are there."""
    for name, folder, manifest in in_force(root):
        if manifest is not None:
            lost = {part.name for part in manifest.parts} - {file.name for file in folder.glob("*")}
            assert not lost, f"{name} lacks {lost}"


def check(root: Path, plan: Plan, undisturbed: Rows) -> None:
    """What holds after the last run, whatever came before it."""
    store = Store(Location(str(root / "store")))
    for stage in KEYED:
        faults = [
            read_faults(store.parts("chaos", stage, key), store.in_force("chaos", stage, key))
            for key in KEYS
        ]
        rows = pa.concat_tables(faults).to_pylist()
        assert len(rows) == len({row["id"] for row in rows}), f"{stage}: a row is quarantined twice"
        found = {row["id"]: row["error"] for row in rows}
        assert found == plan.errors(stage), f"{stage}: other rows are quarantined"

    check_rows(root, plan, undisturbed)
    check_files(root)
    for _ in range(2):
        list(collect(store, GcPolicy(time.time() + 60, keep=0, grace=-60)))
    check_files(root, collected=True)
    check_rows(root, plan, undisturbed)


def check_rows(root: Path, plan: Plan, undisturbed: Rows) -> None:
    gone, unlabelled = set(plan.errors("scores")), set(plan.errors("labels"))
    gone |= unlabelled if plan.labels == "quarantine" else set()
    for key, table in published(root).items():
        ids = table["id"].to_pylist()
        assert ids == [i for i in IDS[key] if i not in gone], f"{key}: other ids are published"
        for row in table.to_pylist():
            error = row.pop("error", None)
            expected = undisturbed[key][row["id"]]
            if row["id"] in unlabelled:
                expected = {**expected, "label": None}
                kind = plan.errors("labels")[row["id"]]
                assert error.startswith(f"{kind}: "), f"id {row['id']}: {error}"
            else:
                assert error is None, f"id {row['id']}: {error}"
            assert row == expected, f"{key}: other values"
        assert read_stage(root / "store", "chaos", "joined", key).num_rows == len(ids)


def check_files(root: Path, collected: bool = False) -> None:
    """Every manifest's files are there, and what nobody names is garbage in its proper place."""
    for place, folder, manifest in in_force(root):
        assert manifest is not None, f"{place} has no manifest"
        is_published = folder.is_relative_to(root / "out")
        assert all(part.rows_in for part in manifest.parts)
        names = {part.name for part in manifest.parts}
        assert not is_published or set(manifest.published_files) == names
        names |= {part.faults for part in manifest.parts if part.faults}
        names |= {part.row_records for part in manifest.parts if part.row_records}
        is_keyed = place.partition(" ")[0] in KEYED
        assert all(part.row_records for part in manifest.parts) == is_keyed
        there = {file.name for file in folder.glob("*") if file.is_file()}
        assert names <= there, f"{place} lacks {names - there}"
        if collected or is_published:
            assert there == names, f"{place} has {there - names} besides"
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
