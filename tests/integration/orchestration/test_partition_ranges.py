"""Several partitions in one run, as a backfill of a single run launches them."""

from __future__ import annotations

import os

import dagster as dg
import pyarrow.compute as pc
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import failure, over

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-10")


def doubled(batch):
    return {"double": pc.multiply(batch["n"], 2)}


def counted(batch):
    """Notes each call, with the first id of its batch."""
    first, *_ = ids = batch["id"].to_pylist()
    with open(os.environ["COUNTED"], "a") as file:
        file.write(f"{first}\n")
    if int(os.environ.get("POISON", -1)) in ids:
        raise ValueError("a poisoned row")
    return {"double": pc.multiply(batch["n"], 2)}


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


@pytest.fixture
def run(tmp_path, local, instance):
    for day in range(1, 6):
        ids = [day * 100 + row for row in range(5)]
        write_source(tmp_path / "src" / f"2026-01-{day:02}", {"id": ids, "n": ids})

    def materialize(fn, retry_policy=None, env_vars=(), **given):
        source = vd.parquet(str(tmp_path / "src" / "{partition_key}"))
        days = vd.Pipeline(
            "days", source=source, id="id", partitions_def=DAYS, retry_policy=retry_policy
        )
        doubles = days.map_batches(
            "doubles",
            fn,
            schema={"double": "BIGINT"},
            batch_size=10,
            concurrency=vd.Workers(env_vars=env_vars),
        )
        doubles.project("kept", ["double"])
        store = vd.FragmentStore(root=str(tmp_path / "store"))
        return dg.materialize(
            [days.build_assets()],
            resources={"compute": local, "store": store},
            raise_on_error=False,
            instance=instance,
            **given,
        )

    return materialize


def events(instance, stage):
    """Materializations by partition, as Dagster's own event log has them."""
    records = instance.fetch_materializations(dg.AssetKey(["days", stage]), limit=100).records
    found = {record.partition_key: record.asset_materialization for record in records}
    assert len(found) == len(records), "a partition has two events"
    return found


def test_run_without_a_partition_says_so(run):
    result = run(doubled)
    assert "the run names no partition" in failure(result)


def test_manifest_that_cannot_be_read_fails_its_partition_alone(run, instance, tmp_path):
    run(doubled, **over("2026-01-02", "2026-01-03"))
    (broken,) = (tmp_path / "store/days/kept/manifests/2026-01-02").iterdir()
    broken.write_text("{")
    result = run(doubled, **over("2026-01-02", "2026-01-05"))
    assert "1 of 4 partitions failed ('2026-01-02')" in failure(result)
    made = instance.get_materialized_partitions(dg.AssetKey(["days", "doubles"]))
    assert "2026-01-05" in made


def test_force_with_retries_computes_everything_once(run, tmp_path, monkeypatch):
    """What the first attempt committed is not forced again by the second."""
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    whole = over("2026-01-01", "2026-01-04")
    assert run(counted, **whole, env_vars=["COUNTED"]).success
    config = {"ops": {"days_pipeline": {"config": {"force": True}}}}
    (tmp_path / "counted").unlink()
    monkeypatch.setenv("POISON", "303")
    given = {"env_vars": ["COUNTED", "POISON"], "retry_policy": dg.RetryPolicy(max_retries=2)}
    assert not run(counted, **whole, run_config=config, **given).success
    calls = (tmp_path / "counted").read_text().split()
    assert sorted(calls) == ["100", "200", "300", "300", "300", "400"]
