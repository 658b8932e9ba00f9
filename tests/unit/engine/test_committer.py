"""The threads that commit."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import InProcess, committed, compute, executed
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.committer import Commit, Committer
from vane_dagster.engine.executor import execute
from vane_dagster.engine.run_state import RunState
from vane_dagster.events import Committed, Failed
from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import FileRecord, Manifest, ManifestName
from vane_dagster.storage.promotion import Promotion
from vane_dagster.storage.publish.parquet import FolderPublisher
from vane_dagster.storage.store import Store


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_panics_is_the_error_of_its_partition(tmp_path: Path, monkeypatch):
    def panic(*args: object, **given: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", panic)
    docs, store = published(tmp_path, "delta")
    with pytest.raises(vd.errors.StoreError, match="committed: PanicException: index out of"):
        compute(docs, store)


def test_a_run_fails_if_the_thread_that_commits_has_ended(tmp_path, store, monkeypatch):
    """The second partition waits for the commit of the first, and is not awaited."""

    def fail(*args: object, **given: object) -> None:
        raise MemoryError("no memory for the event")

    monkeypatch.setattr(RunState, "_on_committed", fail)
    drift = vd.checks.Drift("label", min_rows=1)
    with pytest.raises(MemoryError, match="no memory for the event"):
        compute(labelled(tmp_path, {"a": ["x"], "b": ["x"]}, drift), store, ["a", "b"])
    assert store.in_force("docs", "clean", "a") is not None
    assert store.in_force("docs", "clean", "b") is None


def test_partitions_are_committed_in_parallel_and_each_in_its_order(tmp_path, store, monkeypatch):
    keys, commit = ["a", "b", "c"], Store.commit
    all_at_once = threading.Barrier(len(keys))

    def committing(self: Store, *given: Any) -> ManifestName:
        all_at_once.wait(timeout=30)
        return commit(self, *given)

    monkeypatch.setattr(Store, "commit", committing)
    check = vd.checks.NullRate()
    events = compute(labelled(tmp_path, {key: ["x"] for key in keys}, check), store, keys)
    for key in keys:
        made = [e for e in events if isinstance(e, Committed) and e.partition == key]
        assert [each.stage for each in made] == ["clean", "below"]
        assert made[1].manifest.upstream == {"clean": str(made[0].name)}


class AtOnce:
    """Counts the threads that are in a function at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.05)

    def __exit__(self, *error: object) -> None:
        self.now -= 1


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_one_thread_at_a_time_changes_a_table(tmp_path, store, monkeypatch, format):
    at_once, keys = AtOnce(), ["a", "b", "c"]
    docs = labelled(tmp_path, {key: ["x"] for key in keys}, vd.checks.NullRate())
    folder = "/{partition_key}" if format == "parquet" else ""
    out = docs["below"].write("out", f"{tmp_path}/out{folder}", format=format)
    kind = type(out.spec.publisher("a"))
    publish = kind.publish

    def publishing(self: Any, manifest: Manifest) -> Any:
        with at_once:
            return publish(self, manifest)

    monkeypatch.setattr(kind, "publish", publishing)
    compute(docs, store, keys)
    assert (at_once.most == 1) == (format == "delta")


WITHIN = AtOnce()


@dataclass(frozen=True)
class Slow(vd.checks.Check):
    def evaluate(self, context: Any) -> vd.checks.CheckOutcome:
        with WITHIN:
            return vd.checks.CheckOutcome(True)


def test_one_thread_at_a_time_evaluates_checks_of_users(tmp_path, store):
    compute(labelled(tmp_path, {key: ["x"] for key in "abc"}, Slow()), store, [*"abc"])
    assert WITHIN.most == 1


