"""The store on a local disk, in memory and on a real S3 API."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from conftest import metadata, write_source
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from vane_dagster.engine.committer import Commit, Committer, WithheldError, check_unique
from vane_dagster.pipeline.specs import AssetOptions, WriteSpec
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import (
    FileRecord,
    FragmentRecord,
    Manifest,
    ManifestName,
    PartInfo,
    parse_part_name,
)
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.storage.paths import UNPARTITIONED, partition_folder, published_folder
from vane_dagster.storage.publish.parquet import Publisher, publisher_of
from vane_dagster.storage.store import Store, read_part_info


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder on each file system in turn."""
    if request.param == "local":
        return Location(str(tmp_path / "store"))
    if request.param == "memory":
        return Location(f"memory://{uuid.uuid4().hex}")
    return Location(f"s3://lake/{uuid.uuid4().hex}", request.getfixturevalue("s3"))


@pytest.fixture
def store(root: Location) -> Store:
    return Store(root)


def part(
    folder: Location, ids: Sequence[Any] = (1,), key: str = "a" * 40, **given: Any
) -> PartInfo:
    return write_part(pa.table({"id": ids}), PartTarget(folder, key, "id", **given))


def manifest(
    parts: Sequence[PartInfo] = (), partition: str | None = "p", stage: str = "s", plan: str = "0"
) -> Manifest:
    return Manifest(
        pipeline="docs",
        stage=stage,
        partition=partition,
        generation=0,
        plan=plan * 32,
        definition="d",
        schema=pa.schema([("id", pa.int64())]),
        fragments=[
            FragmentRecord(f"file:///f{i}", 0, info.rows, "f", 10) for i, info in enumerate(parts)
        ],
        parts=list(parts),
        files=[FileRecord("file:///f0", 10, "1")],
        upstream={"above": "name"},
        run_id="run",
        committed_at=1.5,
        info={"versions": {"python": "3"}},
    )


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


def test_urls_of_children():
    assert Location("memory://").child("a").file("b") == "/a/b"
    assert Location("memory://x/").child("a", "b").url == "memory://x/a/b"
    assert Location("/").child("a").path == "/a"
    assert Location("/data/").file_url("b") == "/data/b"
    assert Location("~/x").path == os.path.expanduser("~/x")


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


KILLED = """
    import os, sys
    from test_store import Location, Store, manifest, part
    store = Store(Location(sys.argv[1]))
    os.replace = lambda *paths: os._exit(9)
    {action}
"""


@pytest.mark.parametrize(
    "action", ["part(store.parts('docs', 's', 'p'))", "store.commit(manifest())"]
)
def test_a_kill_between_write_and_rename_leaves_nothing(tmp_path, action):
    code = textwrap.dedent(KILLED).format(action=action)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == 9

    assert [path for path in tmp_path.rglob("*") if path.is_file()], "it was killed too early"
    store = Store(Location(str(tmp_path)))
    assert store.latest("docs", "s", ["p"]) == {}
    assert store.existing_parts(store.parts("docs", "s", "p")) == {}
    info = part(store.parts("docs", "s", "p"))
    assert store.commit(manifest([info])).sequence == 1


@pytest.mark.parametrize("place", ["file in the way", "/proc/vane", "folder without permission"])
def test_a_folder_that_cannot_be_written(tmp_path, place):
    if place == "file in the way":
        (tmp_path / "file").write_text("")
        url = str(tmp_path / "file/store")
    elif place == "folder without permission":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        (tmp_path / "closed").mkdir(mode=0o555)
        url = str(tmp_path / "closed/store")
    else:
        url = place
    with pytest.raises(vd.StoreError) as raised:
        Store(Location(url)).commit(manifest())
    assert url in str(raised.value)
    denied = place == "folder without permission"
    fix = "Permission is denied" if denied else "Check that it exists, that the credentials reach"
    assert fix in str(raised.value)
    with pytest.raises(vd.StoreError):
        part(Location(url))


def test_a_bucket_that_is_not_there(s3):
    with pytest.raises(vd.StoreError, match=r"'s3://nowhere/x' cannot be written.*Check"):
        Location("s3://nowhere/x", s3).write("f", b"1")


