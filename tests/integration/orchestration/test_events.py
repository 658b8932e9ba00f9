"""Dagster's events of a run: how many writes they take, and what is in them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import sqlalchemy
from dagster._core.storage.event_log import SqlEventLogStorage
from sqlalchemy.engine import Engine

import vane_dagster as vd
from support.data import write_source
from support.paths import TESTS
from vane_dagster import checks
from vane_dagster.orchestration import reporting, run
from vane_dagster.orchestration.run import _on_a_thread
from vane_dagster.orchestration.signals import signals_deferred

KEYS = [f"p{number:02}" for number in range(12)]
STAGES = ("vectors", "labels")


def embed(batch: pa.Table) -> pa.Table:
    texts = batch["text"].to_pylist()
    vectors = [[0.0 if text == "zero" else 1.0] for text in texts]
    return pa.table({"vector": pa.array(vectors, pa.list_(pa.float32(), 1)), "label": texts})


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Instances on both databases. The second one is emptied before the test."""
    if request.param == "postgres":
        pytest.importorskip("dagster_postgres", reason="dagster-postgres is not installed")
        url = os.environ.get("VANE_DAGSTER_TEST_POSTGRES")
        if not url:
            pytest.skip("VANE_DAGSTER_TEST_POSTGRES names no database")
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("DROP SCHEMA public CASCADE"))
            connection.execute(sqlalchemy.text("CREATE SCHEMA public"))
        engine.dispose()
        config = {"storage": {"postgres": {"postgres_url": url}}}
        (tmp_path / "dagster.yaml").write_text(json.dumps(config))
    with dg.DagsterInstance.from_config(str(tmp_path)) as opened:
        yield opened


class World:
    """A pipeline of two stages, its source and its store."""

    def __init__(self, root: Path, compute: Any) -> None:
        self.root, self.compute = root, compute
        for key in KEYS:
            self.source(key, ["one", "two"])

    def source(self, key: str, texts: list[str]) -> None:
        table = {"id": pa.array(range(len(texts)), pa.int64()), "text": texts}
        write_source(self.root / "source" / key, table)

    def pipeline(self, fn: Any = embed, partitioned: bool = True, **given: Any) -> vd.Pipeline:
        docs = vd.Pipeline(
            "docs",
            source=vd.parquet(
                str(self.root / "source" / ("{partition_key}" if partitioned else "p00"))
            ),
            id="id",
            partitions_def=dg.StaticPartitionsDefinition(KEYS) if partitioned else None,
            **given,
        )
        schema = {"vector": "FLOAT[1]", "label": "VARCHAR"}
        vectors = docs.map_batches(
            "vectors", fn, schema=schema, checks=[checks.Vectors(blocking=True)]
        )
        vectors.project("labels", ["label"])
        return docs

    def run(
        self, instance: dg.DagsterInstance, *keys: str, assets: Any = None, **given: Any
    ) -> dg.ExecuteInProcessResult:
        tags = {}
        if len(keys) > 1:
            edges = {"start": keys[0], "end": keys[-1]}
            tags = {f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()}
        return dg.materialize(
            assets or [self.pipeline().build_assets()],
            instance=instance,
            partition_key=keys[0] if len(keys) == 1 else None,
            tags=tags,
            resources={
                "compute": self.compute,
                "store": vd.FragmentStore(root=str(self.root / "store")),
            },
            raise_on_error=False,
            **given,
        )


@pytest.fixture
def world(tmp_path: Path, local: Any) -> World:
    return World(tmp_path, local)


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """All events of a run in one group, however slow the machine is."""
    monkeypatch.setattr(reporting, "_SECONDS", 600.0)
    monkeypatch.setattr(run, "_TICK_SECONDS", 600.0)


def materializations(
    instance: dg.DagsterInstance, stage: str
) -> dict[str | None, dg.AssetMaterialization]:
    key = dg.AssetKey(["docs", stage])
    records = instance.fetch_materializations(key, limit=1000, ascending=True).records
    found = [record.asset_materialization for record in records]
    assert len({each.partition for each in found}) == len(found), "one was logged twice"
    return {each.partition: each for each in found}


def evaluations(
    instance: dg.DagsterInstance, run_id: str
) -> dict[tuple[str, str, str | None], dg.AssetCheckEvaluation]:
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    events = [entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind)]
    found = [event.asset_check_evaluation_data for event in events]
    keyed = {(e.asset_key.path[-1], e.check_name, e.partition): e for e in found}
    assert len(keyed) == len(found), "an evaluation was logged twice"
    return keyed


