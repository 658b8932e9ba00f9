"""How a source's files are found: partitions one by one, or many by one listing."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import dagster as dg
import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.data import partitioned, write_source
from support.plans import double, settle
from vane_dagster.errors import SourceError
from vane_dagster.planning.planner import plan_run
from vane_dagster.sources import file_source
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

MEMORY = fsspec.filesystem("memory")
FOLDERS = itertools.count()
FILES = (
    "2026-01-01/a.parquet",
    "2026-01-01/deep/b.parquet",
    "2026-01-01/_temporary/c.parquet",
    "2026-01-01/.hidden.parquet",
    "2026-01-01/notes.txt",
    "2026-01-010/a.parquet",
    "2026-01-02.parquet",
    "2026-01-02/a.parquet",
    "part-2026-01-01-x.parquet",
    "part-2026-01-02-x.parquet",
    "_part-2026-01-02-x.parquet",
    "eu/2026-01-01/a.parquet",
    "eu/2026-01-01/a.parquet.crc",
    "us/2026-01-01/a.parquet",
    "[x]/a.parquet",
    "a*/a.parquet",
    "ab/a.parquet",
)


def listed_together(source, keys, location):
    with mock.patch.object(file_source, "_LISTED_ONE_BY_ONE", 0):
        return source.list_files(keys, location)


@pytest.fixture(scope="module", params=["file", "memory"])
def root(request, tmp_path_factory) -> str:
    if request.param == "file":
        base = str(tmp_path_factory.mktemp("listing"))
        fs, folder = fsspec.filesystem("file"), f"{base}/src"
    else:
        fs, folder = MEMORY, "/listing/src"
    for name in FILES:
        fs.makedirs(f"{folder}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{folder}/{name}", name.encode())
    return folder if request.param == "file" else f"memory:/{folder}"


def described(listed):
    return str(listed) if isinstance(listed, SourceError) else [file.url for file in listed]


@settings(max_examples=20)
@given(
    st.sets(st.text("ab/.-_", min_size=1, max_size=6), min_size=1, max_size=8),
    st.sets(st.text("ab.-_", min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_listings_agree_on_any_tree(names, keys):
    folder = f"/any{next(FOLDERS)}"  # rm() of fsspec's memory misses some names of folders
    for name in names:
        MEMORY.pipe_file(f"{folder}/x/{name.strip('/')}/f.parquet", b"1")
    for pattern in ("x/{partition_key}", "x/*{partition_key}*/*.parquet"):
        source = vd.parquet(f"memory:/{folder}/{pattern}")
        together = listed_together(source, sorted(keys), "here")
        single = source.list_files(sorted(keys), "here")
        assert {k: described(v) for k, v in together.items()} == {
            k: described(v) for k, v in single.items()
        }


def test_a_key_never_leads_out_of_the_source(root):
    source = vd.parquet(f"{root}/eu/{{partition_key}}")
    for key in ("../us", "..", "a/../../us", ".", "/us", "a//b"):
        listed = source.list_files([key], "here")[key]
        assert isinstance(listed, SourceError)
        assert "would lead out of the source's folder" in str(listed)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path, monkeypatch):
    (tmp_path / "k1" / "deep").mkdir(parents=True)
    (tmp_path / "k1" / "a.parquet").write_bytes(b"1")
    scandir = os.scandir

    def broken(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", broken)
    listed = vd.parquet(f"{tmp_path}/{{partition_key}}").list_files(["k1"], "here")["k1"]
    assert isinstance(listed, SourceError)
    assert "cannot be listed: PermissionError" in str(listed)


def test_a_file_that_is_gone_fails_its_partition_alone(tmp_path):
    keys = [f"k{number}" for number in range(70)]
    for key in keys:
        (tmp_path / key).mkdir()
        (tmp_path / key / "a.parquet").write_bytes(b"1")
    (tmp_path / "k7" / "b.parquet").symlink_to(tmp_path / "nothing")
    listed = vd.parquet(f"{tmp_path}/{{partition_key}}").list_files(keys, "here")
    assert [key for key in keys if isinstance(listed[key], SourceError)] == ["k7"]


def test_dimensions_of_a_multi_partition(root):
    source = vd.parquet(f"{root}/{{partition_key.region}}/{{partition_key.day}}")
    keys = [dg.MultiPartitionKey({"day": "2026-01-01", "region": r}) for r in ("eu", "us", "as")]
    together = listed_together(source, keys, "here")
    assert [len(together[key]) for key in keys] == [1, 1, 0]
    assert together == source.list_files(keys, "here")


class Counted(LocalFileSystem):
    """Local files under another protocol, which counts what is done to them."""

    protocol = ("counted",)
    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def unstrip_protocol(self, name: str) -> str:
        return "counted://" + self._strip_protocol(name)

    def ls(self, path: str, **given: Any) -> Any:
        self.calls["list"] += 1
        return super().ls(path, **given)

    def _open(self, path: str, *args: Any, **given: Any) -> Any:
        self.calls[f"open {Path(path).suffix}"] += 1
        return super()._open(path, *args, **given)


def test_finished_partitions_plan_by_listings_alone(tmp_path):
    """No footer and no manifest is opened, and each stage's manifests are listed together."""
    fsspec.register_implementation("counted", Counted, clobber=True)
    keys = [f"p{n}" for n in range(5)]
    for key in keys:
        write_source(tmp_path / "src" / key, {"id": [1], "n": [1]})
    many = partitioned(f"counted://{tmp_path}/src", keys, "many")
    many.project("clean", ["n"]).map_batches("doubled", double, schema={"x": "BIGINT"})
    store = Store(StoragePath(f"counted://{tmp_path}/store"))
    settle(plan_run(many, ["clean", "doubled"], keys, store), store)
    Counted.calls.clear()
    planned = plan_run(many, ["clean", "doubled"], keys, store)
    assert [s.done is not None for p in planned.partitions for s in p.stages.values()] == [
        True
    ] * 10
    opened = {name: count for name, count in Counted.calls.items() if name.startswith("open")}
    expected = "the rule of fragments, whether it is a branch, and the source of the last run"
    assert opened == {"open .json": 3}, expected
    sources, manifests = 5, 2 * 6  # a local walk lists each folder on its own
    assert Counted.calls["list"] <= sources + manifests + 2