def test_the_requests_of_a_publication(tmp_path, monkeypatch):
    """Of its commit alone: the listings of manifests and of files find what others have changed."""
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "rows.parquet")
    requests, depth = Counter[str](), threading.local()

    def counted(name: str) -> Any:
        real = getattr(MemoryFileSystem, name)

        def request(self: Any, path: str, *given: Any, **options: Any) -> Any:
            is_nested, depth.within = getattr(depth, "within", False), True
            is_commit = threading.current_thread().name == "vane-commit" and "/kept/" not in path
            requests[name] += is_commit and not is_nested
            try:
                return real(self, path, *given, **options)
            finally:
                depth.within = is_nested

        return request

    for name in ("ls", "find", "exists", "info", "cat_file", "pipe_file", "mv", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, counted(name))
    for where, made in (
        ("id > 0", {"ls": 6, "pipe_file": 2, "mv": 1, "rm_file": 1}),
        # It opens the former manifest, and removes its file, from a listing.
        ("id > 1", {"ls": 7, "pipe_file": 2, "mv": 1, "rm_file": 2, "cat_file": 1}),
    ):
        requests.clear()
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "rows.parquet")), id="id")
        docs.project("kept", ["id"], where=where).write("out", f"memory://{tmp_path}/out")
        compute(docs, Store(StoragePath(f"memory://{tmp_path}/store")))
        assert +requests == made


def published(
    tmp_path: Path, format: str = "parquet", where: str = "id > 0"
) -> tuple[vd.Pipeline, Store]:
    """Return a pipeline that publishes ids up to 9, and its store."""
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "rows.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "rows.parquet")), id="id")
    docs.project("kept", ["id"], where=where).write("out", f"{tmp_path}/out", format=format)
    return docs, Store(StoragePath(str(tmp_path / "store")))


def published_ids(tmp_path: Path) -> list[int]:
    files = sorted((tmp_path / "out").glob("*.parquet"))
    return [n for file in files for n in pq.read_table(file)["id"].to_pylist()]


def test_what_another_run_has_published_meanwhile_is_taken(tmp_path: Path, monkeypatch):
    docs, store = published(tmp_path)
    put, runs = Committer.put, []

    def late(self: Committer, commit: Commit) -> None:
        if not runs:
            runs.append("other")
            compute(docs, store)
        put(self, commit)

    monkeypatch.setattr(Committer, "put", late)
    (made,) = committed(compute(docs, store), "out")
    (name,) = store.manifests("docs", "out", None).names()
    assert str(made.name) == name


def test_local_files_are_hashed_once_before_their_commit(tmp_path: Path):
    hashed: list[str] = []
    store = Store(StoragePath(str(tmp_path)))
    committer = Committer(
        store, lambda file: hashed.append(file.url), lambda _: nullcontext(), list
    )
    new, known, remote = (
        FileRecord(url, 1, "v", content)
        for url, content in (("file:///new", None), ("file:///known", "abc"), ("s3://b/a", None))
    )
    committer.hash_ahead([new, known, remote, new])
    committer.hash_ahead([new])
    for each in committer._hashes.values():
        each.result()
    committer.close()
    assert hashed == ["file:///new"]


def test_parts_are_on_the_disk_before_a_manifest_names_them(tmp_path: Path, monkeypatch):
    """Those of this run, and those that a run which was killed has just left."""
    docs, store = published(tmp_path)
    synced: list[str] = []
    commit = Store.commit

    def committing(self: Store, manifest: Manifest, *former: Any) -> ManifestName:
        assert {name for part in manifest.parts for name in part.files} <= {*synced}
        return commit(self, manifest, *former)

    monkeypatch.setattr(StoragePath, "sync", lambda _, name: synced.append(name))
    monkeypatch.setattr(Store, "commit", committing)
    compute(docs, store)
    for manifest in (tmp_path / "store").rglob("manifests/**/*.json"):
        manifest.unlink()
    synced.clear()
    assert len(committed(compute(docs, store), "kept")) == 1


def test_parts_of_equal_names_in_two_partitions_are_each_on_the_disk(tmp_path, store, monkeypatch):
    """Both partitions read the same file, and their parts are written before either commits."""
    write_source(tmp_path / "src" / "a", {"id": range(10)})
    keys = {
        "letter": dg.StaticPartitionsDefinition(["a"]),
        "n": dg.StaticPartitionsDefinition("12"),
    }
    source = vd.parquet(str(tmp_path / "src" / "{partition_key.letter}"))
    partitions = dg.MultiPartitionsDefinition(keys)
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=partitions)
    docs.project("clean", ["id"])
    put, commit, held = Committer.put, Store.commit, list[Commit]()
    synced, begun, committed_parts = set[tuple[str, str]](), list[str](), list[str]()

    def hold(self: Committer, given: Commit) -> None:
        held.append(given)
        for each in held if len(held) == 2 else ():
            put(self, each)

    def committing(self: Store, manifest: Manifest, *former: Any) -> ManifestName:
        folder = self.parts(manifest.pipeline, manifest.stage, manifest.partition)
        assert {(folder.url, part.name) for part in manifest.parts} <= synced
        committed_parts.extend(part.name for part in manifest.parts)
        return commit(self, manifest, *former)

    def sync(self: StoragePath, name: str) -> None:
        begun.append(self.url)
        time.sleep(0.3 if len(begun) == 1 else 0)  # that of the second is done first
        synced.add((self.url, name))

    monkeypatch.setattr(Committer, "put", hold)
    monkeypatch.setattr(Store, "commit", committing)
    monkeypatch.setattr(StoragePath, "sync", sync)
    compute(docs, store, ["a|1", "a|2"])
    assert len(committed_parts) == 2
    assert len({*committed_parts}) == 1


