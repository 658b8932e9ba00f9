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


def counted(batch):
    """Notes each call, with the first id of its batch."""
    first, *_ = ids = batch["id"].to_pylist()
    if "COUNTED" in os.environ:
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

    def materialize(retry_policy=None, env_vars=(), **given):
        source = vd.parquet(str(tmp_path / "src" / "{partition_key}"))
        days = vd.Pipeline(
            "days", source=source, id="id", partitions_def=DAYS, retry_policy=retry_policy
        )
        doubles = days.map_batches(
            "doubles",
            counted,
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


def test_manifest_that_cannot_be_read_fails_its_partition_alone(run, instance, tmp_path):
    assert "the run names no partition" in failure(run())
    run(**over("2026-01-02", "2026-01-03"))
    (broken,) = (tmp_path / "store/days/kept/manifests/2026-01-02").iterdir()
    broken.write_text("{")
    result = run(**over("2026-01-02", "2026-01-05"))
    assert "1 of 4 partitions failed ('2026-01-02')" in failure(result)
    made = instance.get_materialized_partitions(dg.AssetKey(["days", "doubles"]))
    assert "2026-01-05" in made


def test_force_with_retries_computes_everything_once(run, tmp_path, monkeypatch):
    """What the first attempt committed is not forced again by the second."""
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    whole = over("2026-01-01", "2026-01-04")
    assert run(**whole, env_vars=["COUNTED"]).success
    config = {"ops": {"days_pipeline": {"config": {"force": True}}}}
    (tmp_path / "counted").unlink()
    monkeypatch.setenv("POISON", "303")
    given = {"env_vars": ["COUNTED", "POISON"], "retry_policy": dg.RetryPolicy(max_retries=2)}
    assert not run(**whole, run_config=config, **given).success
    calls = (tmp_path / "counted").read_text().split()
    assert sorted(calls) == ["100", "200", "300", "300", "300", "400"]
