"""The contract of a publisher: tests over the fixture `published`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from support.manifests import manifest, part
from support.store_contract import commit, interrupted_after
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.publish.base import Publisher
from vane_dagster.storage.store import Store


@dataclass
class Published:
    """A target of a `write` stage.

    Attributes:
        store: The pipeline's store.
        publisher: Returns the publisher of a partition.
        table: Reads the rows of all partitions as other tools do, now or at a version.
        add: Adds a row by another writer.
        remove: Removes a row by another writer.
        versions: Returns the versions of a table, the oldest first; none for files.
        compact: Rewrites the files of a table and deletes old versions, as its maintenance does.
        drop: Deletes the target.
    """

    store: Store
    publisher: Callable[[str], Publisher]
    table: Callable[[Any], pa.Table]
    add: Callable[[int], None]
    remove: Callable[[int], None]
    versions: Callable[[], Sequence[Any]]
    compact: Callable[[], object]
    drop: Callable[[], object]

    def manifest(self, key: str, rows: dict[str, list[int]], plan: str) -> Manifest:
        """Stage rows by fragment key."""
        publisher = self.publisher(key)
        staged = [
            part(publisher.staging, ids, key=name * 40, compression=publisher.compression)
            for name, ids in rows.items()
        ]
        return replace(
            manifest(staged, key, plan=plan), kind="write", keys=("id",), reads=("clean",)
        )

    def commit(self, key: str, made: Manifest) -> object:
        publisher = self.publisher(key)
        return commit(self.store, made, publish=publisher, folder=publisher.staging)

    def publish(self, key: str, rows: dict[str, list[int]], plan: str = "1") -> None:
        assert isinstance(self.commit(key, self.manifest(key, rows, plan)), ManifestName)

    def read(self, version: Any) -> list[int]:
        found: list[int] = self.table(version)["id"].to_pylist()
        return found

    @property
    def ids(self) -> list[int]:
        return sorted(self.read(None))

    def files(self, key: str) -> Sequence[str]:
        name = self.store.latest("docs", "s", [key])[key]
        return self.store.read("docs", "s", key, name).published_files

    def race(self, patch: pytest.MonkeyPatch, step: str, act: Callable[[], object]) -> list[str]:
        """Let something happen before the next call of a step; return a list that then has it."""
        owner, raced = type(self.publisher("p")), list[str]()
        name = step if hasattr(owner, step) else "publish"
        real = getattr(owner, name)

        def call(*args: Any, **given: Any) -> Any:
            if not raced:
                raced.append(name)
                act()
            return real(*args, **given)

        patch.setattr(owner, name, call)
        return raced

    def clean(self, key: str) -> bool:
        """Whether nothing is staged or announced."""
        names = self.store.manifests("docs", "s", key).names()
        staged = self.publisher(key).staging.walk()
        return not staged and all(ManifestName.parse(name) for name in names)


def test_a_partition_is_replaced_and_nothing_else(published):
    published.publish("p", {"a": [1], "b": [2, 3]})
    first = published.files("p")
    published.publish("q", {"c": [4]})
    published.add(99)
    assert published.ids == [1, 2, 3, 4, 99]
    before = [*published.versions()]
    published.publish("p", {"a": [1], "d": [5]}, "2")
    assert published.ids == [1, 4, 5, 99]
    if before:
        assert [*published.versions()][:-1] == before, "it is one commit"
        assert sorted(published.read(before[-1])) == [1, 2, 3, 4, 99], "time travel"
    published.publish("p", {}, "3")
    assert published.ids == [4, 99]
    assert published.publisher("p").holds(published.files("p"))
    published.publish("p", {"a": [1], "b": [2, 3]}, "4")
    assert published.ids == [1, 2, 3, 4, 99], "the rows that it had before"
    if before:
        assert not {*first} & {*published.files("p")}, "no file is added again"
    assert published.clean("p")
    assert published.clean("q")
    assert published.publisher("q").holds(published.files("q"))


def test_the_partitions_that_a_target_has_are_known(published):
    """However their rows were rewritten: only a partition without any is published again."""

    def present() -> set[object]:
        asked = ["p", "q", "empty", "never"]
        return {*published.publisher("never").present(asked)} & {*asked}

    assert present() == set()
    published.publish("p", {"a": [1], "b": [2]})
    published.publish("q", {"c": [3]})
    published.publish("empty", {})
    published.add(99)
    assert present() == {"p", "q"}
    published.remove(2)
    published.compact()
    assert present() == {"p", "q"}
    published.publish("q", {"d": [3]}, "2")
    assert present() == {"p", "q"}
    published.remove(1)
    assert present() == ({"q"} if published.versions() else {"p", "q"})
    published.drop()
    assert present() == set()
    published.publish("q", {"d": [3]}, "2")
    assert present() == {"q"}
    assert published.ids == [3]


def test_no_pattern_for_parquet_files_matches_what_is_staged(published):
    published.publish("p", {"a": [1]})
    publisher = published.publisher("p")
    before = publisher.target.walk()
    published.manifest("p", {"b": [2]}, "2")
    staged = publisher.target.walk().keys() - before
    assert [name.rpartition(".")[2] for name in staged] == ["staged"]
    assert published.ids == [1]


def test_the_same_rows_are_published_once(published):
    made = published.manifest("p", {"a": [1], "b": [2]}, "1")
    published.commit("p", made)
    files = published.files("p")
    assert isinstance(published.commit("p", made), ManifestName)
    assert published.files("p") == files
    assert published.ids == [1, 2]
    assert published.clean("p")


@pytest.mark.parametrize("killed_in", ["publish", "commit", "published_before"])
def test_nothing_of_a_killed_run_is_left_behind(published, killed_in, monkeypatch):
    published.publish("p", {"a": [1], "b": [2]})
    made = published.manifest("p", {"c": [3]}, "2")
    with monkeypatch.context() as patch:
        owner = type(published.publisher("p")) if killed_in == "publish" else published.store
        patch.setattr(owner, killed_in, interrupted_after(0, None))
        assert not isinstance(published.commit("p", made), ManifestName)
    published.publish("p", {"d": [4]}, "3")
    assert published.ids == [4]


@pytest.mark.parametrize(
    "step", ["_place", "_replace", "commit", "retire", "clear", "forget_announced"]
)
def test_a_publication_is_made_once_however_often_it_is_cut_off(published, step, monkeypatch):
    published.publish("p", {"a": [1], "b": [2]})
    before = [*published.versions()]
    owner = published.store if hasattr(published.store, step) else type(published.publisher("p"))
    name = step if hasattr(owner, step) else "publish"
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted_after(0, None))
            made = published.manifest("p", {"b": [2], "c": [3]}, "2")
            assert not isinstance(published.commit("p", made), ManifestName)
    if before:
        assert published.ids == ([1, 2] if step in ("_place", "_replace") else [2, 3]), (
            "nothing between"
        )
    published.publish("p", {"b": [2], "c": [3]}, "2")
    assert published.ids == [2, 3]
    assert len(published.versions()) == len(before) + bool(before)
    assert published.clean("p")


def test_a_killed_publication_that_others_changed_is_made_once(published, monkeypatch):
    """Its first names are in the table's history, so it gets others, and is recognized by them."""

    def killed() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(published.store, "commit", interrupted_after(0, None))
            made = published.manifest("p", {"b": [1, 2], "c": [3], "d": [4]}, "2")
            assert not isinstance(published.commit("p", made), ManifestName)
        return [*published.versions()]

    published.publish("p", {"a": [1]})
    killed()
    published.remove(3)
    before = killed()
    assert not before or published.ids == [1, 2, 3, 4]
    assert killed() == before
    published.publish("p", {"b": [1, 2], "c": [3], "d": [4]}, "2")
    assert published.ids == [1, 2, 3, 4]
    assert [*published.versions()] == before
    assert published.clean("p")