def test_a_server_that_is_not_there(s3):
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    options = {**s3, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": config}
    with pytest.raises(vd.StoreError, match=r"'s3://lake/x' cannot be listed"):
        Location("s3://lake/x", options).names()
    listed = vd.parquet("s3://lake/x", storage_options=options).list_files([None], "here")[None]
    with pytest.raises(vd.SourceError, match=r"'s3://lake/x' cannot be listed.*the credentials"):
        raise listed


def test_a_driver_that_is_not_installed():
    code = """
        import sys
        from vane_dagster.storage.filesystem import Location
        sys.modules["gcsfs"] = sys.modules["adlfs"] = None
        for url in ("gs://lake/x", "abfs://lake/x", "nosuch://lake/x"):
            try:
                Location(url).names()
            except Exception as error:
                print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gcs, azure, unknown = done.stdout.splitlines()
    assert gcs.startswith("StoreError 'gs://lake/x' has no file system")
    assert gcs.endswith("Install vane-dagster[gcs]")
    assert azure.endswith("Install vane-dagster[azure]")
    assert unknown.startswith("StoreError 'nosuch://lake/x'")
    assert "fsspec knows" in unknown


def test_credentials_are_not_shown(s3):
    assert "dummy" not in repr(Location("s3://lake", s3))
    assert "dummy" not in repr(vd.parquet("s3://lake", storage_options=s3))


# Names


KEYS = st.one_of(
    st.none(),
    st.text(max_size=300),
    st.text(alphabet="aAbB./-_~=| \\\n", max_size=12),
    st.sampled_from(["..", ".", "", UNPARTITIONED, "a/../../b", "2026-01-01", "CON", "~a"]),
)


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True))
def test_no_two_partitions_share_a_folder(keys):
    one, other = map(partition_folder, keys)
    assert one.lower() != other.lower()


def test_entries_say_when_files_were_changed(root):
    root.child("a").write("x.json", b"12")
    ((path, stored),) = root.entries().items()
    assert path == "a/x.json"
    assert stored.size == 2
    assert abs(time.time() - stored.modified) < 3600
    assert root.folders() == ["a"]
    assert root.child("nothing").entries() == {}
    assert root.child("nothing").folders() == []


@given(KEYS)
def test_a_partition_stays_below_the_root(key):
    folder = partition_folder(key)
    assert len(folder.encode()) <= 255
    assert folder not in ("", ".", "..")
    assert not set(folder) & set('/\\\n\0:*?"<>|[]{}#%')
    assert not folder.startswith(".")
    assert os.path.normpath(f"/root/{folder}") == f"/root/{folder}"


@given(st.lists(KEYS.filter(bool), min_size=2, max_size=2, unique=True))
def test_published_folders_are_apart_and_seen_by_readers(keys):
    one, other = map(published_folder, keys)
    assert one != other
    assert len(one.encode()) <= 255
    assert one[:1] not in ("", ".", "_")
    assert not set(one) & set("/\\\n\0*?[]{}")


def test_readable_folders():
    assert published_folder("DE 2026-01") == "DE 2026-01"
    assert published_folder("münchen") == "münchen"
    assert published_folder("../etc").startswith("etc~")
    assert partition_folder("2026-01-01") == "2026-01-01"
    assert partition_folder("eu=1.5") == "eu=1.5"
    multi = dg.MultiPartitionKey({"day": "2026-01-01", "region": "EU"})
    assert partition_folder(multi).startswith("2026-01-01-EU~")


@given(st.integers(0, 10**9), st.integers(0, 10**6))
def test_manifest_names_can_be_parsed(sequence, generation):
    name = ManifestName(sequence, generation, "a" * 32, "b" * 16)
    assert ManifestName.parse(str(name)) == name


def test_other_names_are_passed_over():
    assert ManifestName.parse("fragments.json") is None
    assert ManifestName.parse(f".writing-{'a' * 12}") is None
    assert parse_part_name("part-0.parquet") is None
    assert parse_part_name(f"{'a' * 40}-{'b' * 16}.parquet") == ("a" * 40, "b" * 16)


def test_a_manifest_can_be_read_back(store):
    info = part(store.parts("docs", "s", "p"), [3, 1, 2])
    written = manifest([info])
    name = store.commit(written)
    assert store.read("docs", "s", "p", name) == written
    assert (written.rows, written.size) == (3, info.bytes)


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


def test_a_broken_part_is_named(root):
    info = part(root)
    root.write(info.name, b"PAR1")
    with pytest.raises(vd.StoreError, match=rf"{info.name}.*is damaged and cannot be read"):
        read_part_info(root, info.name)


def test_nested_columns_are_compressed(tmp_path):
    table = pa.table(
        {
            "id": range(1000),
            "vector": pa.array([[0.5] * 8] * 1000, pa.list_(pa.float32(), 8)),
            "words": [["same", "words"]] * 1000,
            "doc": [{"title": "t", "tags": [{"name": "n"}]}] * 1000,
            "counts": pa.array([[("k", 1)]] * 1000, pa.map_(pa.string(), pa.int64())),
        }
    )

    def codecs(**given: Any) -> set[str]:
        target = PartTarget(Location(str(tmp_path)), "c" * 40, "id", **given)
        group = pq.read_metadata(tmp_path / write_part(table, target).name).row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        assert len(columns) == 7
        return {column.compression for column in columns}

    assert "UNCOMPRESSED" not in codecs()
    for name in ("zstd", "snappy", "gzip"):
        assert codecs(compression=name) == {name.upper()}, "what the user declared"
    assert codecs(compression="none") == {"UNCOMPRESSED"}


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
    """Both commit; all readers agree which is in force; both parts are whole."""
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
    # Known when the run was planned, and planned anew all the same, as where a part was deleted.
    assert store.commit_once(manifest([info]), name)[1].sequence == name.sequence + 1
    other = part(store.parts("docs", "s", "p"), [2])
    assert store.commit_once(manifest([other]), before)[1].sequence == name.sequence + 2
    store.announce(manifest([other]))
    unfinished = store.commit_once(manifest([other]), before)[1]
    assert unfinished.sequence == name.sequence + 3, "a publication that is not ended"


def test_a_reader_finds_every_part_of_what_is_in_force(store):
    """Read all the time while partitions are written and committed."""
    folder = store.parts("docs", "s", "p")
    ended = threading.Event()

    def write() -> None:
        for n in range(5):
            parts = [part(folder, [n, i], key=f"{n}{i}" * 20) for i in range(3)]
            store.commit(manifest(parts, plan=str(n)))
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not ended.is_set() or not seen:
        if name := store.latest("docs", "s", ["p"]).get("p"):
            parts = store.read("docs", "s", "p", name).parts
            rows = [read_part(folder, info.name).num_rows for info in parts]
            assert rows == [2, 2, 2]
            seen.add(name)
    writer.join()


def commit(store: Store, made: Manifest, **given: Any) -> ManifestName | vd.VaneError:
    """Sends one commit through a committer of its own."""
    return commits(store, [(made, given)])[made.stage]


def commits(store: Store, all_: Sequence[tuple[Manifest, dict[str, Any]]]) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    committer = Committer(store, lambda file: None)
    for made, given_ in all_:
        common = {
            "folder": store.parts(made.pipeline, made.stage, made.partition),
            "publish": None, "unique": None, "upstream": {}, "waits_for": (),
            "above": {}, "judge": lambda made: (),
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
    assert isinstance(error, vd.SourceError)
    assert "stage 'docs/s', partition 'p'" in str(error)
    assert "ids 3, 9 of 'id'" in str(error)
    assert "in 'file:///f0', 'file:///f1', 'file:///f2';" in str(error), "and not f3 and f4"
    assert store.latest("docs", "s", ["p"]) == {}
    assert isinstance(commit(store, manifest(parts[1:2] + parts[3:]), unique="id"), ManifestName)


@given(st.lists(st.lists(st.integers(0, 30), max_size=4, unique=True), max_size=6))
def test_ids_in_two_fragments_are_always_found(tmp_path_factory, fragments):
    folder = Location(str(tmp_path_factory.getbasetemp() / "ids"))
    parts = [
        part(folder, pa.array(ids, pa.int64()), key=f"{n:040}") for n, ids in enumerate(fragments)
    ]
    every = [id for ids in fragments for id in ids]
    if len(every) == len(set(every)):
        check_unique(manifest(parts), folder, "id")
    else:
        with pytest.raises(vd.SourceError):
            check_unique(manifest(parts), folder, "id")


def test_what_is_below_a_failed_commit_is_withheld(store):
    folder = store.parts("docs", "s", "p")
    parts = [part(folder, [1], key="1" * 40), part(folder, [1, 2], key="2" * 40)]
    below = (manifest(stage="below"), {"waits_for": ["s"]})
    outcomes = commits(store, [(manifest(parts), {"unique": "id"}), below])
    assert isinstance(outcomes["s"], vd.SourceError)
    assert isinstance(outcomes["below"], WithheldError)
    assert outcomes["below"].upstream == "s"
    assert "its upstream 's' was not committed" in str(outcomes["below"])
    assert store.latest("docs", "below", ["p"]) == {}


def test_a_commit_names_the_manifests_above_it(store):
    outcomes = commits(
        store, [(manifest(), {}), (manifest(stage="below"), {"waits_for": ["s"], "upstream": {}})]
    )
    read = store.read("docs", "below", "p", outcomes["below"])
    assert read.upstream == {"s": str(outcomes["s"])}
    assert read.committed_at > 1e9


# Publishing


def publish(store: Store, target: Location, rows: dict[str, list[int]], plan: str) -> Any:
    staging = target.child("_vane_staging")
    parts = [part(staging, ids, key=key * 40) for key, ids in rows.items()]
    return commit(store, manifest(parts, plan=plan), publish=publisher(target), folder=staging)


def publisher(target: Location) -> Publisher:
    spec = WriteSpec("s", (), AssetOptions(), target.url, target.storage_options, "zstd")
    found = publisher_of(spec, None)
    assert found is not None
    return found


def published(target: Location) -> list[int]:
    """What any reader of the plain folder finds."""
    tables = [read_part(target, name) for name in target.names() if name.endswith(".parquet")]
    return sorted(id for table in tables for id in table["id"].to_pylist())


def test_publishing_replaces_a_partition_and_nothing_else(store):
    target = store.root.child("out", "p")
    pq_bytes = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [99]}), pq_bytes)
    target.write("of-another.parquet", pq_bytes.getvalue().to_pybytes())
    foreign = part(target, [98], key="f" * 40)
    target.write("README.md", b"notes")

    assert isinstance(publish(store, target, {"a": [1], "b": [2]}, "1"), ManifestName)
    assert published(target) == [1, 2, 98, 99]
    publish(store, target, {"a": [1], "c": [3]}, "2")
    assert published(target) == [1, 3, 98, 99]
    publish(store, target, {"a": [4]}, "3")
    assert published(target) == [4, 98, 99]
    assert target.read("README.md") == b"notes"
    assert foreign.name in target.names(), "a part of another pipeline"
    assert target.child("_vane_staging").names() == {}
    manifests = store.manifests("docs", "s", "p").names()
    assert all(ManifestName.parse(name) for name in manifests), "nothing stays announced"


@pytest.mark.parametrize("killed_in", ["promote", "commit", "retire"])
def test_what_a_killed_run_published_goes_with_the_next(store, killed_in, monkeypatch):
    """Also where the next run has other rows, so that it would not find them again."""
    target = store.root.child("out", "p")
    publish(store, target, {"a": [1], "b": [2]}, "1")
    with monkeypatch.context() as patch:
        if killed_in == "promote":
            patch.setattr(target.__class__, "names", interrupted_after(3, Location.names))
        elif killed_in == "commit":
            patch.setattr(store, "commit", interrupted_after(0, None))
        else:
            patch.setattr(store, "published_before", interrupted_after(0, None))
        assert isinstance(publish(store, target, {"c": [3]}, "2"), vd.StoreError)
    assert 3 in published(target)
    publish(store, target, {"d": [4]}, "3")
    assert published(target) == [4]


def interrupted_after(calls: int, original: Any) -> Any:
    left = [calls]

    def wrapped(*args: Any) -> Any:
        if left[0] == 0:
            raise OSError("the run was killed here")
        left[0] -= 1
        return original(*args)

    return wrapped


def test_what_was_published_is_published_again_without_staging(store):
    target = store.root.child("out", "p")
    publish(store, target, {"a": [1]}, "1")
    again = manifest(
        [dataclasses.replace(info) for info in store.read(
            "docs", "s", "p", store.latest("docs", "s", ["p"])["p"]).parts],
        plan="2",
    )  # fmt: skip
    assert isinstance(commit(store, again, publish=publisher(target)), ManifestName)
    assert published(target) == [1]


def test_a_part_that_another_run_took_away_is_told(store):
    target = store.root.child("out", "p")
    staging = target.child("_vane_staging")
    info = part(staging, [1])
    staging.delete([info.name])
    error = commit(store, manifest([info]), publish=publisher(target))
    assert isinstance(error, vd.StoreError)
    assert "Run it again" in str(error)
    assert store.latest("docs", "s", ["p"]) == {}


# End to end


class Add:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, batch):
        return {"more": batch["n"] + self.amount}


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_source_store_and_target_on_s3(s3, kind, request):
    base = f"s3://lake/{uuid.uuid4().hex}"
    fs = fsspec.filesystem("s3", **s3)
    for file in range(3):
        table = pa.table({"id": [f"{file}-{n}" for n in range(20)], "n": range(20)})
        with fs.open(f"{base}/src/day=1/{file}.parquet", "wb") as sink:
            pq.write_table(table, sink)
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{base}/src/day={{partition_key}}", storage_options=s3),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["1", "2"]),
        fragment_rows=8,
    )
    even = docs.project("even", ["n"], where="n % 2 = 0")
    more = even.map_batches(
        "more",
        Add,
        schema={"more": "BIGINT"},
        batch_format="numpy",
        fn_constructor_kwargs={"amount": 5},
    )
    joined = docs.join("joined", even, more)
    joined.write("published", f"{base}/out/{{partition_key}}", storage_options=s3)
    if kind == "local":
        compute: Any = request.getfixturevalue("local")
    else:
        compute = vd.RayCompute(cluster=request.getfixturevalue("cluster"))

    def run() -> dg.ExecuteInProcessResult:
        return dg.materialize(
            [docs.build_assets()],
            partition_key="1",
            resources={
                "compute": compute,
                "store": vd.FragmentStore(root=f"{base}/store", storage_options=s3),
            },
        )

    first = run()
    out = ds.dataset(f"{base}/out/1"[len("s3://") :], filesystem=fs, format="parquet").to_table()
    rows = sorted(zip(out["id"].to_pylist(), out["n"].to_pylist(), out["more"].to_pylist()))
    assert rows == sorted(
        (f"{file}-{n}", n, n + 5) for file in range(3) for n in range(20) if n % 2 == 0
    )
    assert metadata(first, "more")["fragments_computed"] == 9
    assert metadata(first, "published")["dagster/uri"] == f"{base}/out/1"
    again = run()
    assert metadata(again, "more")["fragments_computed"] == 0
    assert metadata(again, "published")["fragments_reused"] == 9

    with fs.open(f"{base}/src/day=1/9.parquet", "wb") as sink:
        pq.write_table(pa.table({"id": ["0-2"], "n": [2]}), sink)
    with pytest.raises(dg.Failure) as raised:
        run()
    assert "ids '0-2' of 'id' are in more than one fragment" in raised.value.description
    assert f"{base}/src/day=1/9.parquet" in raised.value.description


def test_a_source_on_s3_that_is_not_there(s3, tmp_path, local, materialize):
    write_source(tmp_path / "unused", {"id": [1]})
    for url, words in [
        ("s3://lake/nothing/here", "no Parquet file"),
        ("s3://nowhere/x", "no Parquet file"),
    ]:
        docs = vd.Pipeline("docs", source=vd.parquet(url, storage_options=s3), id="id")
        docs.project("clean", ["id"])
        with pytest.raises(dg.Failure) as raised:
            materialize(docs, local)
        assert words in raised.value.description
        assert url in raised.value.description


def test_planning_many_done_partitions_on_s3_is_three_listings(s3, local, caplog):
    """Of the source, of the stages and of the manifests, however many partitions there are."""
    base = f"lake/{uuid.uuid4().hex}"
    fs = fsspec.filesystem("s3", **s3)
    keys = [f"p{number}" for number in range(70)]
    for key in keys:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": [f"{key}-{row}" for row in range(3)]}), sink)
        fs.pipe_file(f"{base}/src/{key}/a.parquet", sink.getvalue().to_pybytes())
    many = vd.Pipeline(
        "many",
        source=vd.parquet(f"s3://{base}/src/{{partition_key}}", storage_options=s3),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    many.project("clean", ["id"])
    store = vd.FragmentStore(root=f"s3://{base}/store", storage_options=s3)
    whole = {
        "dagster/asset_partition_range_start": "p0",
        "dagster/asset_partition_range_end": "p69",
    }
    resources = {"compute": local, "store": store}
    assert dg.materialize([many.build_assets()], resources=resources, tags=whole).success

    caplog.clear()
    planned = plan_run(many, ["clean"], keys, store.open())

    assert all(partition.stages["clean"].done for partition in planned.partitions)
    asked = [record.getMessage() for record in caplog.records if record.name == "werkzeug"]
    listings = [line for line in asked if "list-type=2" in line]
    assert len(listings) == 3, listings
    others = [line for line in asked if line not in listings]
    assert all("/store/many/fragments.json" in line for line in others), others