def logged(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(entry.message for entry in instance.all_logs(run_id))


def statuses(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> dict[str, set[str]]:
    definition = dg.StaticPartitionsDefinition(KEYS)
    state = instance.event_log_storage.get_asset_check_state([(key, definition)])[key]
    return {
        status.value: set(subset.value.get_partition_keys())
        for status, subset in state.subsets.items()
        if not subset.is_empty
    }


def test_connections_and_look_ups_do_not_grow_with_partitions(
    world, instance, one_group, monkeypatch
):
    assert world.run(instance, *KEYS).success
    look_up = SqlEventLogStorage.get_latest_storage_id_by_partition
    looked_up: Counter[str] = Counter()
    monkeypatch.setattr(
        SqlEventLogStorage,
        "get_latest_storage_id_by_partition",
        lambda self, key, *rest, **more: (
            looked_up.update([key.path[-1]]) or look_up(self, key, *rest, **more)
        ),
    )

    count: Counter[str] = Counter()
    flush = reporting.RunReport.flush

    def counted(report: reporting.RunReport) -> None:
        """Without the connections by which Dagster stores what it has planned."""

        def connected(*given: Any) -> None:
            count["connections"] += 1

        sqlalchemy.event.listen(Engine, "engine_connect", connected)
        try:
            flush(report)
        finally:
            sqlalchemy.event.remove(Engine, "engine_connect", connected)

    monkeypatch.setattr(reporting.RunReport, "flush", counted)

    def connections(*keys: str) -> int:
        """Connections of a run that reports what an earlier one has made."""
        count.clear()
        assert world.run(instance, *keys).success
        return count["connections"]

    few = connections(*KEYS[:2])
    assert looked_up == {"vectors": 1, "labels": 1}
    looked_up.clear()
    many = connections(*KEYS)
    assert looked_up == {"vectors": 1, "labels": 1}
    assert many == few < 10


def test_a_group_has_the_columns_once_in_the_latest_event(world, instance, one_group):
    assert world.run(instance, *KEYS).success
    for stage in STAGES:
        found = materializations(instance, stage)
        assert sorted(found) == KEYS
        with_columns = [k for k, m in found.items() if "dagster/column_schema" in m.metadata]
        latest = list(found)[-1]
        assert with_columns == [latest]
        assert "dagster/column_lineage" in found[latest].metadata
        assert {m.metadata["dagster/partition_row_count"].value for m in found.values()} == {2}


def test_groups_are_written_while_the_run_goes_on(world, instance, monkeypatch):
    """Each with the columns, as any of them may be the last one that is written."""
    monkeypatch.setattr(reporting, "_GROUP", 1)
    assert world.run(instance, *KEYS[:3]).success
    for stage in STAGES:
        for materialization in materializations(instance, stage).values():
            assert "dagster/column_schema" in materialization.metadata


def test_events_in_a_group_refer_to_each_other(world, instance, one_group):
    """Pointers to inputs, and from evaluations to what was evaluated."""
    result = world.run(instance, *KEYS)
    assert result.success
    ids = {
        key: {
            record.asset_materialization.partition: record.storage_id
            for record in instance.fetch_materializations(key, limit=100).records
        }
        for key in (dg.AssetKey(["docs", stage]) for stage in STAGES)
    }
    vectors, labels = ids
    for partition, made in materializations(instance, "labels").items():
        pointer = made.tags["dagster/input_event_pointer/docs/vectors"]
        assert pointer == str(ids[vectors][partition])
    found = evaluations(instance, result.run_id)
    assert len(found) == len(KEYS) * len(world.pipeline().build_assets().check_keys)
    for (_, _, partition), evaluation in found.items():
        target = evaluation.target_materialization_data
        assert target.storage_id == ids[evaluation.asset_key][partition]
        assert target.run_id == result.run_id
    key = dg.AssetCheckKey(vectors, "vectors")
    assert statuses(instance, key) == {"SUCCEEDED": set(KEYS)}
    assert labels in instance.get_asset_keys()


def test_results_in_process_have_the_events(world, instance):
    result = world.run(instance, *KEYS[:2])
    made = [event.materialization for event in result.get_asset_materialization_events()]
    assert len(made) == 4
    assert {m.asset_key.path[-1] for m in made} == set(STAGES)
    assert len(result.get_asset_check_evaluations()) == 2 * len(
        world.pipeline().build_assets().check_keys
    )
    assert len(result.asset_materializations_for_node("docs_pipeline")) == 4
    materializations(instance, "vectors")


def test_what_lacks_its_event_is_reported_by_the_next_run(world, instance, tmp_path):
    """As after a kill between the commit and its event: the manifest alone is there."""
    with dg.DagsterInstance.ephemeral() as other:
        assert world.run(other, *KEYS[:2]).success
    result = world.run(instance, *KEYS[:2])
    assert result.success
    for stage in STAGES:
        found = materializations(instance, stage)
        assert list(found) == KEYS[:2]
        assert {m.metadata["fragments_computed"].value for m in found.values()} == {0}
    assert evaluations(instance, result.run_id)


def test_a_late_run_does_not_report_a_version_that_was_replaced(world, instance, monkeypatch):
    flush = reporting.RunReport.flush
    newer: list[bool] = []

    def late(report: reporting.RunReport) -> None:
        if report._count and not newer:
            newer.append(True)
            world.source("p00", ["one", "two", "three"])
            newer.append(world.run(instance, "p00").success)
        flush(report)

    monkeypatch.setattr(reporting, "_GROUP", 4)
    monkeypatch.setattr(reporting, "_SECONDS", 600.0)
    monkeypatch.setattr(run, "_TICK_SECONDS", 600.0)
    monkeypatch.setattr(reporting.RunReport, "flush", late)
    assert world.run(instance, *KEYS[:2]).success
    assert newer == [True, True]
    latest = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey(["docs", "vectors"]), asset_partitions=["p00"]),
        limit=1,
    ).records[0]
    assert latest.asset_materialization.metadata["dagster/partition_row_count"].value == 3