def test_of_two_publishers_the_later_manifest_wins(tmp_path, store, monkeypatch):
    """The other run publishes between this one's manifest and its cleaning up."""
    commit = Store.commit

    def overtaken(store: Store, manifest: Manifest, *names: Any) -> ManifestName:
        name = commit(store, manifest, *names)
        if manifest.stage == "out":
            monkeypatch.undo()
            compute(*published(tmp_path, where="id < 8"))
        return name

    monkeypatch.setattr(Store, "commit", overtaken)
    compute(*published(tmp_path, where="id < 5"))
    assert published_ids(tmp_path) == [*range(8)]


def test_a_publisher_that_lost_its_files_leaves_those_of_the_other(tmp_path, store, monkeypatch):
    """The other run takes this one for killed, and removes what it has published before it ends."""
    publish = FolderPublisher.publish

    def overtaken(self: FolderPublisher, manifest: Manifest) -> Any:
        made = publish(self, manifest)
        monkeypatch.undo()
        compute(*published(tmp_path, where="id < 8"))
        return made

    monkeypatch.setattr(FolderPublisher, "publish", overtaken)
    with pytest.raises(vd.errors.StoreError, match="does not have the files published there"):
        compute(*published(tmp_path, where="id < 5"))
    in_force = store.in_force("docs", "out", None)
    assert in_force is not None
    assert (published_ids(tmp_path), in_force.rows) == ([*range(8)], 8)
    compute(*published(tmp_path, where="id < 5"))
    assert published_ids(tmp_path) == [*range(5)]


def test_a_branch_remembers_the_manifest_that_it_started_from(tmp_path, store):
    write_source(tmp_path / "src", {"id": range(10)})
    main, branch = store, Store(StoragePath(str(tmp_path / "branch")), fallback=store)

    def run(store: Store, where: str) -> Manifest:
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        docs.project("clean", ["id"], where=where)
        compute(docs, store)
        found = store.in_force("docs", "clean", None)
        assert found is not None
        return found

    assert run(branch, "id < 1").branched_from == "", "there was nothing to start from"
    assert run(branch, "id < 2").branched_from == ""
    assert run(main, "id < 3").branched_from == "", "it is not a branch"
    other = Store(StoragePath(str(tmp_path / "other")), fallback=main)
    started_from = str(main.latest_own("docs", "clean", None))
    assert run(other, "id < 4").branched_from == started_from
    run(main, "id < 5")
    assert run(other, "id < 6").branched_from == started_from

    third = Store(StoragePath(str(tmp_path / "third")), fallback=main)
    run(third, "id < 7")
    assert [*Promotion(third, main, "docs").carry_out()]
    promoted = str(main.latest_own("docs", "clean", None))
    assert run(third, "id < 8").branched_from == promoted
    assert run(third, "id < 9").branched_from == promoted
    for store in (main, third):
        assert [*collect(store, GcPolicy(time.time() + 1e6, 1.0, 1.0))]
    assert [*Promotion(third, main, "docs").carry_out()], "its history is not needed"


def labelled(tmp_path: Path, labels: dict[str, list[str]], check: vd.checks.Check) -> vd.Pipeline:
    """Two stages over partitions; the first has a check."""
    for key, texts in labels.items():
        write_source(tmp_path / "src" / key, {"id": range(len(texts)), "label": texts})
    docs = partitioned(tmp_path / "src", labels)
    docs.project("clean", ["label"], asset=vd.Asset(checks=[check])).project("below", ["label"])
    return docs


