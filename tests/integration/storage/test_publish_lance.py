"""What `write(format="lance")` publishes, as Lance's own reader finds it."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import SECRET, write_source
from support.published import docs
from support.results import failure, metadata
from vane_dagster import retries
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import driver_options
from vane_dagster.storage.publish import lance as lance_publisher
from vane_dagster.storage.publish.lance_index import VectorIndex

DIMENSION = 16
INDEX = {"column": "e", "metric": "cosine"}


def rows(ids: Any) -> pa.Table:
    """Rows with a vector that depends on the id alone."""
    ids = list(ids)
    vectors = [np.random.default_rng(i).random(DIMENSION).astype("f4") for i in ids]
    flat = np.concatenate([np.zeros(0, "f4"), *vectors])
    vector = pa.FixedSizeListArray.from_arrays(pa.array(flat), DIMENSION)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "n": pa.array([i * 10 for i in ids], pa.int64()),
            "e": vector,
        }
    )


def published(root: Path, **given: Any) -> vd.Pipeline:
    return docs(root, **{"columns": ["n", "e"], "format": "lance", **given})


def opened(root: Path) -> Any:
    return lance.dataset(str(root / "out"))


def ids(root: Path, filter: str | None = None) -> list[int]:
    return sorted(opened(root).to_table(columns=["id"], filter=filter)["id"].to_pylist())


def files(root: Path) -> set[str]:
    return {str(f.metadata.files[0].path) for f in opened(root).get_fragments()}


def staged(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if "_vane_staging" in path.parts and path.is_file()]


def nearest(table: Any, id: int, k: int = 1) -> list[int]:
    query = {"column": "e", "q": rows([id])["e"][0].as_py(), "k": k, "refine_factor": 20}
    query |= {"nprobes": 50, "metric": "cosine"}
    return table.to_table(columns=["id", "_distance"], nearest=query)["id"].to_pylist()


def unindexed(root: Path) -> int:
    """The number of fragments that the index does not cover."""
    table = opened(root)
    (index,) = table.describe_indices()
    covered = {id for segment in index.segments for id in segment.fragment_ids}
    return sum(f.fragment_id not in covered for f in table.get_fragments())


# Rows


@pytest.mark.parametrize("target", [None, 3000])
def test_a_table_holds_all_partitions_and_one_commit_each(tmp_path, local, materialize, target):
    given = {"keys": ["a", "b"], "target_file_bytes": target}
    for key, first in (("a", 0), ("b", 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 40)))
        result = materialize(published(tmp_path, **given), local, partition=key)
        found = metadata(result, "out")
        assert found["dagster/uri"] == f"{tmp_path}/out"
        assert found["table_version"] == str(opened(tmp_path).version)

    table = opened(tmp_path)
    assert table.version == 3, "the table, and one commit a partition"
    assert table.schema.names == ["id", "n", "e", "partition_key"]
    assert table.schema.field("e").type == pa.list_(pa.float32(), DIMENSION)
    found = table.to_table(filter="partition_key = 'b'").drop_columns("partition_key")
    assert found.sort_by("id").equals(rows(range(100, 140)))
    properties = table.read_transaction(3).transaction_properties
    assert properties["vane_dagster.stage"] == "docs/out"
    assert properties["vane_dagster.partition"] == "b"
    assert not staged(tmp_path)
    result = materialize(published(tmp_path, **given), local, partition="a")
    assert metadata(result, "out")["fragments_computed"] == 0
    assert opened(tmp_path).version == 3


def test_files_of_unchanged_rows_stay(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(40)))
    materialize(published(tmp_path), local)
    before = files(tmp_path)
    write_source(tmp_path / "src", rows(range(40, 60)), "b.parquet")
    result = materialize(published(tmp_path), local)
    assert metadata(result, "out")["fragments_computed"] == 2
    assert before < files(tmp_path)
    assert ids(tmp_path) == list(range(60))

    write_source(tmp_path / "src", rows(range(40, 45)), "b.parquet")
    materialize(published(tmp_path), local)
    assert ids(tmp_path) == list(range(45))
    assert before < files(tmp_path)


def test_a_table_that_was_compacted_or_changed_by_others(tmp_path, local, materialize):
    """A compaction writes rows of several partitions into one file."""
    given = {"keys": ["a", "b"]}
    for key, first in (("a", 0), ("b", 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 40)))
        materialize(published(tmp_path, **given), local, partition=key)
    opened(tmp_path).optimize.compact_files()
    assert len(opened(tmp_path).get_fragments()) == 1

    materialize(published(tmp_path, where="id < 7", **given), local, partition="a")
    assert ids(tmp_path) == [*range(7), *range(100, 140)]

    opened(tmp_path).delete("id = 3 OR id = 120")
    again = published(tmp_path, where="id < 7", **given)
    again.project("more", ["n"])
    materialize(again, local, partition="a")
    assert ids(tmp_path) == [*range(7), *range(100, 120), *range(121, 140)]
    materialize(published(tmp_path, where="id < 130", **given), local, partition="b")
    assert ids(tmp_path) == [*range(7), *range(100, 130)]


STRANGE = ["a/b", 'it\'s "q" 100%', "..", " x ", "ü=&;`", "a*?{}#", "~\\%2F", "A", "a"]


def test_partition_keys_of_any_characters(tmp_path, local, materialize):
    definition = dg.MultiPartitionsDefinition(
        {
            "key": dg.StaticPartitionsDefinition(STRANGE),
            "one": dg.StaticPartitionsDefinition(["src"]),
        }
    )
    source = vd.parquet(f"{tmp_path}/{{partition_key.one}}")
    write_source(tmp_path / "src", rows([1]))
    pipeline = vd.Pipeline("docs", source=source, id="id", partitions_def=definition)
    pipeline.project("clean", ["n"]).write("out", f"{tmp_path}/out", format="lance")
    keys = definition.get_partition_keys()
    ends = {"start": keys[0], "end": keys[-1]}
    tags = {f"dagster/asset_partition_range_{end}": key for end, key in ends.items()}
    assert materialize(pipeline, local, tags=tags).success
    expected = sorted(str(key) for key in keys)
    assert sorted(opened(tmp_path).to_table()["partition_key"].to_pylist()) == expected
    opened(tmp_path).optimize.compact_files()
    pipeline = vd.Pipeline("docs", source=source, id="id", partitions_def=definition)
    clean = pipeline.project("clean", {"n": "n + 1"})
    clean.write("out", f"{tmp_path}/out", format="lance")
    assert materialize(pipeline, local, tags=tags).success
    found = opened(tmp_path).to_table()
    assert sorted(found["partition_key"].to_pylist()) == expected
    assert set(found["n"].to_pylist()) == {11}


def test_loads_checks_and_traces(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(40)))
    source = vd.parquet(f"{tmp_path}/src")
    pipeline = vd.Pipeline("docs", source=source, id="id", fragment_rows=10)
    golden = vd.checks.Golden({"id": [1, 15], "n": [10, 150]})
    clean = pipeline.project("clean", ["n", "e"])
    clean.write("out", f"{tmp_path}/out", format="lance", asset=vd.Asset(checks=[golden]))
    for _ in range(2):
        result = materialize(pipeline, local)
        evaluated = {
            (e.asset_key.path[-1], e.check_name): e for e in result.get_asset_check_evaluations()
        }
        assert evaluated["out", "golden"].passed, evaluated["out", "golden"].description
        write_source(tmp_path / "src", rows(range(40, 50)), "b.parquet")
    store = str(tmp_path / "store")
    assert vd.load("docs/out", store=store).sort_by("id").equals(rows(range(50)))
    assert vd.load("docs/out", store=store, as_=pa.RecordBatchReader).read_all().num_rows == 50
    text = str(vd.trace("docs/out", 45, store=store))
    assert "b.parquet" in text
    assert ".lance" in text


def test_tensors_are_vectors(tmp_path, local, materialize):
    tensor = vd.tensor("float32", (2, 2))
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype="f4").reshape(2, 2, 2))
    assert array.type == tensor
    write_source(tmp_path / "src", pa.table({"id": [1, 2], "n": [1, 2], "t": array}))
    materialize(published(tmp_path, columns=["n", "t"]), local)
    assert opened(tmp_path).schema.field("t").type == pa.list_(pa.float32(), 4)
    assert opened(tmp_path).to_table()["t"].to_pylist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loaded = vd.load("docs/out", store=str(tmp_path / "store"))
    assert loaded["t"].to_pylist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# Several writers


def test_a_fragment_that_no_table_has_makes_commits_conflict(tmp_path):
    """Pins what the publisher's lock relies on, also for a table without fragments."""
    from lance import LanceDataset, LanceOperation, Transaction
    from lance.commit import CommitConflictError

    lock = [lance_publisher._COMMIT_LOCK]
    table = lance.write_dataset(rows([]), str(tmp_path / "t"))
    operation = LanceOperation.Update(removed_fragment_ids=lock)
    LanceDataset.commit(table, Transaction(table.version, operation))
    with pytest.raises(CommitConflictError):
        LanceDataset.commit(table, Transaction(table.version, operation))
    table.checkout_latest()
    lance.write_dataset(rows([1]), str(tmp_path / "t"), mode="append")
    LanceDataset.commit(table, Transaction(table.version, operation))
    assert lance.dataset(str(tmp_path / "t")).count_rows() == 1, "appends of others go on"