def asset_below(docs: vd.Pipeline) -> dg.AssetsDefinition:
    policy = dg.BackfillPolicy.single_run() if docs.partitions_def else None

    @dg.multi_asset(
        specs=[dg.AssetSpec("below", deps=[docs["vectors"].key])],
        partitions_def=docs.partitions_def,
        backfill_policy=policy,
    )
    def below() -> Iterator[dg.MaterializeResult]:
        yield dg.MaterializeResult(asset_key="below")

    return below


SKIPPED = "did not yield or return expected outputs"
UNGATED = "emitted no result"


@pytest.mark.parametrize("keys", [KEYS[:1], KEYS[:3], ()], ids=["single", "range", "unpartitioned"])
def test_planned_checks_give_results_that_dagster_sees(world, instance, caplog, keys):
    docs = world.pipeline(partitioned=bool(keys))

    below = asset_below(docs)

    result = world.run(instance, *keys, assets=[docs.build_assets(), below])
    assert result.success
    assert SKIPPED not in logged(instance, result.run_id)
    assert UNGATED not in caplog.text + logged(instance, result.run_id)
    assert not [e for e in result.all_events if e.is_step_skipped]
    found = evaluations(instance, result.run_id)
    assert {partition for _, _, partition in found} == set(keys or [None])
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(docs["vectors"].key, "vectors"))
    alone = world.run(instance, assets=[docs.build_assets()], selection=selection)
    assert alone.success
    assert SKIPPED not in logged(instance, alone.run_id)
    assert len(evaluations(instance, alone.run_id)) == len(keys or [None])


def test_a_failed_blocking_check_withholds_an_ordinary_asset_below(world, instance, caplog):
    world.source("p00", ["zero"])
    docs = world.pipeline()

    below = asset_below(docs)

    result = world.run(instance, "p00", assets=[docs.build_assets(), below])
    assert not result.success
    assert UNGATED not in caplog.text
    assert not instance.fetch_materializations(dg.AssetKey("below"), limit=1).records
    found = evaluations(instance, result.run_id)
    assert not found["vectors", "vectors", "p00"].passed
    assert not found["labels", "ids_complete", "p00"].passed
    history = instance.event_log_storage.get_asset_check_execution_history
    for key in docs.build_assets().check_keys:
        assert {record.status.value for record in history(key, 10)} <= {"SUCCEEDED", "FAILED"}


def fails_once(batch: pa.Table, folder: str) -> pa.Table:
    marker = Path(folder) / "failed"
    if "poison" in batch["text"].to_pylist() and not marker.exists():
        marker.touch()
        raise OSError("the network was away")
    return embed(batch)


