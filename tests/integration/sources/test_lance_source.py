"""Pipelines that read Lance tables."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import SECRET, read_stage
from support.results import failure, metadata
from vane_dagster.sources.lance import LanceSource
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import driver_options
from vane_dagster.storage.store import Store


def rows(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{tmp_path}/docs.lance"


def docs(url: str, kept: Any = ("n", "text"), keys: Any = None, **given: Any) -> vd.Pipeline:
    docs = vd.Pipeline(
        "docs",
        source=vd.lance(url, **given),
        id="id",
        fragment_rows=10,
        partitions_def=dg.StaticPartitionsDefinition(keys) if keys else None,
    )
    docs.project("clean", kept)
    return docs


def ids(root: Path, partition: str | None = None) -> list[int]:
    return sorted(read_stage(root / "store", "docs", "clean", partition)["id"].to_pylist())


def details(root: Path) -> list[dict[str, Any]]:
    store = Store(Location(str(root / "store")))
    manifest = store.in_force("docs", "clean", None)
    assert manifest is not None
    return [json.loads(span.detail) for f in manifest.fragments for span in f.spans]


def append(url: str, ids: Any) -> None:
    lance.write_dataset(rows(ids), url, mode="append")


def computed(result: Any) -> int:
    found: int = metadata(result, "clean")["fragments_computed"]
    return found


def test_a_commit_that_adds_fragments_computes_those(tmp_path, url, compute, materialize):
    append(url, range(25))
    assert computed(materialize(docs(url), compute)) == 3
    assert ids(tmp_path) == list(range(25))
    assert computed(materialize(docs(url), compute)) == 0

    append(url, range(100, 105))
    assert computed(materialize(docs(url), compute)) == 1
    assert ids(tmp_path) == [*range(25), *range(100, 105)]
    assert {each["version"] for each in details(tmp_path)} == {2}

    found = vd.trace("docs/clean", 103, store=str(tmp_path / "store"))
    step = vd.trace(docs(url)["clean"], 103, store=str(tmp_path / "store")).steps[0]
    assert step.url.startswith(f"{url}/data/")
    assert step.row == 3
    assert (found.steps[0].url, found.steps[0].row) == (step.url, step.row)
    assert vd.load(docs(url)["clean"], store=str(tmp_path / "store")).num_rows == 30


def test_a_relative_path_is_of_the_folder_of_the_declaration(
    tmp_path, url, cluster, materialize, monkeypatch
):
    append(url, range(25))
    monkeypatch.chdir(tmp_path)
    materialize(docs("docs.lance"), vd.RayCompute(cluster=cluster))
    assert ids(tmp_path) == list(range(25))
    monkeypatch.chdir("/")
    assert computed(materialize(docs(url), vd.RayCompute(cluster=cluster))) == 0


def test_deletions_are_applied_and_recompute_their_fragment(tmp_path, url, local, materialize):
    for start in (0, 100):
        append(url, range(start, start + 25))
    materialize(docs(url), local)
    lance.dataset(url).delete("id in (0, 3, 24)")
    assert computed(materialize(docs(url), local)) == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    step = vd.trace(docs(url)["clean"], 20, store=str(tmp_path / "store")).steps[0]
    assert step.row == left.index(20)

    lance.dataset(url).update({"text": "'new'"}, where="id = 110")
    assert computed(materialize(docs(url), local)) == 4, (
        "a new fragment, and the one it is gone from"
    )
    found = read_stage(tmp_path / "store", "docs", "clean")
    assert found.filter(pa.compute.field("id") == 110)["text"].to_pylist() == ["new"]


def test_partitions_by_filter(tmp_path, url, local, materialize):
    day = ["it's"] * 10 + ["b"] * 10
    lance.write_dataset(rows(range(20), day=day), url)
    lance.write_dataset(rows(range(100, 105), day=["it's"] * 5), url, mode="append")
    keys = ["it's", "b", "none"]

    def filtered(text: str = "day = '{partition_key}'") -> vd.Pipeline:
        return docs(url, ("n", "day"), keys, filter=text)

    for key, expected in zip(keys, ([*range(10), *range(100, 105)], list(range(10, 20)))):
        assert materialize(filtered(), local, partition=key).success
        assert ids(tmp_path, key) == expected
    text = failure(materialize(filtered(), local, partition="none", raises=False))
    assert f"\"{url} where day = 'none'\" has no rows" in text

    lance.write_dataset(rows([200], day=["b"]), url, mode="append")
    assert computed(materialize(filtered(), local, partition="it's")) == 0, "no row of its own"
    assert computed(materialize(filtered(), local, partition="b")) == 1
    narrowed = "day = '{partition_key}' AND (n < 30 OR n > 1020)"
    materialize(filtered(narrowed), local, partition="it's")
    assert ids(tmp_path, "it's") == [0, 1, 2, 103, 104]
    step = vd.trace(filtered(narrowed)["clean"], 104, "it's", store=str(tmp_path / "store"))
    assert step.steps[0].row == 1
    text = failure(
        materialize(filtered("dya = '{partition_key}'"), local, partition="b", raises=False)
    )
    assert "No field named dya" in text
    assert "where dya = 'b'" in text
    assert "Check the filter" in text


def test_versions_and_tags(tmp_path, url, local, materialize):
    append(url, range(5))
    lance.dataset(url).tags.create("release", 1)
    append(url, range(5, 8))
    for version in (1, "release"):
        materialize(docs(url, version=version), local)
        assert ids(tmp_path) == list(range(5))
    lance.dataset(url).tags.update("release", 2)
    assert computed(materialize(docs(url, version="release"), local)) == 1
    assert ids(tmp_path) == list(range(8))
    text = failure(materialize(docs(url, version=17), local, raises=False))
    assert "does not exist, or not in the version that is named" in text


def test_a_run_reads_the_version_that_it_planned(tmp_path, url, local, materialize, monkeypatch):
    """A commit between planning and reading changes nothing."""
    append(url, range(25))
    for_workers = LanceSource.for_workers

    def raced(source: LanceSource) -> Any:
        monkeypatch.undo()
        append(url, range(100, 105))
        lance.dataset(url).delete("id < 5")
        return for_workers(source)

    monkeypatch.setattr(LanceSource, "for_workers", raced)
    materialize(docs(url), local)
    assert ids(tmp_path) == list(range(25))


@pytest.mark.parametrize("storage_version", ["2.1", "2.2"])
def test_blobs_are_bytes(tmp_path, url, local, materialize, storage_version):
    blob = pa.field("raw", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([("id", pa.int64()), blob])
    large = [bytes([i]) * (5 << 20) for i in range(30)]
    table = pa.table({"id": list(range(31)), "raw": [*large, None]}, schema=schema)
    lance.write_dataset(table, url, data_storage_version=storage_version)
    docs = vd.Pipeline("docs", source=vd.lance(url), id="id")
    docs.project("clean", {"size": "octet_length(raw)"})
    result = materialize(docs, local)
    assert computed(result) == 3, "of at most 64 MiB each"
    found = read_stage(tmp_path / "store", "docs", "clean").sort_by("id")
    assert found["size"].to_pylist() == [5 << 20] * 30 + [None]


def test_rows_of_all_types(tmp_path, url, local, materialize):
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "at": pa.array([datetime.datetime(2026, 1, 1)] * 2, pa.timestamp("us", "UTC")),
            "day": pa.array([datetime.date(2026, 1, 1), None]),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "raw": pa.array([b"abc", None]),
            "tags": pa.array([["a", "b"], []]),
            "deep": pa.array([[{"a": 1, "b": "x"}], None]),
            "vector": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    lance.write_dataset(table, url)
    materialize(docs(url, table.column_names), local)
    found = read_stage(tmp_path / "store", "docs", "clean")
    assert found.to_pylist() == table.to_pylist()
    assert found.schema.field("vector").type == pa.list_(pa.float32(), 2)


def test_a_table_that_is_missing_or_empty(tmp_path, url, local, materialize):
    text = failure(materialize(docs(url), local, raises=False))
    assert f"Lance table {url!r} does not exist, or not in" in text
    lance.write_dataset(rows([]), url)
    assert "has no rows. Check the filter" in failure(materialize(docs(url), local, raises=False))
    assert materialize(docs(url, allow_empty=True), local).success


def test_rows_that_are_gone(tmp_path, url, local, materialize):
    append(url, range(25))
    materialize(docs(url), local)
    file = next(Path(url, "data").iterdir())
    lance.dataset(url).delete("id < 5")
    changed = vd.trace(docs(url)["clean"], 20, store=str(tmp_path / "store"))
    assert changed.steps[0].row == 20, "the version that was planned is read"
    lance.write_dataset(rows(range(3)), url, mode="overwrite")
    lance.dataset(url).cleanup_old_versions(datetime.timedelta(0), delete_unverified=True)
    assert not file.exists()
    text = str(vd.trace(docs(url)["clean"], 20, store=str(tmp_path / "store")))
    assert "the file is gone since" in text


def test_a_table_on_s3(tmp_path, local, materialize, s3):
    url = f"s3://lake/{uuid.uuid4().hex}/docs.lance"
    options = driver_options(Location(url, s3))
    lance.write_dataset(rows(range(15)), url, storage_options=options)
    materialize(docs(url, storage_options=s3), local)
    assert ids(tmp_path) == list(range(15))
    lance.write_dataset(rows([20]), url, storage_options=options, mode="append")
    assert computed(materialize(docs(url, storage_options=s3), local)) == 1
    step = vd.trace(docs(url, storage_options=s3)["clean"], 3, store=str(tmp_path / "store"))
    assert step.steps[0].url.startswith(f"{url}/data/")
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
