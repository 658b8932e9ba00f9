"""Every kind of partition, and keys with any characters."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq

import vane_dagster as vd
from support.data import write_source
from support.results import metadata, over

REGIONS = dg.StaticPartitionsDefinition(["eu", "us"])
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-10")
STRANGE = (
    "a b",
    "A b",
    "münchen",
    "mu\u0308nchen",  # with a combining diaeresis
    "日本",
    "%2e%2e",
    "#1?x=1&y",
    "*",
    "{key}",
    "_hidden",
    ".dot",
    "trailing.",
    "-",
    "x" * 200,
    "ü" * 200,
    "con",
    "'; drop table docs; --",
    "~unpartitioned",
    "C++::std",
    "a://b",
    "s3://lake/b",
    "../outside",
    "..",
)


def copied(batch):
    return batch


def pipeline(
    root: Path, partitions_def: dg.PartitionsDefinition, source: str, target: str
) -> vd.Pipeline:
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{root}/src/{source}"),
        id="id",
        partitions_def=partitions_def,
    )
    clean = docs.project("clean", ["id", "n"])
    clean.map_batches("copied", copied, schema={"id": "BIGINT", "n": "BIGINT"})
    clean.write("published", f"{root}/out/{target}")
    return docs


def published(folder: Path) -> list[int]:
    return [
        n for file in sorted(folder.glob("*.parquet")) for n in pq.read_table(file)["n"].to_pylist()
    ]


def test_time_partitions(tmp_path, local, materialize):
    key = "2026/01/03"
    days = dg.TimeWindowPartitionsDefinition(
        start="2026/01/01", cron_schedule="0 0 * * *", fmt="%Y/%m/%d"
    )
    docs = pipeline(tmp_path, days, "{partition_key}", "{partition_key}")
    write_source(tmp_path / "src" / key, {"id": [1, 2], "n": [3, 4]})
    assert metadata(materialize(docs, local, key), "published")["fragments_computed"] == 1
    again = metadata(materialize(docs, local, key), "published")
    assert again["fragments_computed"] == 0
    assert published(Path(again["dagster/uri"])) == [3, 4]
    assert len(list((tmp_path / "out").iterdir())) == 1, "a key is one folder"


def test_dynamic_partitions(tmp_path, local, materialize):
    customers = dg.DynamicPartitionsDefinition(name="customers")
    docs = pipeline(tmp_path, customers, "{partition_key}", "{partition_key}")
    with dg.DagsterInstance.ephemeral() as instance:
        for number, customer in enumerate(("acme", "zeta/eu")):
            instance.add_dynamic_partitions("customers", [customer])
            write_source(tmp_path / "src" / customer, {"id": [1], "n": [number]})
            result = materialize(docs, local, customer, instance=instance)
            uri = metadata(result, "published")["dagster/uri"]
            assert published(Path(uri)) == [number]


def test_multi_partitions_by_dimension(tmp_path, local, materialize):
    grid = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
    dimensions = "{partition_key.region}/{partition_key.day}"
    docs = pipeline(tmp_path, grid, dimensions, dimensions)
    for number, region in enumerate(("eu", "us")):
        key = dg.MultiPartitionKey({"day": "2026-01-02", "region": region})
        write_source(tmp_path / "src" / region / "2026-01-02", {"id": [1], "n": [number]})
        for computed in (1, 0):
            result = materialize(docs, local, key)
            found = metadata(result, "published")
            assert found["fragments_computed"] == computed
            assert found["dagster/uri"].endswith(f"/out/{region}/2026-01-02")
            (event,) = [
                e.materialization
                for e in result.get_asset_materialization_events()
                if e.asset_key.path[-1] == "published"
            ]
            assert event.tags["dagster/partition/region"] == region
            assert event.tags["dagster/partition/day"] == "2026-01-02"
        assert published(tmp_path / "out" / region / "2026-01-02") == [number]


def test_keys_with_any_characters(tmp_path, local):
    """Each has its own folders, inside the root, in the store and in what is published."""
    keys = dg.StaticPartitionsDefinition(list(STRANGE))
    grid = dg.MultiPartitionsDefinition(
        {"key": keys, "region": dg.StaticPartitionsDefinition(["eu"])}
    )
    docs = pipeline(tmp_path, grid, "{partition_key.region}", "all/{partition_key.key}")
    write_source(tmp_path / "src" / "eu", {"id": [1], "n": [7]})
    before = set(tmp_path.iterdir())
    places = grid.get_partition_keys()
    result = dg.materialize(
        [docs.build_assets()],
        resources={"compute": local, "store": vd.FragmentStore(root=f"{tmp_path}/store")},
        **over(*places),
    )
    made = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.materialization.asset_key.path[-1] == "published"
    ]
    assert {event.partition for event in made} == set(places)
    folders = {Path(event.metadata["dagster/uri"].value) for event in made}
    assert len(folders) == len(STRANGE)
    assert set((tmp_path / "out" / "all").iterdir()) == folders
    assert all(published(folder) == [7] for folder in folders)
    parts = tmp_path / "store" / "docs" / "copied" / "parts"
    assert len(list(parts.iterdir())) == len(STRANGE)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out", tmp_path / "store"}
