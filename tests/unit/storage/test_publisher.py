"""Targets as they are declared, how files are bundled, and types of Lance."""

from __future__ import annotations

import os

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import partitioned
from support.published import docs
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.publish import compaction
from vane_dagster.storage.publish.base import STAGING, staged_parts
from vane_dagster.storage.publish.compaction import plan_compaction, write_compacted
from vane_dagster.storage.publish.lance import LancePublisher

ICEBERG = {"format": "iceberg", "catalog": "prod", "table": "db.labels"}


def test_bundles_are_about_the_size_and_named_by_their_parts():
    sizes = [4, 4, 4, 25, 1]
    parts = [PartInfo(f"{n:040x}", "0" * 16, 10, size) for n, size in enumerate(sizes)]
    found = plan_compaction(parts, 10)
    assert [[part.bytes for part in each] for each in found.values()] == [[4, 4, 4], [25], [1]]
    assert plan_compaction(parts, 10) == found
    more = plan_compaction([*parts, PartInfo("f" * 40, "0" * 16, 10, 30)], 10)
    assert list(more)[:2] == list(found)[:2]
    assert plan_compaction(parts, None) == {part.stem: (part,) for part in parts}
    assert plan_compaction([], 10) == {}


def test_small_parts_are_written_together_in_their_order(tmp_path, monkeypatch):
    """With row groups of a bounded size, and a part in memory at once."""
    monkeypatch.setattr(compaction, "_GROUP_BYTES", 50_000)
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 10_000)
    staging, target = StoragePath(f"{tmp_path}/staged"), StoragePath(f"{tmp_path}/out")
    noise = pa.table({"id": range(2_000), "text": [os.urandom(100).hex() for _ in range(2_000)]})
    parts = [
        write_part(noise.slice(200 * n, 200), PartTarget(staging, f"{n:040x}", "id"))
        for n in range(10)
    ]
    for size, codec in ((100_000, "zstd"), (1 << 30, "gzip")):
        wanted = plan_compaction(parts, size)
        written = write_compacted(wanted, staging, target, noise.schema, codec)
        files = [pq.read_table(target.file(name))["id"].to_pylist() for name in wanted]
        assert [id for ids in files for id in ids] == list(range(2_000))
        assert [(each.parts[0].id_min, each.parts[-1].id_max) for each in written.values()] == [
            (ids[0], ids[-1]) for ids in files
        ]
        assert all(each.size < 1.5 * size for each in written.values())
        footer = pq.read_metadata(target.file(next(iter(wanted))))
        assert footer.row_group(0).column(0).compression == codec.upper()
    assert (len(files), footer.num_row_groups > 5) == (1, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "csv"}, "format is 'csv'; expected one of 'parquet', 'delta'"),
        ({"target_file_bytes": 0}, "target_file_bytes is 0; expected a whole number from 1 up"),
        (
            {"format": "delta", "url": "/{partition_key}"},
            "but the Delta table holds all partitions",
        ),
        ({"format": "delta", "url": "gs://b/t"}, "expected a local path, s3:// or s3a://"),
        ({"format": "delta", "url": "/t/100%"}, "holds '%', which Delta's driver takes"),
        ({"format": "delta", "partition_column": "_key"}, "partition_column is '_key'; expected"),
        ({"partition_column": "day"}, "is for a table, as in format='delta'"),
        ({"format": "iceberg", "url": "/t"}, "needs catalog and table: write('/t'"),
        ({**ICEBERG, "url": "/{partition_key}"}, "but the Iceberg table holds all partitions"),
        (
            {**ICEBERG, "url": "ftp://h/t"},
            "Iceberg tables at 'ftp://h/t' are not supported",
        ),
        ({**ICEBERG, "url": "/t#1"}, "holds '#', which Iceberg's driver takes"),
        ({**ICEBERG, "url": "/t", "table": "labels"}, "table is 'labels'; expected the namespace"),
        ({**ICEBERG, "url": "/t", "catalog": 3}, "catalog is a int; expected the name of"),
    ],
)
def test_what_is_refused_where_it_is_declared(given, words):
    pipeline = partitioned("/src", ["a"])
    clean = pipeline.project("clean", ["n"])
    placeholder = "" if given.get("format") == "delta" else "/{partition_key}"
    with pytest.raises(vd.errors.DefinitionError, match="'docs/out'") as raised:
        clean.write("out", **grouped({"url": f"/t{placeholder}", **given}))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"Partition_Key": pa.string()}, "the rows have a column 'Partit"),
        (
            {"big": pa.uint64(), "text": pa.string(), "time": pa.time64("us")},
            r"column 'big' is uint64, column 'time' is time64\[us\], which the Delta table cannot "
            "hold; cast in a project",
        ),
    ],
)
def test_rows_that_a_table_cannot_hold_are_refused_before_they_are_computed(columns, words):
    publisher = docs("/somewhere", keys=["a"], format="delta")["out"].spec.publisher("a")
    schema = pa.schema({"id": pa.int64(), **columns})
    with pytest.raises(vd.errors.SchemaError, match=f"'docs/out': {words}"):
        publisher.stored(schema, "stage 'docs/out'")


