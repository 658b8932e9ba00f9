"""What Dagster takes for outdated, and what its automation conditions ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pyarrow.compute as pc
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.results import over

# Dagster says so of itself.
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `include_sources`")

DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
DAILY = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
STAGES = ("doubled", "kept")


def doubled(batch):
    return {"double": pc.multiply(batch["n"], 2)}


def tripled(batch):
    return {"double": pc.multiply(batch["n"], 3)}


def tripled_too(batch):
    return {"double": pc.multiply(3, batch["n"])}


def not_fresh(
    defs: dg.Definitions, instance: dg.DagsterInstance, days: Sequence[str | None]
) -> dict[tuple[str | None, str], str]:
    """Status by day and stage, of what is not fresh."""
    graph = defs.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = {
        (day, name): resolver.get_status(dg.AssetKey(["docs", name]), day).value
        for day in days
        for name in STAGES
    }
    return {place: status for place, status in found.items() if status != "FRESH"}


class World:
    def __init__(self, root: Any, instance: dg.DagsterInstance) -> None:
        self.root = root
        self.instance = instance
        self.resources = {
            "compute": InProcessCompute(),
            "store": vd.FragmentStore(root=str(root / "store")),
        }
        self.define(doubled)

    def define(
        self,
        fn: Any,
        condition: dg.AutomationCondition[Any] | None = None,
        partitions_def: Any = DAILY,
    ) -> None:
        placeholder = "{partition_key}" if partitions_def else DAYS[0]
        pipeline = vd.Pipeline(
            "docs",
            source=vd.parquet(str(self.root / "src" / placeholder)),
            id="id",
            partitions_def=partitions_def,
        )
        pipeline.map_batches(
            "doubled",
            fn,
            schema={"double": "BIGINT"},
            asset=vd.Asset(automation_condition=condition),
        ).project("kept", ["double"], asset=vd.Asset(automation_condition=condition))
        self.source = pipeline.build_source()
        self.stages = pipeline.build_assets()
        self.pipeline = pipeline
        job = dg.define_asset_job("observe", [dg.AssetKey(["docs", "source"])])
        self.defs = dg.Definitions([self.source, self.stages], jobs=[job], resources=self.resources)

    def write(self, day: str, numbers: Sequence[int], name: str = "a.parquet") -> None:
        ids = [f"{day}-{name}-{i}" for i in range(len(numbers))]
        write_source(self.root / "src" / day, {"id": ids, "n": list(numbers)}, name)

    def run(self, *days: str, **config: Any) -> dg.ExecuteInProcessResult:
        result = dg.materialize(
            [self.stages, self.source],
            selection=[self.pipeline[name].key for name in STAGES],
            instance=self.instance,
            resources=self.resources,
            run_config={"ops": {"docs_pipeline": {"config": config}}},
            **over(*days),
        )
        assert result.success
        return result

    def observe(self, *days: str) -> dict[str | None, str]:
        job = self.defs.resolve_job_def("observe")
        result = job.execute_in_process(
            instance=self.instance, partition_key=days[0] if days else None
        )
        assert result.success
        found = [event.asset_observation_data for event in result.get_asset_observation_events()]
        observed = [data.asset_observation for data in found]
        assert len({one.partition for one in observed}) == len(observed)
        return {one.partition: one.tags["dagster/data_version"] for one in observed}

    def stale(self) -> dict[tuple[str | None, str], str]:
        """What Dagster's UI marks: status by day and stage, of what is not fresh."""
        days = DAYS if self.stages.partitions_def else [None]
        return not_fresh(self.defs, self.instance, days)


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


@pytest.fixture
def world(tmp_path, instance) -> World:
    made = World(tmp_path, instance)
    for number, day in enumerate(DAYS):
        made.write(day, [number, number + 1])
    return made


def requested(world: World, cursor: Any) -> tuple[Any, Callable[..., Any]]:
    result = dg.evaluate_automation_conditions(
        world.defs,
        world.instance,
        cursor=cursor,
        evaluation_time=datetime(2026, 1, 5, tzinfo=UTC),
    )
    requests = {name: result.get_requested_partitions(world.pipeline[name].key) for name in STAGES}
    return result.cursor, requests