# The index


def test_search_with_and_without_an_index(tmp_path, local, materialize):
    for key, first, count in (("a", 0, 100), ("b", 1000, 400), ("c", 2000, 60)):
        write_source(tmp_path / "src" / key, rows(range(first, first + count)))
    given = {"keys": ["a", "b", "c"], "index": INDEX, "fragment_rows": 100}

    materialize(published(tmp_path, **given), local, partition="a")
    assert opened(tmp_path).describe_indices() == [], "100 rows train no index"
    assert nearest(opened(tmp_path), 42) == [42]

    materialize(published(tmp_path, **given), local, partition="b")
    (index,) = opened(tmp_path).describe_indices()
    assert index.field_names == ["e"]
    assert index.details["metric_type"] == "COSINE"
    assert "pq" in str(index.details)
    assert unindexed(tmp_path) == 0
    assert [nearest(opened(tmp_path), id) for id in (42, 1042, 1399)] == [[42], [1042], [1399]]

    materialize(published(tmp_path, **given), local, partition="c")
    assert unindexed(tmp_path) == 0
    assert nearest(opened(tmp_path), 2042) == [2042]

    materialize(published(tmp_path, where="id <> 1042", **given), local, partition="b")
    assert unindexed(tmp_path) == 0
    assert nearest(opened(tmp_path), 1042) != [1042], "a row that is gone is not found"
    assert nearest(opened(tmp_path), 1043) == [1043]


