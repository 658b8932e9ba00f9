"""What `write` publishes: plain folders of Parquet and Delta tables, as other tools read them."""

from __future__ import annotations

import datetime
import os
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import lance
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import vane_dagster as vd
from support.arguments import grouped
from support.data import SECRET, write_source
from support.published import docs
from support.results import failure, metadata
from vane_dagster import retries
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

FORMATS = ("parquet", "delta")
PLACES: dict[str, dict[str, Any]] = {
    "parts": {},
    "merged": {"target_file_bytes": 3000},
    "delta_parts": {"format": "delta"},
    "delta_merged": {"format": "delta", "target_file_bytes": 3000},
}


def rows(ids: Any) -> dict[str, Any]:
    return {"id": list(ids), "n": [i * 10 for i in ids], "text": [f"text {i}" for i in ids]}


def everywhere(root: Path, checks: Any = (), **given: Any) -> vd.Pipeline:
    """Publish the same rows in all `PLACES`: in each format, as they are and in merged files."""
    pipeline = docs(root, **given)
    below = "/{partition_key}" if given.get("keys") else ""
    for name, written in PLACES.items():
        url = f"{root}/{name}" + ("" if "format" in written else below)
        pipeline["clean"].write(name, url, asset=vd.Asset(checks=checks), **grouped(written))
    return pipeline


def ids_in(folder: Path, format: str = "parquet") -> list[int]:
    """The ids, as a reader of the format sees them."""
    if format == "delta":
        return sorted(DeltaTable(folder).to_pandas()["id"].tolist())
    found = ds.dataset(folder, exclude_invalid_files=True).to_table()
    return sorted(found["id"].to_pylist())


def read(root: Path, format: str) -> list[int]:
    return ids_in(root / "out", format)


def in_places(root: Path) -> dict[str, list[int]]:
    return {
        name: ids_in(root / name, given.get("format", "parquet")) for name, given in PLACES.items()
    }


def in_all(ids: Any) -> dict[str, list[int]]:
    return {name: list(ids) for name in PLACES}


def computed(result: dg.ExecuteInProcessResult) -> set[int]:
    """How many fragments each place computed."""
    return {metadata(result, name)["fragments_computed"] for name in PLACES}


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "_vane_staging" in path.parts and path.is_file()]


def test_a_relative_target_is_below_the_folder_of_the_declaration_on_ray_too(
    tmp_path, cluster, materialize, monkeypatch
):
    write_source(tmp_path / "src", rows(range(20)))
    monkeypatch.chdir(tmp_path)
    pipeline = docs(tmp_path, out="parquet")
    for format in ("delta", "lance"):
        pipeline["clean"].write(format, format, format=format)
    assert materialize(pipeline, vd.RayCompute(cluster=cluster)).success
    assert ids_in(tmp_path / "parquet") == ids_in(tmp_path / "delta", "delta") == [*range(20)]
    assert lance.dataset(tmp_path / "lance").count_rows() == 20


# Readers


@pytest.mark.parametrize("target", [None, 3000])
def test_a_plain_folder_is_read_by_every_tool(tmp_path, local, materialize, target):
    write_source(tmp_path / "src", rows(range(25)))
    materialize(docs(tmp_path, target_file_bytes=target), local)

    (tmp_path / "out/notes.txt").write_text("of somebody else")
    pattern = f"{tmp_path}/out/*.parquet"
    found = duckdb.sql(f"SELECT id, n, text FROM '{pattern}' ORDER BY id").fetchall()
    assert found == [(i, i * 10, f"text {i}") for i in range(25)]
    assert pl.read_parquet(pattern).sort("id").rows() == found
    (tmp_path / "out/notes.txt").unlink()
    frame = pd.read_parquet(tmp_path / "out").sort_values("id")
    assert list(frame.itertuples(index=False, name=None)) == found
    assert not staged(tmp_path)


