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
from vane_dagster.storage.manifest import Component, Manifest, ManifestName
from vane_dagster.storage.promotion import Promotion
from vane_dagster.storage.reader import read
from vane_dagster.storage.row_floor import raise_epoch, read_epoch
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


def commit(store: Store, ids: list[int], start: str = "", **given: str | None) -> ManifestName:
    """Commit rows as a run does, after a plan by what is in force."""
    made = manifest(**given)  # type: ignore[arg-type]  # of mixed types
    info = part(store.parts(made.pipeline, made.stage, made.partition), ids, key=f"{ids[0]:040x}")
    made = manifest([info], **given)  # type: ignore[arg-type]  # of mixed types
    return store.commit(replace(made, upstream={}, branched_from=start))


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


def adoption(definition: str) -> Adoption:
    then, now = (Component("code", "f", OLD),), (Component("code", "f", definition),)
    return Adoption("s", definition, OLD, now, then, ("code",), 9, False, 1, 0.0, 1, "me", 1)


def test_an_adoption_of_many_components_names_the_first():
    many = replace(adoption(NEW), changes=tuple(f"code of F{n}" for n in range(17)))
    text = "code of F0, code of F1, code of F2 and 14 more"
    assert many.summary.startswith(f"{text}, adopted on ")
    assert str(many).startswith(f"s: adopted {text}: 9 rows of 1 partition ")


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
    for empty in (None, ""):  # as of an environment variable that is not set
        assert vd.FragmentStore(root=str(tmp_path), fallback=empty).open().fallback is None
        with pytest.raises(StoreError, match="targets is only for a branch"):
            vd.FragmentStore(root=str(tmp_path), fallback=empty, targets={"docs/s": "x"}).open()


# Promotion


def work(store: Store, branch: Store) -> None:
    """A store with two stages, and a branch that has computed both again for two partitions."""
    for key in ("p", "q/ä", None):
        above = commit(store, [1, 2], partition=key)
        base = store.commit(replace(manifest(partition=key, stage="t"), upstream={"s": str(above)}))
        for stage, started in (("s", above), ("t", base)):
            place = "docs", stage, key
            made = replace(
                manifest([part(branch.parts(*place), [5, 6])], key, stage, "1"),
                upstream={"s": str(branch.latest_own("docs", "s", key))} if stage == "t" else {},
                branched_from=str(started),
            )
            if key is not None:
                branch.commit(made)
    keep_pin(branch, "docs", "s", "d", SchemaPin(pa.schema([]), 1, "run", 1.0))
    keep_adoption(store, "docs", adoption(NEW))
    undo_adoptions(branch, "docs", [adoption(NEW)], NEW)
    keep_adoption(branch, "docs", adoption(NEWER))
    keep_adoption(branch, "docs", adoption(LEFT))
    undo_adoptions(branch, "docs", [adoption(LEFT)], LEFT)
    raise_epoch(branch, "docs", "s", "run")


def promoted(store: Store) -> bool:
    assert adoption(LEFT) not in adopted(store), "it was undone before"
    found: list[Manifest] = []
    for key in ("p", "q/ä"):
        above, now = (store.in_force("docs", stage, key) for stage in "st")
        assert above is not None
        assert now is not None
        assert now.upstream["s"] == str(store.latest("docs", "s", [key])[key]) or (
            above.plan != now.plan
        ), "a manifest is never put in force before the ones that it was made from"
        found += [above, now]
    for each in found:
        names = store.parts_of(each).names()
        assert {part.name for part in each.parts} <= names.keys(), "parts come first"
    return {each.plan for each in found} == {"1" * 32}


def test_a_promotion_puts_manifests_and_their_parts_in_force(store, branch):
    work(store, branch)
    own = content(branch)
    made = [*Promotion(branch, store, "docs").carry_out()]
    assert {(each.stage, each.partition, len(each.parts)) for each in made} == {
        (stage, key, 1) for stage in "st" for key in ("p", "q/ä")
    }
    assert promoted(store)
    assert store.in_force("docs", "s", None).plan == "0" * 32
    assert read_pin(store, "docs", "s", "d") is not None
    assert adopted(store) == [adoption(NEWER)]
    assert read_epoch(store, "docs", "s") == read_epoch(branch, "docs", "s") > 0
    assert content(branch) == own
    before = content(store)
    assert [each.parts for each in Promotion(branch, store, "docs").carry_out()] == [()] * 4
    assert content(store) == before


def test_a_promotion_into_another_store_than_the_fallback_is_refused(store, branch, tmp_path):
    work(store, branch)
    branch.mark()
    other = Store(StoragePath(str(tmp_path / "other")))
    with pytest.raises(StoreError, match=r"is a branch of '.*'; expected that store as the target"):
        Promotion(branch, other, "docs")


