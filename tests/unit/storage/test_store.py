"""The store on a local disk and in memory; `test_s3.py` has the same on S3."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.manifests import manifest, part

# F403: all tests of the contract run here, on local disk.
from support.store_contract import *  # noqa: F403  # the contract's tests
from vane_dagster.engine.committer import check_unique
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.paths import UNPARTITIONED, partition_folder, published_folder
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin, read_pin
from vane_dagster.storage.store import Store


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    if request.param == "local":
        return StoragePath(str(tmp_path / "store"))
    return StoragePath(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def store(root: StoragePath) -> Store:
    return Store(root)


class KilledError(BaseException):
    """The process is gone: nothing is cleaned up."""


def killed(*args: Any, **given: Any) -> None:
    raise KilledError


@pytest.mark.parametrize(
    "write",
    [
        lambda store: part(store.parts("docs", "s", "p")),
        lambda store: store.commit(manifest()),
        lambda store: keep_pin(store, "docs", "s", "0", SchemaPin(pa.schema([]), 1, "r", 1.0)),
    ],
    ids=["part", "manifest", "pin"],
)
def test_a_kill_between_write_and_rename_leaves_nothing(tmp_path, monkeypatch, write):
    store = Store(StoragePath(str(tmp_path)))
    with monkeypatch.context() as patch:
        for name in ("replace", "link", "unlink", "remove"):
            patch.setattr(os, name, killed)
        with pytest.raises(KilledError):
            write(store)
    assert [path for path in tmp_path.rglob("*") if path.is_file()], "it was killed too early"
    assert store.latest("docs", "s", ["p"]) == {}
    assert store.existing_parts(store.parts("docs", "s", "p")) == {}
    assert read_pin(store, "docs", "s", "0") is None
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
    with pytest.raises(vd.errors.StoreError) as raised:
        Store(StoragePath(url)).commit(manifest())
    assert url in str(raised.value)
    denied = place == "folder without permission"
    fix = "Permission is denied" if denied else "Check that it exists, that the credentials give"
    assert fix in str(raised.value)
    with pytest.raises(vd.errors.StoreError):
        part(StoragePath(url))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://lake/x", r"has no file system: .*Install vane-dagster\[gcs\]"),
        ("nosuch://lake/x", "has no file system: .*of a file system that fsspec knows"),
    ],
)
def test_a_driver_that_is_not_installed(url, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(vd.errors.StoreError, match=message):
        StoragePath(url).names()


def test_a_driver_of_s3_without_reads_in_pieces(monkeypatch):
    """As s3fs before 2026.3."""

    class Driver:
        protocol = ("s3", "s3a")

        def cat_file(self, path: str) -> bytes:
            return path.encode()

    monkeypatch.setattr(StoragePath, "_resolve", lambda self: (Driver(), "lake/x"))
    assert StoragePath("s3://lake/x").read("f", is_small=True) == b"lake/x/f"


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


@settings(max_examples=15)
@example([[0, 20], [5, 6], [20]])  # a range that is within another, between two that overlap
@given(st.lists(st.lists(st.integers(0, 30), max_size=4, unique=True), max_size=6))
def test_ids_in_two_fragments_are_always_found(tmp_path_factory, fragments):
    folder = StoragePath(str(tmp_path_factory.getbasetemp() / "ids"))
    parts = [
        part(folder, pa.array(ids, pa.int64()), key=f"{n:040}") for n, ids in enumerate(fragments)
    ]
    every = [id for ids in fragments for id in ids]
    if len(every) == len(set(every)):
        check_unique(manifest(parts), folder, "id")
    else:
        with pytest.raises(vd.errors.SourceError):
            check_unique(manifest(parts), folder, "id")