@pytest.mark.parametrize("target", [None, 3000])
def test_a_delta_table_is_read_by_every_tool(tmp_path, local, materialize, target):
    for key in ("a", "b"):
        write_source(tmp_path / "src" / key, rows(range(25)))
        pipeline = docs(tmp_path, keys=["a", "b"], format="delta", target_file_bytes=target)
        result = materialize(pipeline, local, partition=key)
        found = metadata(result, "out")
        assert found["dagster/uri"] == f"{tmp_path}/out"
        assert found["table_version"] == str(DeltaTable(tmp_path / "out").version())

    table = DeltaTable(tmp_path / "out")
    expected = [(i, i * 10, f"text {i}", key) for key in ("a", "b") for i in range(25)]
    dataset = table.to_pyarrow_dataset()
    assert dataset.count_rows() == 50
    names = "id, n, text, partition_key"
    query = f"SELECT {names} FROM dataset ORDER BY partition_key, id"
    assert duckdb.sql(query).fetchall() == expected
    frame = pl.read_delta(str(tmp_path / "out")).sort("partition_key", "id")
    assert frame.select(names.split(", ")).rows() == expected
    frame = table.to_pandas().sort_values(["partition_key", "id"])[names.split(", ")]
    assert list(frame.itertuples(index=False, name=None)) == expected
    assert table.version() == 2, "the table, and one transaction a partition"
    assert not staged(tmp_path)
    assert len(table.history()) == 3
    assert table.history(1)[0]["vane_dagster.stage"] == "docs/out"


def test_types_that_delta_does_not_have_are_widened(tmp_path, local, materialize):
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.uint32()),
            "small": pa.array([255, None], pa.uint8()),
            "vector": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
            "at": pa.array([moment, None], pa.timestamp("ms", "Europe/Berlin")),
            "raw": pa.array([b"abc", None], pa.binary(3)),
            "rows": pa.array([[{"a": 1}], []], pa.list_(pa.struct([("a", pa.uint16())]))),
            "price": pa.array([None, None], pa.decimal128(10, 2)),
        }
    )
    write_source(tmp_path / "src", table)
    pipeline = docs(tmp_path, columns=table.column_names, format="delta", target_file_bytes=10_000)
    materialize(pipeline, local)

    first = {
        "id": 1,
        "small": 255,
        "vector": [1.5, 2.5],
        "at": moment,
        "raw": b"abc",
        "rows": [{"a": 1}],
        "price": None,
    }
    read = DeltaTable(tmp_path / "out").to_pyarrow_table().sort_by("id")
    assert read.to_pylist()[0] == first
    frame = pl.read_delta(str(tmp_path / "out")).sort("id")
    assert frame.row(0, named=True) == first
    assert frame.row(1)[1:5] == (None, None, None, None)


def test_a_type_that_delta_cannot_hold_is_refused_before_anything_runs(
    tmp_path, local, materialize
):
    write_source(tmp_path / "src", {"id": [1], "big": pa.array([1], pa.uint64())})
    result = materialize(docs(tmp_path, columns=["big"], format="delta"), local, raises=False)
    assert "'docs/out': column 'big' is uint64, which a Delta table cannot hold" in failure(result)
    assert "cast it in a project" in failure(result)
    assert not list((tmp_path / "store").rglob("*.parquet"))


def test_statistics_let_readers_pass_over_files(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(25)))
    materialize(docs(tmp_path, format="delta"), local)
    actions = pa.table(DeltaTable(tmp_path / "out").get_add_actions(flatten=True)).to_pylist()
    statistics = sorted((a["min.id"], a["max.id"], a["num_records"]) for a in actions)
    assert statistics == [(0, 7, 8), (8, 15, 8), (16, 24, 9)]
    for action in actions:
        assert action["size_bytes"] == (tmp_path / "out" / action["path"]).stat().st_size
    assert DeltaTable(tmp_path / "out").count() == 25


STRANGE = ["a/b", 'it\'s "q" 100%', "..", " x ", "ü=&;", "a*?{}#", "~\\%2F", "A", "a"]


def test_partition_keys_of_any_characters_stand_in_the_table(tmp_path, local, materialize):
    write_source(tmp_path / "src", {"id": [1], "n": [1], "text": [""]})
    source = dg.StaticPartitionsDefinition(STRANGE)
    both = dg.MultiPartitionsDefinition(
        {"key": source, "one": dg.StaticPartitionsDefinition(["src"])}
    )
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{tmp_path}/{{partition_key.one}}"),
        id="id",
        partitions_def=both,
    )
    pipeline.project("clean", ["n"]).write("out", f"{tmp_path}/out", format="delta")
    keys = both.get_partition_keys()
    ends = {"start": keys[0], "end": keys[-1]}
    tags = {f"dagster/asset_partition_range_{end}": key for end, key in ends.items()}
    for given in ({"tags": tags}, {"partition": keys[0]}):
        assert materialize(pipeline, local, **given).success
    expected = sorted(str(key) for key in keys)
    assert sorted(DeltaTable(tmp_path / "out").to_pandas()["partition_key"]) == expected
    assert sorted(pl.read_delta(str(tmp_path / "out"))["partition_key"]) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"src", "out", "store"}


