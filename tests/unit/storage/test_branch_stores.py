"""Branch stores: which of the two roots each thing is read from, and that only one is written."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.manifests import manifest, part
from support.store_contract import interrupted_after
from vane_dagster.errors import StoreError
from vane_dagster.storage.adoptions import Adoption, adoptions, keep_adoption, undo_adoptions
from vane_dagster.storage.dataframes import loaded
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import Component, ManifestName
from vane_dagster.storage.promotion import promote
from vane_dagster.storage.reader import read
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin, read_pin
from vane_dagster.storage.store import Store, open_branch


@pytest.fixture(params=["local", "memory", "local over memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    is_local = request.param == "local"
    return Store(
        StoragePath(str(tmp_path / "store") if is_local else f"memory://{uuid.uuid4().hex}")
    )


@pytest.fixture
def branch(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Store:
    is_remote = request.node.callspec.params["store"] == "memory"
    root = f"memory://{uuid.uuid4().hex}" if is_remote else str(tmp_path / "branch")
    return open_branch(root, store.root.url, {})


def content(store: Store) -> Mapping[str, bytes]:
    return {path: store.root.read(path) for path in store.root.walk()}


def commit(store: Store, ids: list[int], **given: str | None) -> ManifestName:
    """Commit rows as a run does, after a plan by what is in force."""
    made = manifest(**given)  # type: ignore[arg-type]  # of mixed types
    info = part(store.parts(made.pipeline, made.stage, made.partition), ids, key=f"{ids[0]:040x}")
    made = manifest([info], **given)  # type: ignore[arg-type]  # of mixed types
    return store.commit(replace(made, upstream={}))


def rows(store: Store, stage: str = "s") -> list[int]:
    found = read(store, ["docs", stage], None)
    return sorted(loaded(found, "pyarrow.Table").column("id").to_pylist())


@pytest.mark.parametrize(
    "form", ["pyarrow.dataset.Dataset", "polars.LazyFrame", "duckdb.DuckDBPyRelation"]
)
def test_rows_of_both_are_one_table(store, branch, form):
    commit(store, [2], partition="q")
    commit(branch, [3], partition="p")
    found = loaded(read(branch, ["docs", "s"], ["q", "p"]), form)
    found = found.to_table() if "Dataset" in form else found
    found = found.collect() if "polars" in form else found
    column = found.fetchall() if "duckdb" in form else [(n,) for n in list(found["id"])]
    assert [int(str(each[0])) for each in column] == [2, 3]


def test_nothing_in_the_fallback_can_be_changed(store, branch):
    commit(store, [1])
    folder = branch.parts_of(branch.in_force("docs", "s", "p"))
    (name,) = folder.names()
    for change in (
        lambda: folder.write(name, b""),
        lambda: folder.create("new", b""),
        lambda: folder.delete([name]),
        lambda: folder.move(name, folder, "new"),
        lambda: folder.put("new", __file__),
    ):
        with pytest.raises(StoreError, match="a branch only reads its fallback"):
            change()
    assert [*folder.names()] == [name]


OLD, NEW, NEWER, LEFT = (letter * 40 for letter in "abcd")


def adoption(definition: str, at: int = 1) -> Adoption:
    then, now = (Component("code", "f", OLD),), (Component("code", "f", definition),)
    return Adoption("s", definition, OLD, now, then, ("code",), 9, False, 1, 0.0, 1, "me", at)


def adopted(store: Store) -> list[Adoption]:
    return list(adoptions(store, "docs")["s"].live)


def test_a_collection_of_a_branch_removes_nothing_else(store, branch):
    commit(store, [1])
    commit(store, [2], partition="q")
    commit(branch, [3])
    commit(branch, [4])
    folder = branch.root.child("~published", "docs", "parts", "p")
    folder.write(f"{'a' * 40}-{'b' * 16}.parquet", b"published")
    before = content(store)
    for late in (1e6, 2e6):
        list(collect(branch, GcPolicy(time.time() + late, 1.0, 1.0)))
    assert content(store) == before
    assert rows(branch) == [2, 4]
    assert len(branch.parts("docs", "s", "p").names()) == 1
    assert len(folder.names()) == 1


@pytest.mark.parametrize("root", ["s3://b/x", "s3://b/x/", "s3://b/x/y", "s3://b"])
def test_roots_in_each_other_are_refused(root):
    with pytest.raises(StoreError, match="neither inside the other"):
        vd.FragmentStore(root=root, fallback="s3://b/x").open()
    assert open_branch("s3://b/xy", "s3://b/x", {}).fallback is not None


def test_options_reach_what_is_not_on_the_local_disk(tmp_path):
    opened = open_branch("s3://b/x", "s3://b/y", {"key": "k"})
    assert opened.root.storage_options == opened.fallback.root.storage_options == {"key": "k"}
    opened = open_branch(str(tmp_path), "s3://b/y", {"key": "k"})
    assert opened.root.storage_options == {}
    assert opened.fallback.root.storage_options == {"key": "k"}
    opened = open_branch("s3://b/x", str(tmp_path), {"key": "k"})
    assert opened.fallback.root.storage_options == {}
    with pytest.raises(StoreError, match="targets is for a branch"):
        vd.FragmentStore(root=str(tmp_path), targets={"docs/s": "x"}).open()


def test_a_branch_is_no_fallback(store, branch):
    above = f"{branch.root.url}2"
    assert vd.FragmentStore(root=above, fallback=branch.root.url).open().fallback is not None
    commit(branch, [1])
    with pytest.raises(StoreError, match=f"is a branch of '{store.root.url}'.*give fallback="):
        vd.FragmentStore(root=above, fallback=branch.root.url).open()


# Promotion


def work(store: Store, branch: Store) -> None:
    """A store with two stages, and a branch that has computed both again for two partitions."""
    for key in ("p", "q/ä", None):
        for stage in "st":
            commit(store, [1, 2], partition=key, stage=stage)
            if key is not None:
                commit(branch, [5, 6], partition=key, stage=stage, plan="1")
    keep_pin(branch, "docs", "s", "d", SchemaPin(pa.schema([]), 1, "run", 1.0))
    keep_adoption(store, "docs", adoption(NEW))
    undo_adoptions(branch, "docs", [adoption(NEW)], NEW)
    keep_adoption(branch, "docs", adoption(NEWER))
    keep_adoption(branch, "docs", adoption(LEFT))
    undo_adoptions(branch, "docs", [adoption(LEFT)], LEFT)


def test_a_promotion_copies_parts_and_records_and_puts_nothing_in_force(store, branch):
    work(store, branch)
    own, manifests = content(branch), [each for each in content(store) if "manifests" in each]
    made = [*promote(branch, store, "docs")]
    assert [(each.stage, each.partitions, len(each.parts)) for each in made] == [
        ("s", 2, 2), ("t", 2, 2)
    ]  # fmt: skip
    for stage in "st":
        for key in ("p", "q/ä"):
            assert len(store.parts("docs", stage, key).names()) == 2
    assert [each for each in content(store) if "manifests" in each] == manifests
    assert read_pin(store, "docs", "s", "d") is not None
    assert adopted(store) == [adoption(NEWER)]
    assert content(branch) == own
    before = content(store)
    assert [each.parts for each in promote(branch, store, "docs")] == [[], []]
    assert content(store) == before


def test_a_promotion_that_is_killed_between_any_two_writes_is_run_again(store, branch, monkeypatch):
    work(store, branch)
    calls = kills = 0
    while True:
        with monkeypatch.context() as patched:
            for name in ("write", "create", "delete"):
                original = getattr(StoragePath, name)
                patched.setattr(StoragePath, name, interrupted_after(calls, original))
            try:
                list(promote(branch, store, "docs"))
                break
            except OSError:
                kills += 1
        assert adoption(LEFT) not in adopted(store), "it was undone before"
        calls += 1 if kills % 3 else 0  # some are killed at the same place again
        assert kills < 60
    assert kills > 3
    assert len(store.parts("docs", "t", "p").names()) == 2
    assert adopted(store) == [adoption(NEWER)]


def test_a_promotion_is_refused_if_the_other_store_has_other_results_of_a_fragment(store, branch):
    work(store, branch)
    part(store.parts("docs", "t", "q/ä"), [5, 7], key=f"{5:040x}")
    before = content(store)
    with pytest.raises(StoreError, match=r"docs/t, partition 'q/ä': .* has computed the same"):
        list(promote(branch, store, "docs"))
    assert content(store) == before
    with pytest.raises(StoreError, match="has committed nothing of pipeline 'other'"):
        list(promote(branch, store, "other"))


def test_parts_that_are_about_to_be_deleted_are_written_again(store, branch):
    work(store, branch)
    info = part(store.parts("docs", "s", "p"), [5, 6], key=f"{5:040x}")
    path = f'{{"p/{info.name}": 1}}'
    assert [len(each.parts) for each in promote(branch, store, "docs")] == [1, 2]
    store.root.child("docs", "s").write("condemned.json", path.encode())
    assert [len(each.parts) for each in promote(branch, store, "docs")] == [1, 0]
