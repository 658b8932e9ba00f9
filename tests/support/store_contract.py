"""The contract of a store on any file system: tests over the fixtures `root` and `store`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.manifests import manifest, part
from vane_dagster.engine.committer import Commit, Committer, WithheldError
from vane_dagster.errors import StoreError
from vane_dagster.storage.manifest import (
    Manifest,
    ManifestName,
    PartInfo,
)
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store, read_part_info

# Folders


def test_a_folder_holds_what_is_written(root):
    folder = root.child("a", "b")
    assert folder.names() == folder.walk() == {}
    folder.write("x.bin", b"one")
    folder.write("x.bin", b"two!")
    folder.child("c").write("y.bin", b"3")
    assert folder.read("x.bin") == b"two!"
    assert folder.names() == {"x.bin": 4}
    assert root.child("a").walk() == {"b/x.bin": 4, "b/c/y.bin": 1}
    folder.move("x.bin", root.child("d"), "z.bin")
    assert root.child("d").read("z.bin") == b"two!"
    assert folder.names() == {}
    folder.delete(["x.bin", "never.bin"])
    with pytest.raises(FileNotFoundError):
        folder.read("x.bin")


def test_a_reader_never_sees_half_a_file(root):
    wholes = [bytes([n]) * 300_000 for n in range(4)]
    root.write("f", wholes[0])
    ended = threading.Event()

    def write() -> None:
        for n in range(12):
            root.write("f", wholes[n % 4])
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not ended.is_set() or reads < 5:
        assert root.read("f") in wholes
        assert set(root.names()) <= {"f"}
        reads += 1
    writer.join()


def test_of_several_that_create_a_file_one_does(root):
    folder = root.child("a")
    start = threading.Barrier(8)

    def create(data: bytes) -> bool:
        start.wait()
        return folder.create("f", data)

    wholes = [bytes([n]) * 300_000 for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(create, wholes))
    most = 8 if "memory://" in root.url else 1  # fsspec's, for tests alone, has no lock
    assert 1 <= created.count(True) <= most
    assert folder.read("f") in [whole for whole, is_made in zip(wholes, created) if is_made]
    assert not folder.create("f", b"later")
    assert folder.names() == {"f": 300_000}


def test_entries_say_when_files_were_changed(root):
    root.child("a").write("x.json", b"12")
    ((path, stored),) = root.entries().items()
    assert path == "a/x.json"
    assert stored.size == 2
    assert abs(time.time() - stored.modified) < 3600
    assert root.folders() == ["a"]
    assert root.child("nothing").entries() == {}
    assert root.child("nothing").folders() == []


# Parts


def test_a_part_says_what_it_is(root):
    info = part(root, ["b", "a", "ä"])
    assert (info.rows, info.id_min, info.id_max) == (3, "a", "ä")
    assert root.names() == {info.name: info.bytes}
    assert read_part_info(root, info.name) == info
    assert read_part(root, info.name).to_pydict() == {"id": ["b", "a", "ä"]}
    assert read_part(root, info.name).schema.metadata is None
    empty = part(root, pa.array([], pa.int64()), key="b" * 40)
    assert (empty.rows, empty.id_min, empty.id_max) == (0, None, None)
    assert read_part_info(root, empty.name) == empty


def test_the_same_rows_are_the_same_file(root):
    assert part(root, [1, 2]) == part(root, [1, 2])
    other = part(root, [2, 1])
    assert len(root.names()) == 2, "a part is never overwritten with other rows"
    assert set(Store(root).existing_parts(root)) == {other.key}


# Commits


def test_the_largest_sequence_is_in_force(store):
    for n in range(3):
        info = part(store.parts("docs", "s", "p"), [n])
        name = store.commit(manifest([info], plan=str(n)))
        assert name.sequence == n + 1
        assert store.latest("docs", "s", ["p"]) == {"p": name}
    store.commit(manifest(partition="other"))
    assert store.latest("docs", "s", ["p"]) == {"p": name}
    assert store.latest("docs", "other", ["p"]) == {}


def test_many_partitions_are_found_in_one_listing(store):
    keys = ["A", "a", "b/c", "2026-01-01", None, *(f"k{n}" for n in range(8))]
    names = {key: store.commit(manifest(partition=key)) for key in keys}
    store.commit(manifest(partition="not asked for"))
    assert store.latest("docs", "s", keys) == names
    assert store.latest("docs", "s", ["a", None]) == {"a": names["a"], None: names[None]}


def test_two_writers_at_once(store):
    """Both commit, all readers agree which one is in force, and both parts are complete."""
    infos: list[PartInfo] = []
    start = threading.Barrier(4)

    def write(n: int) -> None:
        start.wait()
        info = part(store.parts("docs", "s", "p"), [n] * 1000)
        infos.append(info)
        store.commit(manifest([info], plan=str(n)))

    threads = [threading.Thread(target=write, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {str(store.latest("docs", "s", ["p"])["p"]) for _ in range(3)}
    assert len(found) == 1
    name = store.latest("docs", "s", ["p"])["p"]
    (info,) = store.read("docs", "s", "p", name).parts
    assert info in infos
    assert read_part(store.parts("docs", "s", "p"), info.name).num_rows == 1000
    assert store.commit(manifest()).sequence == name.sequence + 1


def test_what_another_run_has_committed_meanwhile_is_not_committed_again(store):
    info = part(store.parts("docs", "s", "p"), [1])
    before = store.commit(manifest())
    first, name = store.commit_once(replace(manifest([info]), run_id="first"), before)
    again, same = store.commit_once(replace(manifest([info]), run_id="second"), before)
    assert name.sequence == before.sequence + 1
    assert same == name
    assert (first.run_id, again.run_id) == ("first", "first")
    # The version was known when the run was planned, as after a part was deleted.
    assert store.commit_once(manifest([info]), name)[1].sequence == name.sequence + 1
    other = part(store.parts("docs", "s", "p"), [2])
    assert store.commit_once(manifest([other]), before)[1].sequence == name.sequence + 2
    store.announce(manifest([other]))
    unfinished = store.commit_once(manifest([other]), before)[1]
    assert unfinished.sequence == name.sequence + 3, "a publication that is not ended"


def test_a_run_that_began_before_a_forced_one_does_not_replace_its_results(store):
    before = store.commit(manifest())
    forced = store.commit_once(replace(manifest(), generation="1"), before)[1]
    late = replace(manifest([part(store.parts("docs", "s", "p"), [1])]), run_id="late")
    words = "a run that began later has computed it again"
    with pytest.raises(StoreError, match=words):
        store.commit_once(late, before)
    with pytest.raises(StoreError, match=words):
        store.committed_since(late, before, [str(before), str(forced)])
    assert store.latest("docs", "s", ["p"])["p"] == forced


def commit(store: Store, made: Manifest, **given: Any) -> ManifestName | vd.errors.VaneError:
    return commits(store, [(made, given)])[made.stage]


def commits(store: Store, all_: Sequence[tuple[Manifest, dict[str, Any]]]) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    committer = Committer(
        store, lambda file: None, lambda _: contextlib.nullcontext(), lambda _: ()
    )
    for made, given_ in all_:
        common = {
            "folder": store.parts(made.pipeline, made.stage, made.partition),
            "publish": None, "unique": None, "upstream": {}, "opened": {},
            "figures": lambda made: {},
            "done": lambda m, outcome: outcomes.__setitem__(m.stage, outcome),
        }  # fmt: skip
        committer.put(Commit(manifest=made, **{**common, **given_}))
    committer.close()
    return outcomes


def test_an_id_in_two_fragments_is_refused_with_its_files(store):
    folder = store.parts("docs", "s", "p")
    parts = [
        part(folder, ids, key=str(n) * 40)
        for n, ids in enumerate([[1, 9], [2, 3], [4, 9, 3], [20, 30], [5, 6]])
    ]
    error = commit(store, manifest(parts), unique="id")
    assert isinstance(error, vd.errors.SourceError)
    assert "stage 'docs/s', partition 'p'" in str(error)
    assert "ids such as 3, 9 of 'id'" in str(error)
    assert "'rows 0 to 2 of file:///f0', 'rows 0 to 2 of file:///f1', 'rows 0 to 3 of " in str(
        error
    )
    assert "f3" not in str(error)
    assert store.latest("docs", "s", ["p"]) == {}
    assert isinstance(commit(store, manifest(parts[1:2] + parts[3:]), unique="id"), ManifestName)


def test_what_is_below_a_failed_commit_is_withheld(store):
    folder = store.parts("docs", "s", "p")
    parts = [part(folder, [1], key="1" * 40), part(folder, [1, 2], key="2" * 40)]
    below = (manifest(stage="below"), {"upstream": {"s": None}})
    outcomes = commits(store, [(manifest(parts), {"unique": "id"}), below])
    assert isinstance(outcomes["s"], vd.errors.SourceError)
    assert isinstance(outcomes["below"], WithheldError)
    assert outcomes["below"].upstream == "s"
    assert "its upstream stage 's' was not committed" in str(outcomes["below"])
    assert store.latest("docs", "below", ["p"]) == {}


def test_a_commit_names_the_manifests_above_it(store):
    outcomes = commits(
        store, [(manifest(), {}), (manifest(stage="below"), {"upstream": {"s": None}})]
    )
    read = store.read("docs", "below", "p", outcomes["below"])
    assert read.upstream == {"s": str(outcomes["s"])}
    assert read.committed_at > 1e9


def interrupted_after(calls: int, original: Any) -> Any:
    left = [calls]

    def wrapped(*args: Any) -> Any:
        if left[0] == 0:
            raise OSError("the run was killed here")
        left[0] -= 1
        return original(*args)

    return wrapped


__all__ = [name for name in dir() if name.startswith("test_")]