def test_a_second_attempt_repeats_no_evaluation(world, instance, tmp_path):
    world.source("p01", ["poison"])
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "source" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(KEYS),
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    schema = {"vector": "FLOAT[1]", "label": "VARCHAR"}
    fn_kwargs = {"folder": str(tmp_path)}
    docs.map_batches("vectors", fails_once, schema=schema, fn_kwargs=fn_kwargs)
    result = world.run(instance, "p00", "p01", assets=[docs.build_assets()])
    assert result.success
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    events = instance.all_logs(result.run_id, of_type=kind)
    found = [entry.dagster_event.asset_check_evaluation_data for entry in events]
    each = Counter((e.check_name, e.partition, e.passed) for e in found)
    assert set(each.values()) == {1}
    assert {partition for _, partition, passed in each if not passed} == {"p01"}
    key = dg.AssetCheckKey(docs["vectors"].key, "ids_complete")
    assert statuses(instance, key) == {"SUCCEEDED": {"p00", "p01"}}


def test_a_group_on_sqlite_is_written_whole_or_not_at_all(world, tmp_path, monkeypatch):
    """So that a killed run has no evaluation without its materialization."""
    store_event = SqlEventLogStorage.store_asset_check_event

    def failing(self: Any, event: Any, id: Any) -> None:
        if event.dagster_event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            raise OSError("the disk is full")
        store_event(self, event, id)

    monkeypatch.setattr(SqlEventLogStorage, "store_asset_check_event", failing)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        result = world.run(instance, *KEYS[:2])
        assert not result.success
        assert not instance.fetch_materializations(dg.AssetKey(["docs", "vectors"]), 1).records
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        assert not instance.all_logs(result.run_id, of_type=kind)
    (index,) = tmp_path.glob("**/index.db")
    with sqlite3.connect(index) as connection:
        query = "SELECT count(*) FROM asset_event_tags"
        assert connection.execute(query).fetchone() == (0,)


def embed_slowly(batch: pa.Table) -> pa.Table:
    time.sleep(0.05)
    return embed(batch)


def run_of_a_process(root: Path) -> None:
    """Materializes all partitions in a process that is interrupted meanwhile."""
    world = World(root, vd.LocalCompute(num_cpus=2))
    with dg.DagsterInstance.from_config(str(root)) as instance:
        world.run(instance, *KEYS, assets=[world.pipeline(embed_slowly).build_assets()])


def test_an_interrupted_run_has_an_event_for_each_manifest(tmp_path):
    (tmp_path / "dagster.yaml").touch()
    code = f"import test_events as t; t.run_of_a_process(t.Path({str(tmp_path)!r}))"
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def in_force() -> set[tuple[str, str]]:
        found = (tmp_path / "store" / "docs").glob("*/manifests/*/*.json")
        return {(path.parts[-4], path.parts[-2]) for path in found}

    try:
        until = time.monotonic() + 120
        while len(in_force()) < 4 and time.monotonic() < until:
            assert run.poll() is None, "the run ended early"
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        run.wait(60)
    finally:
        run.kill()
    committed = in_force()
    assert 4 <= len(committed) < len(KEYS) * len(STAGES)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        reported = {(s, key) for s in STAGES for key in materializations(instance, s)}
    assert reported == committed


class Interrupted(BaseException):
    pass


def test_commits_of_a_cancelled_run_are_handed_over(monkeypatch):
    monkeypatch.setattr(run, "_CHECK_SECONDS", 0.0)
    taken: list[Any] = []
    flushed: list[int] = []

    def work(emit: Any, cancelled: threading.Event) -> None:
        emit("first")
        assert cancelled.wait(60)
        emit("second")  # a commit that was under way
        emit("third")

    def check() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        _on_a_thread(work, taken.append, check, lambda: flushed.append(len(taken)))
    assert taken == ["first", "second", "third"]
    assert flushed[-1] == 3


def test_a_cancelled_run_that_does_not_stop_is_left_in_time(monkeypatch):
    monkeypatch.setattr(run, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(run, "_CHECK_SECONDS", 0.0)
    ended = threading.Event()

    def check() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        _on_a_thread(lambda emit, cancelled: ended.wait(60), print, check, lambda: None)
    assert not ended.is_set()
    ended.set()


def test_no_event_is_lost_to_a_signal_that_comes_while_it_is_written():
    taken: list[Any] = []

    def work(emit: Any, cancelled: threading.Event) -> None:
        for number in range(3):
            emit(number)
        cancelled.wait(60)

    def listen(event: Any) -> None:
        if event == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # where Python would raise
        taken.append(event)

    with pytest.raises(KeyboardInterrupt):
        _on_a_thread(work, listen, lambda: None, lambda: None)
    assert taken == [0, 1, 2]


def test_a_second_signal_is_not_deferred():
    reached: list[int] = []

    def interrupt_twice() -> None:
        with signals_deferred() as received:
            for number in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                reached.append(number)
            assert not received, "the second signal did not end the block"

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
