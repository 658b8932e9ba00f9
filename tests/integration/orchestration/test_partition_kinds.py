"""Every kind of partition."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.results import failure, metadata

REGIONS = dg.StaticPartitionsDefinition(["eu", "us"])
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-10")


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


TIMES = dg.TimeWindowPartitionsDefinition(
    start="2026/01/01", cron_schedule="0 0 * * *", fmt="%Y/%m/%d"
)
GRID = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
DAY = "2026-01-02"


@pytest.mark.parametrize(
    ("partitions_def", "place", "keys"),
    [
        (TIMES, "{partition_key}", {"2026/01/03": "2026/01/03", "2026/01/04": "2026/01/04"}),
        (dg.DynamicPartitionsDefinition(name="customers"), "{partition_key}",
         {"acme": "acme", "zeta/eu": "zeta/eu"}),
        (GRID, "{partition_key.region}/{partition_key.day}",
         {dg.MultiPartitionKey({"day": DAY, "region": region}): f"{region}/{DAY}"
          for region in ("eu", "us")}),
    ],
    ids=["times", "dynamic", "dimensions"],
)  # fmt: skip
def test_kinds_of_partitions(partitions_def, place, keys, tmp_path, materialize):
    docs = pipeline(tmp_path, partitions_def, place, place)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("customers", list(keys))
        for number, (key, folder) in enumerate(keys.items()):
            write_source(tmp_path / "src" / folder, {"id": [1], "n": [number]})
            for computed in (1, 0):
                result = materialize(docs, InProcessCompute(), key, instance=instance)
                found = metadata(result, "published")
                assert found["fragments_computed"] == computed
            assert published(Path(found["dagster/uri"])) == [number]
            if partitions_def is GRID:
                assert found["dagster/uri"].endswith(f"/out/{folder}")
                for event in result.get_asset_materialization_events():
                    tags = event.materialization.tags
                    assert f"{tags['dagster/partition/region']}/{DAY}" == folder
                    assert tags["dagster/partition/day"] == DAY
        nowhere = materialize(docs, InProcessCompute(), instance=instance, raises=False)
        assert "the run has no partition; choose" in failure(nowhere)
    assert len(list((tmp_path / "out").iterdir())) == 2, "a key is one folder"


def test_a_week_reads_its_days(tmp_path):
    weeks, days = (
        dg.WeeklyPartitionsDefinition("2026-01-04"),
        dg.DailyPartitionsDefinition("2026-01-01"),
    )

    @dg.asset(partitions_def=days, io_manager_key="store")
    def raw(context) -> pa.Table:
        return pa.table({"id": [int(context.partition_key[-2:])]})

    def week(source: object) -> tuple[vd.Pipeline, dg.AssetsDefinition]:
        docs = vd.Pipeline("docs", source=source, id="id", partitions_def=weeks)
        docs.project("clean", ["id"])
        return docs, docs.build_assets()

    resources = {"compute": InProcessCompute(), "store": vd.FragmentStore(root=str(tmp_path))}
    for day in range(4, 11):
        dg.materialize([raw], partition_key=f"2026-01-{day:02}", resources=resources)

    def run(assets: dg.AssetsDefinition, key: str) -> dg.ExecuteInProcessResult:
        selection = [*assets.keys]
        given = {"partition_key": key, "resources": resources, "raise_on_error": False}
        return dg.materialize([raw, assets], selection=selection, **given)

    _, unknown = week(vd.stored("raw"))
    refused = "unlike its source, asset 'raw' (Daily, starting 2026-01-01"
    assert refused in failure(run(unknown, "2026-01-04"))

    docs, assets = week(raw)
    assert run(assets, "2026-01-04").success
    assert sorted(vd.load(docs["clean"], store=str(tmp_path))["id"].to_pylist()) == [*range(4, 11)]
    missing = failure(run(assets, "2026-01-11"))
    assert "asset 'raw' was never materialized" in missing
    assert "in partition '2026-01-11'; materialize it first" in missing