@pytest.mark.parametrize("step", ["_create", "_replace"])
def test_partitions_that_are_published_at_once_are_both_kept(published, step, monkeypatch):
    """The other run commits between this one's look at the table and its transaction."""
    with monkeypatch.context() as patch:
        raced = published.race(patch, step, lambda: published.publish("q", {"b": [2]}))
        published.publish("p", {"a": [1]})
    assert raced
    assert published.ids == [1, 2]
    before = len(published.versions())
    assert before <= 3, "that of the table, and one for each partition"
    with monkeypatch.context() as patch:
        raced = published.race(patch, "_replace", lambda: published.publish("q", {"d": [4]}, "2"))
        published.publish("p", {"c": [3]}, "2")
    assert raced
    assert published.ids == [3, 4]
    assert len(published.versions()) in (0, before + 2)


def test_one_partition_that_is_published_twice_at_once_is_there_once(published, monkeypatch):
    """Neither run sees rows of the other to replace: a plain append would leave both."""
    made = published.manifest("p", {"a": [1]}, "1")
    with monkeypatch.context() as patch:
        raced = published.race(patch, "_replace", lambda: published.publish("p", {"b": [2]}, "2"))
        assert isinstance(published.commit("p", made), ManifestName)
    assert raced
    assert published.ids == [1]


def test_a_change_by_others_right_before_a_transaction_is_respected(published, monkeypatch):
    published.publish("p", {"a": [1, 2, 3]})
    published.add(99)

    def change() -> None:
        published.remove(3)
        published.add(98)

    with monkeypatch.context() as patch:
        raced = published.race(patch, "_replace", change)
        published.publish("p", {"b": [1, 3]}, "2")
    assert raced
    assert published.ids == [1, 3, 98, 99]


def test_a_lost_part_is_an_error_that_says_what_to_check(published):
    made, staging = published.manifest("p", {"a": [1]}, "1"), published.publisher("p").staging
    staging.delete([*staging.names()])
    error = str(published.commit("p", made))
    assert "does not have" in error
    assert "Another run may have published the partition at the same time. If not" in error


def test_of_two_runs_with_one_target_the_one_that_lost_says_so(published, monkeypatch):
    """The other run publishes after this one, and commits its manifest before."""
    made, real = published.manifest("p", {"a": [1]}, "1"), published.store.commit
    with monkeypatch.context() as patch:

        def overtaken(manifest: Manifest, *names: Any) -> ManifestName:
            patch.undo()
            published.publish("p", {"b": [2]}, "2")
            return real(manifest)

        patch.setattr(published.store, "commit", overtaken)
        error = published.commit("p", made)
    assert "Another run may have published the partition at the same time" in str(error)
    published.publish("p", {"a": [1]}, "1")
    assert published.ids == [1]


__all__ = [name for name in dir() if name.startswith("test_")]