def test_another_index_replaces_the_former(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(300)))
    materialize(published(tmp_path, index=INDEX, fragment_rows=100), local)
    other = {"column": "e", "metric": "l2", "type": "IVF_FLAT", "num_partitions": 2}
    materialize(published(tmp_path, index=other, fragment_rows=100), local)
    (index,) = opened(tmp_path).describe_indices()
    assert index.details["metric_type"] == "L2"
    assert "pq" not in str(index.details)


def test_segments_of_an_index_are_merged_and_it_is_trained_again(tmp_path):
    index = VectorIndex("e", "cosine")
    table = lance.write_dataset(rows(range(300)), str(tmp_path / "t"))
    index.update(table)
    counts, trained = [], []
    for n in range(12):
        lance.write_dataset(rows(range(1000 + n * 20, 1020 + n * 20)), table, mode="append")
        table = lance.dataset(str(tmp_path / "t"))
        index.update(table)
        table = lance.dataset(str(tmp_path / "t"))
        (found,) = table.describe_indices()
        counts.append(len(found.segments))
        covered = {id for segment in found.segments for id in segment.fragment_ids}
        assert covered == {f.fragment_id for f in table.get_fragments()}
        trained.append(table.config()["vane_dagster.index.e"])
    assert counts[:8] == [2, 3, 4, 5, 6, 7, 8, 1]
    assert len(set(trained)) == 1
    lance.write_dataset(rows(range(5000, 5900)), table, mode="append")
    index.update(table := lance.dataset(str(tmp_path / "t")))
    assert lance.dataset(str(tmp_path / "t")).config()["vane_dagster.index.e"] != trained[0]
    version = lance.dataset(str(tmp_path / "t")).version
    index.update(lance.dataset(str(tmp_path / "t")))
    assert lance.dataset(str(tmp_path / "t")).version == version
    assert nearest(lance.dataset(str(tmp_path / "t")), 5500) == [5500]