def test_a_promotion_that_is_killed_between_any_two_writes_is_run_again(store, branch, monkeypatch):
    work(store, branch)
    calls = kills = 0
    while True:
        with monkeypatch.context() as patched:
            for name in ("write", "create", "delete"):
                original = getattr(StoragePath, name)
                patched.setattr(StoragePath, name, interrupted_after(calls, original))
            try:
                list(Promotion(branch, store, "docs").carry_out())
                break
            except OSError:
                kills += 1
        promoted(store)
        calls += 1 if kills % 3 else 0  # some are killed at the same place again
        assert kills < 60
    assert kills > 3
    assert promoted(store)
    assert adopted(store) == [adoption(NEWER)]


@pytest.mark.parametrize("stage", ["s", "t"])
def test_a_promotion_is_refused_before_anything_is_written(store, branch, stage):
    work(store, branch)
    store.commit(manifest(partition="q/ä", stage=stage, plan="2"))
    before = content(store)
    with pytest.raises(StoreError, match=f"docs/{stage}, partition 'q/ä': the branch began at "):
        Promotion(branch, store, "docs")
    assert content(store) == before


def test_a_version_that_another_run_has_come_back_to_can_be_superseded(store, branch):
    work(store, branch)
    start = store.in_force("docs", "t", "p")
    store.commit(replace(start, plan="2" * 32))
    with pytest.raises(StoreError, match="docs/t, partition 'p': the branch began at"):
        Promotion(branch, store, "docs")
    store.commit(start)
    list(Promotion(branch, store, "docs").carry_out())
    assert promoted(store)


def test_a_promotion_is_refused_for_what_was_made_of_another_version(store, branch):
    above = commit(store, [1])
    base = store.commit(replace(manifest(stage="t"), upstream={"s": str(above)}))
    made = replace(manifest(stage="t", plan="1"), upstream={"s": str(above)})
    branch.commit(replace(made, branched_from=str(base)))
    changed = commit(branch, [3], str(above), plan="3")
    before = content(store)
    with pytest.raises(StoreError, match=f"docs/t, partition 'p': it was made from {above} of 's'"):
        next(Promotion(branch, store, "docs").carry_out())
    assert content(store) == before
    same = commit(branch, [1], str(above))
    assert len([*Promotion(branch, store, "docs").carry_out()]) == 2, "it came back to it"
    branch.manifests("docs", "s", "p").delete([str(changed), str(same)])
    commit(store, [2], plan="2")
    with pytest.raises(StoreError, match=f"it was made from {above} of 's', but .* has 0"):
        next(Promotion(branch, store, "docs").carry_out())
    with pytest.raises(StoreError, match="has committed no partition of pipeline 'other'"):
        Promotion(branch, store, "other")


def test_a_commit_during_a_promotion_is_not_superseded(store, branch):
    work(store, branch)
    made, folder = Promotion(branch, store, "docs"), store.root.child("docs")
    records = folder.names()
    now = store.commit(manifest(partition="p", stage="t", plan="2"))
    with pytest.raises(StoreError, match=r"docs/t, partition 'p'\. Another run committed it"):
        next(made.carry_out())
    assert store.latest("docs", "t", ["p"])["p"] == now
    assert store.latest("docs", "s", ["p"])["p"].sequence == 1, "nothing was promoted"
    assert folder.names() == records


def test_of_two_branches_the_second_is_promoted_where_the_first_was_not(store, branch):
    work(store, branch)
    second = open_branch(f"{branch.root.url}2", store.root.url, {})
    start = store.latest("docs", "s", [None])[None]
    commit(second, [7], str(start), partition=None)
    list(Promotion(branch, store, "docs").carry_out())
    assert [*Promotion(second, store, "docs").carry_out()]
    third = open_branch(f"{branch.root.url}3", store.root.url, {})
    commit(third, [8], str(start), partition=None)
    commit(third, [8], partition="new")
    before = content(store)
    with pytest.raises(StoreError, match=r"docs/s: the branch began at .* in a new branch"):
        Promotion(third, store, "docs")
    assert content(store) == before


def test_a_branch_is_no_fallback(store, branch):
    above = f"{branch.root.url}2"
    assert vd.FragmentStore(root=above, fallback=branch.root.url).open().fallback is not None
    branch.mark()
    with pytest.raises(
        StoreError, match=f"is itself a branch, of '{store.root.url}'.*pass fallback="
    ):
        vd.FragmentStore(root=above, fallback=branch.root.url).open()


def test_parts_that_are_about_to_be_deleted_are_written_again(store, branch):
    work(store, branch)
    info = part(store.parts("docs", "s", "p"), [5, 6])
    path = f'{{"p/{info.name}": 1}}'
    store.root.child("docs", "s").write("condemned.json", path.encode())
    made = [*Promotion(branch, store, "docs").carry_out()]
    assert [len(each.parts) for each in made] == [1, 1, 1, 1]