# Replaced as a whole


def test_a_partition_that_becomes_empty(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    materialize(everywhere(tmp_path), local)
    materialize(everywhere(tmp_path, where="id < 0"), local)
    assert in_places(tmp_path) == in_all([])
    for name in ("parts", "merged"):
        assert ds.dataset(tmp_path / name).schema.names == ["id", "n", "text"]
    assert computed(materialize(everywhere(tmp_path, where="id < 0"), local)) == {0}


def test_a_table_that_never_had_rows_has_its_columns(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    materialize(docs(tmp_path, where="id < 0", format="delta"), local)
    table = DeltaTable(tmp_path / "out").to_pyarrow_table()
    assert table.schema.names == ["id", "n", "text"]
    assert table.num_rows == 0


# Sizes and codecs


def test_compression(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    pipeline = docs(tmp_path)
    codecs = ("zstd", "snappy", "lz4", "gzip", "none")
    for codec in codecs:
        for kind, given in (("merged", {"target_file_bytes": 100_000}), ("plain", {})):
            name = f"{kind}_{codec}"
            pipeline["clean"].write(name, f"{tmp_path}/{name}", compression=codec, **grouped(given))
    materialize(pipeline, local)
    for codec in codecs:
        for kind in ("merged", "plain"):
            file = next((tmp_path / f"{kind}_{codec}").glob("*.parquet"))
            group = pq.read_metadata(file).row_group(0)
            used = {group.column(i).compression for i in range(group.num_columns)}
            assert used == {"UNCOMPRESSED" if codec == "none" else codec.upper()}


def test_files_have_about_the_wanted_size(tmp_path, local, materialize):
    """Small fragments are written together, in their order."""
    noise = [os.urandom(100).hex() for _ in range(20_000)]
    write_source(tmp_path / "src", {"id": range(20_000), "n": range(20_000), "text": noise})
    wanted = 200_000
    small = docs(tmp_path, fragment_rows=500, target_file_bytes=wanted)
    materialize(small, local)
    together = sorted((tmp_path / "out").glob("*.parquet"))
    sizes = [path.stat().st_size for path in together]
    assert 8 <= len(sizes) <= 16
    assert sorted(sizes)[1] > wanted / 2
    assert max(sizes) < wanted * 1.5
    assert read(tmp_path, "parquet") == list(range(20_000))
    for path in together:
        ids = pq.read_table(path)["id"].to_pylist()
        assert ids == list(range(ids[0], ids[0] + len(ids)))


def test_row_groups_are_bounded(tmp_path, local, materialize, monkeypatch):
    """However large a file is to be, a part of it is in memory at once."""
    from vane_dagster.storage.publish import compaction

    monkeypatch.setattr(compaction, "_GROUP_BYTES", 2000)
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 500)
    write_source(tmp_path / "src", rows(range(1000)))
    materialize(docs(tmp_path, fragment_rows=300, target_file_bytes=1 << 30), local)
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert pq.read_metadata(file).num_row_groups > 5
    assert pq.read_table(file)["id"].to_pylist() == list(range(1000))


@pytest.mark.parametrize("format", FORMATS)
def test_a_published_file_that_is_gone_is_published_again(tmp_path, local, materialize, format):
    write_source(tmp_path / "src", rows(range(60)))
    pipeline = docs(tmp_path, format=format, target_file_bytes=5000)
    materialize(pipeline, local)
    if format == "delta":
        DeltaTable(tmp_path / "out").delete("id < 10")
    else:
        next((tmp_path / "out").glob("*.parquet")).unlink()
    assert read(tmp_path, format) != list(range(60))

    pipeline = docs(tmp_path, format=format, target_file_bytes=5000)
    pipeline.project("more", ["n"])
    result = materialize(pipeline, local)

    assert read(tmp_path, format) == list(range(60))
    assert metadata(result, "out")["fragments_computed"] == 6
    assert metadata(result, "clean")["fragments_computed"] == 0


def test_what_is_only_staged_is_not_published(tmp_path, local, materialize):
    """A part that two runs had staged, of which one's was published and taken away."""
    write_source(tmp_path / "src", rows(range(20)))
    materialize(docs(tmp_path), local)
    (tmp_path / "out/_vane_staging").mkdir(exist_ok=True)
    for path in list((tmp_path / "out").glob("*.parquet"))[:1]:
        path.rename(tmp_path / "out/_vane_staging" / path.name)
    pipeline = docs(tmp_path)
    pipeline.project("more", ["n"])
    assert metadata(materialize(pipeline, local), "out")["fragments_computed"] == 0
    assert read(tmp_path, "parquet") == list(range(20))
    assert not staged(tmp_path)


def test_checks_read_the_rows_before_they_are_published(tmp_path, local, materialize):
    """Also where some are published already, and where all of them are."""

    def found() -> dict[str, tuple[bool, str | None]]:
        expected = vd.checks.Golden({"id": [1, 15], "n": [10, 150]})
        result = materialize(everywhere(tmp_path, checks=[expected]), local)
        evaluations = result.get_asset_check_evaluations()
        return {
            e.asset_key.path[-1]: (e.passed, e.description)
            for e in evaluations
            if e.check_name == "golden"
        }

    def passes() -> None:
        outcomes = found()
        assert set(outcomes) == set(PLACES)
        assert all(passed for passed, _ in outcomes.values()), outcomes

    write_source(tmp_path / "src", rows(range(20)))
    passes()
    write_source(tmp_path / "src", rows(range(20, 30)), "b.parquet")
    passes()
    for name in PLACES:
        manifests = tmp_path / "store/docs" / name / "manifests"
        (manifests / "~unpartitioned/publishing-x.json").write_bytes(
            next(manifests.rglob("00000002-*.json")).read_bytes()
        )
    passes()
    assert in_places(tmp_path) == in_all(range(30))


# Two writers


def first_time(monkeypatch: Any, owner: Any, name: str, before: Any) -> None:
    """Has something happen once, right before a method is called for the first time."""
    real = getattr(owner, name)

    def raced(*args: Any, **given: Any) -> Any:
        monkeypatch.undo()
        before()
        return real(*args, **given)

    monkeypatch.setattr(owner, name, raced)


def test_a_conflict_that_does_not_end_is_told(tmp_path, local, materialize, monkeypatch):
    from deltalake.exceptions import CommitFailedError

    def conflict(*args: Any, **given: Any) -> None:
        raise CommitFailedError("somebody was faster")

    write_source(tmp_path / "src", rows(range(20)))
    monkeypatch.setattr(DeltaTable, "create_write_transaction", conflict)
    monkeypatch.setattr(retries, "TRANSACTION_ATTEMPTS", 3)
    result = materialize(docs(tmp_path, format="delta"), local, raises=False)
    assert "changed the same partition 3 times" in failure(result)


def test_of_two_runs_with_one_table_the_one_that_lost_says_so(
    tmp_path, local, materialize, monkeypatch
):
    """The other run's transaction comes after this one's, and its manifest before."""
    write_source(tmp_path / "src", rows(range(20)))
    commit = Store.commit

    def overtaken(store: Store, manifest: Any) -> Any:
        if manifest.stage == "out":
            monkeypatch.undo()
            materialize(docs(tmp_path, where="id < 8", format="delta"), local)
        return commit(store, manifest)

    monkeypatch.setattr(Store, "commit", overtaken)
    result = materialize(docs(tmp_path, where="id < 5", format="delta"), local, raises=False)
    assert "Another run may have published the partition at the same time" in failure(result)

    materialize(docs(tmp_path, where="id < 5", format="delta"), local)
    assert read(tmp_path, "delta") == list(range(5))


# Tables that do not fit


def test_a_table_with_other_columns_is_refused_before_anything_runs(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    materialize(docs(tmp_path, format="delta"), local)
    changed = docs(tmp_path, columns={"n": "n::VARCHAR", "text": "text"}, format="delta")
    text = failure(materialize(changed, local, raises=False))
    assert "'docs/out': column 'n' is string here, but long in the Delta table" in text
    assert "Make the rows fit with a project, change the table" in text
    assert len(list((tmp_path / "store/docs/clean").rglob("*.json"))) == 1
    assert read(tmp_path, "delta") == list(range(20))


def test_a_table_that_is_changed_meanwhile_is_refused_at_the_commit(
    tmp_path, local, materialize, monkeypatch
):
    from vane_dagster.storage.publish.delta import DeltaPublisher

    write_source(tmp_path / "src", rows(range(20)))
    table = pa.table({"id": [1], "other": ["x"]})
    first_time(
        monkeypatch,
        DeltaPublisher,
        "planned",
        lambda: write_deltalake(tmp_path / "out", table),
    )
    text = failure(materialize(docs(tmp_path, format="delta"), local, raises=False))
    assert "column 'n' is long here, but no column in the Delta table" in text
    assert len(staged(tmp_path)) == 2, "which the next run takes"


def test_a_table_of_other_partitions_is_refused(tmp_path, local, materialize):
    write_source(tmp_path / "src/a", rows(range(20)))
    write_deltalake(tmp_path / "out", pa.table(rows(range(3))))
    pipeline = docs(tmp_path, keys=["a"], format="delta")
    text = failure(materialize(pipeline, local, partition="a", raises=False))
    assert "is partitioned by [], expected ['partition_key']" in text


def test_a_table_is_no_plain_folder(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    materialize(docs(tmp_path, format="delta"), local)
    text = failure(materialize(docs(tmp_path, columns=["n"]), local, raises=False))
    assert "is a Delta table; publish into it with format='delta'" in text
    assert read(tmp_path, "delta") == list(range(20))


def test_a_column_of_a_join_that_meets_the_partitions(tmp_path):
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{tmp_path}/src/{{partition_key}}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a"]),
    )
    left, right = pipeline.project("left", ["n"]), pipeline.project("right", ["Partition_Key"])
    joined = pipeline.join("joined", left, right)
    with pytest.raises(vd.DefinitionError, match="the rows have a column 'Partition_Key'"):
        joined.write("out", f"{tmp_path}/out", format="delta")


# Elsewhere


def test_published_on_s3(tmp_path, local, materialize, s3):
    from vane_dagster.storage.table_options import table_options

    base = f"s3://lake/{uuid.uuid4().hex}/to here"
    keys = ["a b", "c%2Fd"]

    def pipeline(where: str | None = None) -> vd.Pipeline:
        made = docs(tmp_path, keys=keys, where=where)
        for name, given in PLACES.items():
            place = f"{base}/{name}" + ("" if "format" in given else "/{partition_key}")
            made["clean"].write(name, place, storage_options=s3, **grouped(given))
        return made

    for key, first in zip(keys, (0, 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 40)))
        materialize(pipeline(), local, partition=key)
    materialize(pipeline("id < 7"), local, partition=keys[0])
    assert computed(materialize(pipeline("id < 7"), local, partition=keys[0])) == {0}

    for name, given in PLACES.items():
        opened = Location(f"{base}/{name}", s3)
        if given.get("format") == "delta":
            table = DeltaTable(opened.url, storage_options=table_options(opened))
            assert table.version() == 3
            found = table.to_pandas()
            assert sorted(set(found["partition_key"])) == keys
            read = sorted(found["id"])
        else:
            read = ds.dataset(opened.path, filesystem=opened.fs).to_table()["id"].to_pylist()
        assert sorted(read) == [*range(7), *range(100, 140)], name
        assert not [path for path in opened.walk() if "_vane_staging" in path]
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_a_table_on_a_server_that_is_not_there(tmp_path, local, materialize, monkeypatch):
    write_source(tmp_path / "src", rows(range(3)))
    options = {"key": "a", "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    from vane_dagster.storage.publish import delta

    monkeypatch.setattr(retries, "STORAGE_ATTEMPTS", 1)
    real = delta.table_options
    hurried = {"max_retries": "0", "retry_timeout": "1s", "connect_timeout": "1s"}
    monkeypatch.setattr(delta, "table_options", lambda place: {**real(place), **hurried})
    pipeline = docs(tmp_path, format="delta", out="s3://lake/t", storage_options=options)
    text = failure(materialize(pipeline, local, raises=False))
    assert "Delta table 's3://lake/t' cannot be read" in text
    assert SECRET not in text


def test_vacuum_passes_over_what_is_staged(tmp_path, local, materialize):
    """Pins what the folder's name is for."""
    write_source(tmp_path / "src", rows(range(20)))
    materialize(docs(tmp_path, format="delta"), local)
    folder = tmp_path / "out/_vane_staging/~unpartitioned"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.parquet").write_bytes(b"staged")
    (tmp_path / "out/alien.parquet").write_bytes(b"not in the table")
    found = DeltaTable(tmp_path / "out").vacuum(
        0, dry_run=False, enforce_retention_duration=False, full=True
    )
    assert found == ["alien.parquet"]
    assert (folder / "x.parquet").exists()