def test_partitions_are_compared_with_the_one_before_which_is_committed_first(
    tmp_path, store, monkeypatch
):
    commit = Store.commit

    def committing(self: Store, manifest: Manifest, *names: Any) -> ManifestName:
        time.sleep(0.3 if (manifest.stage, manifest.partition) == ("clean", "a") else 0)
        return commit(self, manifest, *names)

    monkeypatch.setattr(Store, "commit", committing)
    check = vd.checks.Drift("label", min_rows=10, severity="ERROR", blocking=True)
    labels = {"a": ["x", "y"] * 100, "b": ["x", "y"] * 90, "c": ["x"] * 10 + ["z"] * 190}
    events = executed(labelled(tmp_path, labels, check), store, [*labels], InProcess())
    found = {
        event.partition: next(c for c in event.manifest.checks if c.name == "drift_label")
        for event in committed(events, "clean")
    }
    assert {key: each.passed for key, each in found.items()} == {"a": True, "b": True, "c": False}
    assert [found[key].metadata["previous"] for key in "bc"] == ["a", "b"]
    assert {event.partition for event in committed(events, "below")} == {"a", "b"}
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.partition, failed.stage) == ("c", "below")
    message = "blocking check 'drift_label' of the upstream stage 'clean' failed: "
    assert str(failed.error).startswith(message)
    assert str(failed.error).endswith("not committed; it has no former version")


def test_a_check_of_a_table_that_converts_a_type(tmp_path, store):
    """Delta has no unsigned integers; the rows are read where they are stored as they are."""
    write_source(tmp_path / "src", {"id": [1, 2], "u": pa.array([3, 4], pa.uint8())})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    golden = vd.Asset(checks=[vd.checks.Golden({"id": [1, 2], "u": [3, 4]})])
    docs.project("kept", ["u"]).write("out", f"{tmp_path}/out", format="delta", asset=golden)
    (made,) = committed(compute(docs, store), "out")
    assert all(check.passed for check in made.manifest.checks), made.manifest.checks


def test_a_partition_waits_for_the_one_it_is_compared_with_in_its_dimension(tmp_path, store):
    """That one need not precede it in the plan, and a number may have more than 53 bits."""
    days, regions = (
        dg.StaticPartitionsDefinition(["1", "2"]),
        dg.StaticPartitionsDefinition(["a", "b"]),
    )
    both = dg.MultiPartitionsDefinition({"region": regions, "zday": days})
    for region, day in itertools.product("ab", "12"):
        numbers = [int(day) << 60 | n + 1 for n in range(200)]
        write_source(tmp_path / region / day, {"id": range(200), "n": numbers})
    source = vd.parquet(f"{tmp_path}/{{partition_key.region}}/{{partition_key.zday}}/*.parquet")
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=both)
    drift = vd.Asset(checks=[vd.checks.Drift("n", min_rows=10)])
    docs.project("clean", ["n"], asset=drift)
    order = DagsterOrder(both, None)
    keys = ["a|1", "b|1", "a|2", "b|2"]  # as a user writes them
    events: list[Any] = []
    planned = plan_run(docs, ("clean",), keys, store)
    runner = CheckRunner(docs, store, order.before)
    backend: Any = InProcess()
    execute(planned, backend, store, "run", events.append, threading.Event(), runner)
    found = {
        event.partition: next(c for c in event.manifest.checks if c.name == "drift_n")
        for event in committed(events, "clean")
    }
    assert {key: each.passed for key, each in found.items()} == {
        "a|1": True, "b|1": True, "a|2": False, "b|2": False,
    }  # fmt: skip


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_partition_with_lost_rows_is_not_committed(tmp_path, store, monkeypatch, is_declared):
    described = "1 of 1 input rows are missing from the output"
    outcome = vd.checks.CheckOutcome(False, described, {"lost": 1})
    monkeypatch.setattr(vd.checks.IdsComplete, "evaluate", lambda *_: outcome)
    check = vd.checks.IdsComplete() if is_declared else vd.checks.NullRate()
    with pytest.raises(vd.errors.IntegrityError, match=described):
        compute(labelled(tmp_path, {"a": ["x"]}, check), store, ["a"])
    assert store.in_force("docs", "clean", "a") is None