def test_vectors_that_are_null_train_nothing(tmp_path):
    table = rows(range(300))
    null = pa.nulls(300, table.schema.field("e").type)
    table = lance.write_dataset(table.set_column(2, "e", null), str(tmp_path / "t"))
    VectorIndex("e").update(table)
    assert not table.describe_indices()


# Elsewhere


def test_published_on_s3(tmp_path, local, materialize, s3):
    url = f"s3://lake/{uuid.uuid4().hex}/to here"
    keys = ["a b", "c%2Fd"]

    def pipeline(where: str | None = None) -> vd.Pipeline:
        given = {"keys": keys, "where": where, "out": url, "storage_options": s3, "index": INDEX}
        return published(tmp_path, fragment_rows=100, **given)

    for key, first in zip(keys, (0, 1000)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 200)))
        materialize(pipeline(), local, partition=key)
    materialize(pipeline("id < 7"), local, partition=keys[0])
    result = materialize(pipeline("id < 7"), local, partition=keys[0])
    assert metadata(result, "out")["fragments_computed"] == 0

    where = Location(url, s3)
    table = lance.dataset(where.url, storage_options=driver_options(where))
    assert sorted(table.to_table()["id"].to_pylist()) == [*range(7), *range(1000, 1200)]
    assert nearest(table, 1042) == [1042]
    assert not [path for path in where.walk() if "_vane_staging" in path]
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_a_table_on_a_server_that_is_not_there(tmp_path, local, materialize, monkeypatch):
    from vane_dagster.storage import lance_table

    write_source(tmp_path / "src", rows(range(3)))
    options = {"key": "a", "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    monkeypatch.setattr(retries, "STORAGE_ATTEMPTS", 1)
    real = lance_table.table_options
    hurried = {"client_max_retries": "0", "client_retry_timeout": "1", "connect_timeout": "1s"}
    monkeypatch.setattr(lance_table, "table_options", lambda place: {**real(place), **hurried})
    pipeline = published(tmp_path, out="s3://lake/t", storage_options=options)
    text = failure(materialize(pipeline, local, raises=False))
    assert "Lance table 's3://lake/t' cannot be read" in text
    assert SECRET not in text


def test_cleanup_passes_over_what_is_staged(tmp_path, local, materialize):
    """Pins what the folder's name is for."""
    write_source(tmp_path / "src", rows(range(20)))
    materialize(published(tmp_path), local)
    materialize(published(tmp_path, where="id < 5"), local)
    folder = tmp_path / "out/_vane_staging/~unpartitioned"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.parquet").write_bytes(b"staged")
    stats = opened(tmp_path).cleanup_old_versions(datetime.timedelta(0), delete_unverified=True)
    assert stats.old_versions == 2
    assert (folder / "x.parquet").exists()
    assert ids(tmp_path) == list(range(5))