def test_partitions_are_stale_from_a_change_until_a_run_has_read_it(world):
    latest_only = dg.AutomationCondition.in_latest_time_window()
    eager = dg.AutomationCondition.eager().without(latest_only)
    world.define(doubled, condition=eager)
    cursor, requests = requested(world, None)
    assert requests == {"doubled": set(), "kept": set()}

    # An observation reports what changed, and is what automation asks a run for.
    first = world.observe(DAYS[1])
    assert set(first) == {DAYS[1]}
    (world.root / "src" / DAYS[0] / "a.parquet").unlink()
    assert set(world.observe()) == {DAYS[2]}, "one is known, and one is not there"
    world.write(DAYS[0], [0, 1])
    world.write(DAYS[1], [3])
    changed = world.observe()
    assert set(changed) == {*DAYS[:2]}
    assert changed[DAYS[1]] != first[DAYS[1]]
    assert world.observe() == {}
    cursor, requests = requested(world, cursor)
    assert requests == {"doubled": set(DAYS), "kept": set(DAYS)}

    # Runs report what they found.
    world.run(DAYS[0])
    world.write(DAYS[2], [7, 8])  # which is not observed before the run
    world.run(*DAYS[1:])
    assert world.stale() == {}
    assert world.observe() == {}
    cursor, requests = requested(world, cursor)
    assert requests == {"doubled": set(), "kept": set()}

    # One more file, and one less, are changes of their partitions alone.
    world.write(DAYS[2], [1], name="b.parquet")
    (world.root / "src" / DAYS[0] / "a.parquet").unlink()
    world.write(DAYS[0], [5, 6], name="c.parquet")
    assert set(world.observe()) == {DAYS[0], DAYS[2]}
    assert world.stale() == {(DAYS[0], "doubled"): "STALE", (DAYS[2], "doubled"): "STALE"}
    cursor, requests = requested(world, cursor)
    assert requests == {"doubled": {DAYS[0], DAYS[2]}, "kept": {DAYS[0], DAYS[2]}}
    world.run(*DAYS)
    assert world.stale() == {}
    _, requests = requested(world, cursor)
    assert requests == {"doubled": set(), "kept": set()}

    # A touched file is read again, and computes nothing.
    os.utime(world.root / "src" / DAYS[1] / "a.parquet")
    world.observe()
    result = world.run(DAYS[1])
    (event, *_) = result.get_asset_materialization_events()
    assert event.materialization.metadata["rows_computed"].value == 0
    assert world.stale() == {}

    # An edit of the code makes all of them stale.
    world.define(tripled)
    assert world.stale() == {(day, "doubled"): "STALE" for day in DAYS}, "the definition changed"
    world.run(*DAYS)
    assert world.stale() == {}

    # One that a run adopts computes nothing, and says so.
    world.define(tripled_too)
    result = world.run(*DAYS, adopt=["doubled"], adopt_rows=3)
    event = result.asset_materializations_for_node("docs_pipeline")[0]
    assert event.metadata["rows_computed"].value == 0
    assert "code of tripled, adopted on" in str(event.metadata)
    assert world.stale() == {}


def test_other_assets_and_a_source_without_partitions_make_stages_stale(world, tmp_path):
    version = {"model": "a"}

    @dg.asset(partitions_def=DAILY)
    def raw(context) -> None:
        for day in context.partition_keys:
            write_source(tmp_path / "src" / day, {"id": [1, 2], "n": [3, 4]})

    @dg.asset
    def model():
        return dg.MaterializeResult(data_version=dg.DataVersion(version["model"]))

    source = vd.parquet(str(tmp_path / "src" / "{partition_key}"), asset=raw)
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=DAILY)
    made = docs.map_batches(
        "doubled", doubled, schema={"double": "BIGINT"}, asset=vd.Asset(deps=[model])
    )
    made.project("kept", ["double"])
    assets = [raw, model, docs.build_assets()]
    given = {"resources": world.resources, "instance": world.instance}
    both = DAYS[1:]

    def stale():
        defs = dg.Definitions(assets=assets, resources=world.resources)
        return set(not_fresh(defs, world.instance, both))

    def run(*selection, days=both):
        assert dg.materialize(assets, selection=selection, **given, **over(*days)).success

    run("model", days=())
    run("raw")
    run("docs/doubled", "docs/kept")
    assert stale() == set()
    run("raw", days=both[1:])
    assert stale() == {(both[1], "doubled")}
    run("docs/doubled", "docs/kept")
    assert stale() == set()
    version["model"] = "b"
    run("model", days=())
    assert stale() == {(day, "doubled") for day in both}
    run("docs/doubled")
    assert stale() == set()

    # Without partitions.
    with dg.DagsterInstance.ephemeral() as own:
        whole = World(tmp_path / "whole", own)
        whole.write(DAYS[0], [0, 1])
        whole.define(doubled, partitions_def=None)
        whole.run()
        assert whole.stale() == {}
        assert whole.observe() == {}
        whole.write(DAYS[0], [9, 9, 9])
        assert set(whole.observe()) == {None}
        assert whole.stale() == {(None, "doubled"): "STALE"}
        whole.run()
        assert whole.stale() == {}