def test_a_catalog_is_in_the_definition_by_its_name():
    secret = {"uri": "https://catalog", "token": "a-secret-that-nobody-writes-down"}
    given = {"format": "iceberg", "table": "db.labels"}
    made = [
        docs("/somewhere", **given, catalog=catalog)["out"].spec
        for catalog in ({**secret, "name": "prod"}, "prod", "other")
    ]
    definitions = [spec.components(None) for spec in made]
    assert definitions[0] == definitions[1] != definitions[2]
    assert "secret" not in repr(made[0])


def test_options_as_delta_calls_them():
    from vane_dagster.storage.table_options import table_options

    anonymous = {
        "anon": True,
        "token": "t",
        "client_kwargs": {"endpoint_url": "http://e", "region_name": "r"},
    }
    assert table_options(StoragePath("s3://b/t", anonymous)) == {
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_SESSION_TOKEN": "t",
        "AWS_ENDPOINT_URL": "http://e",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "r",
        "AWS_CONDITIONAL_PUT": "etag",
    }
    assert table_options(StoragePath("s3://b/t")) == {"AWS_CONDITIONAL_PUT": "etag"}


def test_staged_files_are_found_below_every_partition(tmp_path):
    for folder in ("2026-01", "2026-02", "other"):
        StoragePath(f"{tmp_path}/out/{folder}/x/{STAGING}").write("a.parquet", b"")
        StoragePath(f"{tmp_path}/out/{folder}/x").write("published.parquet", b"")
    found = staged_parts(f"{tmp_path}/out/2026-{{partition_key}}/x", {})
    assert sorted(url.removeprefix(f"{tmp_path}/out/") for url in found) == [
        f"2026-01/x/{STAGING}/a.parquet",
        f"2026-02/x/{STAGING}/a.parquet",
    ]


VECTOR = pa.list_(pa.float32(), 16)
FOUND = {
    pa.int64(): pa.int64(),
    pa.uint64(): pa.uint64(),
    pa.binary(3): pa.binary(3),
    pa.timestamp("ms", "Europe/Berlin"): pa.timestamp("ms", "Europe/Berlin"),
    pa.string_view(): pa.string(),
    pa.decimal32(5, 2): pa.decimal128(5, 2),
    pa.dictionary(pa.int32(), pa.string()): pa.string(),
    VECTOR: VECTOR,
    vd.tensor("float32", (2, 3)): pa.list_(pa.float32(), 6),
    pa.list_(pa.list_(pa.float32(), 2), 3): pa.list_(pa.list_(pa.float32(), 2), 3),
    pa.list_(pa.string(), 2): pa.list_(pa.string()),
    pa.large_list(pa.int8()): pa.list_(pa.int8()),
    pa.struct([("a", pa.string_view())]): pa.struct([("a", pa.string())]),
    pa.map_(pa.string(), pa.list_(pa.int32())): pa.map_(pa.string(), pa.list_(pa.int32())),
    pa.month_day_nano_interval(): None,
    pa.struct([]): None,
    pa.list_(pa.month_day_nano_interval()): None,
}


@pytest.mark.parametrize("kind", FOUND, ids=str)
def test_the_type_in_the_table(kind, tmp_path):
    found = LancePublisher.stored_type(kind)
    assert found == FOUND[kind]
    if found is None:
        publisher = docs(tmp_path, format="lance")["out"].spec.publisher(None)
        schema = pa.schema([("x", kind)])
        with pytest.raises(
            vd.errors.SchemaError, match=r"'x' is .*which the Lance table cannot hold"
        ):
            publisher.stored(schema, "stage 'docs/out'")
        return
    table = pa.table({"x": pa.array([None, None], found)})
    assert lance.write_dataset(table, tmp_path / "t").to_table() == table
