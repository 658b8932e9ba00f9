"""Backfills, cancelling, kills, retries and schedules in a real ``dagster dev``.

The tests do what a user does in Dagster's UI, by the GraphQL that it sends, and look at what
a user sees there and at what is in the store. They share one instance and keep to partitions of
their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.dagster_dev import DagsterDev, asset_keys
from support.data import write_source
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.worker.host import Host
from vane_dagster.worker.operations import CallUdf, HeldRows
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.protocol import ModelSpec, Work

pytest.importorskip("dagster_webserver", reason="dagster-webserver is not installed")

DEFINITIONS = '''
"""Pipelines over what the tests write beside this file."""

import os
import time
from pathlib import Path

import dagster as dg
import pyarrow.compute as pc

import vane_dagster as vd

ROOT = Path(__file__).parent
NOTES = str(ROOT / "notes")


def doubled(batch):
    if 666 in batch["n"].to_pylist():
        raise ValueError("a poisoned row")
    return {"double": pc.multiply(batch["n"], 2)}


class Noting:
    """Notes each batch by the source value of its first row; takes its time while it is told to."""

    def __init__(self, notes):
        self.notes = notes

    def __call__(self, batch):
        began = time.time()
        with open(os.path.join(self.notes, "calls"), "a") as calls:
            calls.write(f"{batch['n'][0]}\\n")
        if os.path.exists(os.path.join(self.notes, "slowly")):
            time.sleep(0.25)
        times = {"began": began, "ended": time.time(), "pid": os.getpid()}
        return {name: [value] * batch.num_rows for name, value in times.items()}


def flaky(batch, notes):
    """Fails once, at a certain row."""
    failed = os.path.join(notes, "failed-once")
    if 199 in batch["n"].to_pylist() and not os.path.exists(failed):
        open(failed, "w").close()
        raise OSError("the network was away")
    return {"double": pc.multiply(batch["n"], 2)}


def pipeline(name, partitions, **options):
    source = vd.parquet(f"{ROOT}/src/{name}/{{partition_key}}")
    return vd.Pipeline(
        name, source=source, id="id", partitions_def=partitions, fragment_rows=10, **options
    )


def noting(made):
    stage = made.map_batches(
        "noted",
        Noting,
        schema={"began": "DOUBLE", "ended": "DOUBLE", "pid": "BIGINT"},
        batch_size=5,
        concurrency=2,
        fn_constructor_kwargs={"notes": NOTES},
        version="1",  # as it writes to the folder that its argument names
    )
    stage.project("kept", ["pid"])
    return made


days = pipeline("days", dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-11"))
days.map_batches("doubles", doubled, schema={"double": "BIGINT"}).project("kept", ["double"])

words = "ended stopped first second step-killed worker-killed twice".split()
slow = noting(pipeline("slow", dg.StaticPartitionsDefinition(words)))

turns = noting(
    pipeline(
        "turns",
        dg.StaticPartitionsDefinition(list("abcd")),
        backfill_policy=dg.BackfillPolicy.multi_run(1),
        pool="one_at_a_time",
    )
)

retried = pipeline(
    "retried",
    dg.StaticPartitionsDefinition(["a", "b"]),
    retry_policy=dg.RetryPolicy(max_retries=1),
    op_tags={"team": "texts"},
)
retried.map_batches(
    "doubles", flaky, schema={"double": "BIGINT"}, fn_kwargs={"notes": NOTES}, version="1"
)



def doubled_or_null(batch):
    return {"double": [None if n == 13 else 2 * n for n in batch["n"].to_pylist()]}


judged = pipeline("judged", dg.StaticPartitionsDefinition(["a", "b", "c"]))
judged.map_batches(
    "doubles",
    doubled_or_null,
    schema={"double": "BIGINT"},
    checks=[vd.checks.NullRate(0, blocking=True, severity="ERROR")],
).project("kept", ["double"])

nightly = dg.define_asset_job("nightly", selection=["days/doubles", "days/kept"])


@dg.schedule(cron_schedule="* * * * *", job=nightly)
def every_minute(context):
    """One run in all, however long the tests take."""
    asked = ROOT / "notes" / "asked"
    if asked.exists():
        return dg.SkipReason("it was asked for")
    asked.touch()
    return dg.RunRequest(partition_key="2026-01-10")


defs = dg.Definitions(
    assets=[made.build_assets() for made in (days, slow, turns, retried, judged)]
    + [days.build_source()],
    schedules=[every_minute],
    resources={
        "compute": vd.RayCompute(cluster=vd.LocalCluster(name="backfills", num_cpus=2)),
        "store": vd.FragmentStore(root=str(ROOT / "store")),
    },
)
'''

DAYS = ["days/doubles", "days/kept"]
SLOW = ["slow/noted", "slow/kept"]
TURNS = ["turns/noted", "turns/kept"]
JUDGED = ["judged/doubles", "judged/kept"]

# Batches: two workers, with a fragment at work and one queued each, of two batches.
IN_FLIGHT = 8


class Project(DagsterDev):
    """``dagster dev`` over the definitions above, their sources and their store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "definitions.py").write_text(DEFINITIONS)
        (folder / "notes").mkdir()
        self.store = vd.FragmentStore(root=str(folder / "store"))

    def write(self, pipeline: str, partition: str, values: list[int]) -> None:
        """Writes a partition's source: ids from 0, and values in the column n."""
        table = {"id": list(range(len(values))), "n": values}
        write_source(self.folder / "src" / pipeline / partition, table)

    def rows(self, stage: str, partition: str) -> dict[str, list[Any]]:
        """What the manifest in force holds."""
        return self.store.dataset(stage, partition).to_table().to_pydict()

    def parts(self, stage: str, partition: str) -> int:
        """Finished parts of a stage in a partition, whatever a manifest says."""
        pipeline, _, name = stage.partition("/")
        folder = self.folder / "store" / pipeline / name / "parts" / partition
        return len(list(folder.glob("*.parquet")))

    def calls(self, values: list[int]) -> Counter[int]:
        """How often each of some batches was computed, by its first value."""
        noted = map(int, (self.folder / "notes" / "calls").read_text().split())
        return Counter(value for value in noted if value in set(values))

    def slowly(self, slow: bool) -> None:
        """Whether a batch takes a quarter of a second, or nothing."""
        flag = self.folder / "notes" / "slowly"
        flag.touch() if slow else flag.unlink(missing_ok=True)

    def pools(self) -> list[dict[str, Any]]:
        """What ``vane-dagster pools --json`` says."""
        program = "from vane_dagster.cli.main import main; main()"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        said = subprocess.run(
            [sys.executable, "-c", program, "pools", "--json", "--name", "backfills"],
            capture_output=True,
            text=True,
            env=clean,
        )
        assert said.returncode == 0, said.stderr
        return list(json.loads(said.stdout))


@pytest.fixture(scope="module")
def dev(_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project, with its schedule turned on, and a Ray head of its own."""
    from vane_dagster.compute.local_head import LocalHead

    project = Project(tmp_path_factory.mktemp("project"))
    project.write("days", "2026-01-10", [1, 2, 3])
    try:
        project.start()
        project.start_schedule("every_minute")
        yield project
    finally:
        project.stop()
        LocalHead(name="backfills").stop()


@pytest.fixture
def slowly(dev: Project) -> Iterator[None]:
    """Batches take their time, until the test says otherwise."""
    dev.slowly(True)
    yield
    dev.slowly(False)


def test_backfill_is_one_run_with_an_event_a_partition(dev):
    keys = ["2026-01-01", "2026-01-02", "2026-01-03"]
    for rows, key in enumerate(keys, start=4):
        dev.write("days", key, list(range(rows)))

    state = dev.backfill_ended(dev.backfill(DAYS, keys))

    assert state["status"] == "COMPLETED_SUCCESS"
    assert [run["status"] for run in state["runs"]] == ["SUCCESS"]
    for stage in DAYS:
        assert state["assets"][stage] == {"targeted": 3, "materialized": 3, "failed": 0}
        found = dev.asset(stage, keys)
        assert [found[key]["events"] for key in keys] == [1, 1, 1]
        assert [found[key]["status"] for key in keys] == ["MATERIALIZED"] * 3
        assert [found[key]["stale"] for key in keys] == ["FRESH"] * 3
        assert len({found[key]["version"] for key in keys}) == 3
        counts = [found[key]["metadata"]["dagster/partition_row_count"] for key in keys]
        assert counts == [4, 5, 6]
    assert _passed(dev, "days/doubles", keys) == {
        "ids_complete": True, "error_rate": True, "packages_unchanged": True, "null_rate": True
    }  # fmt: skip
    assert _passed(dev, "days/kept", keys) == {"ids_complete": True, "error_rate": True}
    for rows, key in enumerate(keys, start=4):
        (execution,) = dev.evaluations("days/doubles", "ids_complete", key)
        assert execution["status"] == "SUCCEEDED"
        evaluation = execution["evaluation"]
        assert evaluation["partition"] == key
        assert evaluation["targetMaterialization"]["runId"] == state["runs"][0]["runId"]
        found = {entry["label"]: entry.get("intValue") for entry in evaluation["metadataEntries"]}
        assert found["rows"] == found["rows_in"] == rows


def test_poisoned_partition_alone_fails_and_alone_is_retried(dev):
    good, bad = ["2026-01-04", "2026-01-06"], "2026-01-05"
    for key in good:
        dev.write("days", key, [1, 2, 3])
    dev.write("days", bad, [1, 666, 3])

    backfill = dev.backfill(DAYS, [*good, bad])
    state = dev.backfill_ended(backfill)

    assert state["status"] == "COMPLETED_FAILED"
    (run,) = state["runs"]
    assert run["status"] == "FAILURE"
    said = dev.said(run["runId"])
    assert f"1 of 3 partitions failed ('{bad}'); the others are materialized" in said
    assert "ValueError: a poisoned row" in said
    for stage in DAYS:
        assert state["assets"][stage] == {"targeted": 3, "materialized": 2, "failed": 1}
        for found in dev.checks(stage).values():
            assert {key: found.get(key) for key in good} == dict.fromkeys(good, "SUCCEEDED")
            assert found[bad] == "FAILED"
        found = dev.asset(stage, [*good, bad])
        assert [found[key]["status"] for key in good] == ["MATERIALIZED"] * 2
        assert [found[key]["stale"] for key in good] == ["FRESH"] * 2
        assert found[bad]["status"] == "FAILED"
        assert found[bad]["events"] == 0

    dev.write("days", bad, [1, 2, 3])
    state = dev.backfill_ended(dev.retry_failed(backfill))

    assert state["status"] == "COMPLETED_SUCCESS"
    assert state["partitionNames"] == [bad]
    assert [run["status"] for run in state["runs"]] == ["SUCCESS"]
    for stage in DAYS:
        assert all(_passed(dev, stage, [*good, bad]).values())
        found = dev.asset(stage, [*good, bad])
        assert {key: what["status"] for key, what in found.items()} == dict.fromkeys(
            [*good, bad], "MATERIALIZED"
        )
        assert [what["events"] for what in found.values()] == [1, 1, 1]
        assert [what["stale"] for what in found.values()] == ["FRESH"] * 3


def test_cancelled_run_stops_and_leaves_parts_and_warm_workers(dev, slowly):
    values = list(range(1000, 1400))
    dev.write("slow", "stopped", values)
    run = dev.launch(SLOW, "stopped")
    dev.wait(lambda: dev.parts("slow/noted", "stopped") >= 4, "four parts are written")

    dev.terminate(run)

    assert dev.ended(run, seconds=30) == "CANCELED"
    called = dev.calls(values)
    assert len(called) < 80
    pools = dev.pools()
    assert not any(run in pool["leases"] for pool in pools)
    (pool,) = [pool for pool in pools if pool["label"] == "Noting"]
    warm = {worker["pid"] for worker in pool["workers"]}
    assert warm
    assert all(map(psutil.pid_exists, warm))
    time.sleep(1.5)  # what was at work or queued would have begun by now
    assert dev.calls(values) == called, "the workers went on"

    kept = dev.parts("slow/noted", "stopped")
    dev.slowly(False)
    dev.succeeded(dev.launch(SLOW, "stopped"))

    metadata = dev.asset("slow/noted", ["stopped"])["stopped"]["metadata"]
    assert metadata["fragments_reused"] == kept
    assert metadata["fragments_computed"] == 40 - kept
    assert metadata["model_loads"] == 0
    assert metadata["warm_hits"] > 0
    rows = dev.rows("slow/noted", "stopped")
    assert rows["id"] == list(range(400))
    assert set(rows["pid"]) <= warm
    assert dev.calls(values).total() <= 80 + IN_FLIGHT


def test_worker_that_is_told_to_stop_writes_no_part_of_half_its_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a host taps
    monkeypatch.setattr(OutputTap, "_instance", None)
    host = Host()

    def told_to_stop(batch):
        host.revoke("lease")
        return batch

    host.models.hold(ModelSpec("told_to_stop", False, "plain", "", b""), told_to_stop)
    work = Work(
        "stage 'docs/m', fragment 0",
        CallUdf(cloudpickle.dumps(((), {})), None, "pyarrow", 5, "one_to_one", 16, ("id",)),
        (HeldRows(0),),
        pa.schema({"id": pa.int64()}),
        "id",
        PartTarget(Location(str(tmp_path)), "key", "id"),
        keep=False,
        lease="lease",
    )

    _, report = host.run(work, pa.table({"id": range(10)}))

    assert report.cancelled
    assert not any(tmp_path.iterdir())


def test_cancelled_backfill_is_retried_where_it_was(dev, slowly):
    first, second = list(range(2000, 2010)), list(range(3000, 3400))
    dev.write("slow", "first", first)
    dev.write("slow", "second", second)
    backfill = dev.backfill(SLOW, ["first", "second"])
    dev.wait(lambda: dev.parts("slow/noted", "second") >= 4, "the second partition is under way")

    dev.cancel(backfill)

    state = dev.backfill_ended(backfill)
    assert state["status"] == "CANCELED"
    assert [run["status"] for run in state["runs"]] == ["CANCELED"]
    statuses = dev.asset("slow/kept", ["first", "second"])
    assert statuses["first"]["status"] == "MATERIALIZED"
    assert statuses["second"]["status"] == "MISSING"

    kept = dev.parts("slow/noted", "second")
    dev.slowly(False)
    state = dev.backfill_ended(dev.retry_failed(backfill))

    assert state["status"] == "COMPLETED_SUCCESS"
    assert state["partitionNames"] == ["second"]
    found = dev.asset("slow/noted", ["first", "second"])
    assert [what["events"] for what in found.values()] == [1, 1]
    assert found["second"]["metadata"]["fragments_reused"] == kept
    assert dev.rows("slow/noted", "second")["id"] == list(range(400))


@pytest.mark.parametrize(
    ("which", "names_pid"),
    [("step-killed", "STEP_WORKER_STARTED"), ("worker-killed", "ENGINE_EVENT")],
)
def test_killed_process_loses_what_was_in_flight_and_no_more(dev, slowly, which, names_pid):
    first = 4000 if which == "step-killed" else 5000
    values = list(range(first, first + 400))
    dev.write("slow", which, values)
    run = dev.launch(SLOW, which)
    dev.wait(lambda: dev.parts("slow/noted", which) >= 4, "four parts are written")
    step = psutil.Process(dev.pid(run, "STEP_WORKER_STARTED"))

    os.kill(dev.pid(run, names_pid), signal.SIGKILL)

    # The step of a killed run worker is a process of its own, which nobody listens to any more.
    assert dev.ended(run) == "FAILURE"
    dev.wait(lambda: _is_gone(step), "the step has ended", 30)
    kept = dev.parts("slow/noted", which)
    assert kept < 40

    dev.slowly(False)
    dev.succeeded(dev.launch(SLOW, which))

    metadata = dev.asset("slow/noted", [which])[which]["metadata"]
    assert metadata["fragments_reused"] >= kept
    assert metadata["fragments_reused"] + metadata["fragments_computed"] == 40
    assert metadata["model_loads"] == 0
    assert dev.rows("slow/noted", which)["id"] == list(range(400))
    assert dev.calls(values).total() <= 80 + IN_FLIGHT


def test_two_runs_of_one_partition_end_with_one_manifest_in_force(dev, slowly):
    dev.write("slow", "twice", list(range(6000, 6060)))
    runs = [dev.launch(SLOW, "twice") for _ in range(2)]
    for run in runs:
        dev.succeeded(run)

    for stage in SLOW:
        assert dev.rows(stage, "twice")["id"] == list(range(60))
        found = dev.asset(stage, ["twice"])["twice"]
        assert found["status"] == "MATERIALIZED"
        assert found["stale"] == "FRESH"
        assert found["events"] == 2


def test_retry_policy_goes_on_with_what_the_first_attempt_has_done(dev):
    """One partition was materialized then, and of the other all fragments but the last."""
    dev.write("retried", "a", list(range(100)))
    dev.write("retried", "b", list(range(100, 200)))

    state = dev.backfill_ended(dev.backfill(["retried/doubles"], ["a", "b"]))

    assert state["status"] == "COMPLETED_SUCCESS"
    (run,) = state["runs"]
    said = dev.said(run["runId"])
    assert "STEP_UP_FOR_RETRY" in said
    assert "OSError: the network was away" in said
    found = dev.asset("retried/doubles", ["a", "b"])
    assert [what["status"] for what in found.values()] == ["MATERIALIZED"] * 2
    assert [what["events"] for what in found.values()] == [1, 1]
    assert found["a"]["metadata"]["fragments_computed"] == 10
    assert found["b"]["metadata"]["fragments_reused"] > 0
    assert dev.rows("retried/doubles", "b")["double"] == [2 * n for n in range(100, 200)]


def test_pool_of_one_slot_makes_runs_take_turns(dev, slowly):
    dev.limit_pool("one_at_a_time", 1)
    for key in "ab":
        dev.write("turns", key, list(range(100)))
    for run in [dev.launch(TURNS, key) for key in "ab"]:
        dev.succeeded(run)

    spans = [dev.rows("turns/noted", key) for key in "ab"]
    (_, ended), (began, _) = sorted((min(s["began"]), max(s["ended"])) for s in spans)
    assert ended < began


def test_step_shows_its_pool_and_op_tags(dev):
    nodes = dev.ask(
        """query($keys: [AssetKeyInput!]!) {
             assetNodes(assetKeys: $keys) { assetKey { path } pools opTags { key value } } }""",
        keys=asset_keys(["turns/noted", "retried/doubles"]),
    )["assetNodes"]
    found = {node["assetKey"]["path"][0]: node for node in nodes}
    assert found["turns"]["pools"] == ["one_at_a_time"]
    assert {"key": "team", "value": "texts"} in found["retried"]["opTags"]


def test_backfill_outlives_the_daemon_and_computes_nothing_twice(dev, slowly):
    """The first of two runs is at work and the second queued when the daemon is killed."""
    dev.limit_pool("one_at_a_time", 1)
    first, second = list(range(7000, 7200)), list(range(8000, 8200))
    dev.write("turns", "c", first)
    dev.write("turns", "d", second)
    backfill = dev.backfill(TURNS, ["c", "d"])
    dev.wait(lambda: dev.calls(first + second).total() >= 4, "a run is at work")

    dev.kill_daemon()
    dev.slowly(False)
    dev.start()
    state = dev.backfill_ended(backfill)

    assert state["status"] == "COMPLETED_SUCCESS"
    assert [run["status"] for run in state["runs"]] == ["SUCCESS", "SUCCESS"]
    assert dev.calls(first + second) == Counter([*first[::5], *second[::5]])
    for stage in TURNS:
        found = dev.asset(stage, ["c", "d"])
        assert [what["events"] for what in found.values()] == [1, 1]
        assert [what["stale"] for what in found.values()] == ["FRESH"] * 2
        for key in "cd":
            assert dev.rows(stage, key)["id"] == list(range(200))


def test_schedule_has_run_its_partition(dev):
    """The schedule was turned on before the first test."""
    dev.wait(lambda: any(t["runIds"] for t in dev.ticks("every_minute")), "the schedule ticked")
    ticks = dev.ticks("every_minute")
    assert {tick["status"] for tick in ticks} <= {"SUCCESS", "SKIPPED"}
    (run,) = [run for tick in ticks for run in tick["runIds"]]
    dev.succeeded(run)
    found = dev.asset("days/kept", ["2026-01-10"])["2026-01-10"]
    assert found["status"] == "MATERIALIZED"
    assert found["events"] == 1
    assert dev.rows("days/kept", "2026-01-10")["double"] == [2, 4, 6]


def test_blocking_check_fails_what_lies_below_in_its_partition_alone(dev):
    for key, values in {"a": [1, 2, 3], "b": [1, 13, 3], "c": [4, 5]}.items():
        dev.write("judged", key, values)

    backfill = dev.backfill(JUDGED, ["a", "b", "c"])
    state = dev.backfill_ended(backfill)

    assert state["status"] == "COMPLETED_FAILED"
    (run,) = state["runs"]
    assert run["status"] == "FAILURE"
    assert "1 of 3 partitions failed ('b')" in dev.said(run["runId"])
    assert state["assets"] == {
        "judged/doubles": {"targeted": 3, "materialized": 3, "failed": 0},
        "judged/kept": {"targeted": 3, "materialized": 2, "failed": 1},
    }
    statuses = {key: what["status"] for key, what in dev.asset("judged/kept", list("abc")).items()}
    assert statuses == {"a": "MATERIALIZED", "b": "FAILED", "c": "MATERIALIZED"}
    assert dev.checks("judged/doubles") == {
        "ids_complete": dict.fromkeys("abc", "SUCCEEDED"),
        "error_rate": dict.fromkeys("abc", "SUCCEEDED"),
        "packages_unchanged": dict.fromkeys("abc", "SUCCEEDED"),
        "null_rate": {"a": "SUCCEEDED", "b": "FAILED", "c": "SUCCEEDED"},
    }
    below = {"a": "SUCCEEDED", "b": "FAILED", "c": "SUCCEEDED"}
    assert dev.checks("judged/kept") == {"ids_complete": below, "error_rate": below}
    (blocked,) = dev.evaluations("judged/kept", "ids_complete", "b")
    assert "blocking check 'null_rate'" in blocked["evaluation"]["description"]

    state = dev.backfill_ended(dev.retry_failed(backfill))

    assert state["assets"].keys() == {"judged/kept"}
    assert state["assets"]["judged/kept"] == {"targeted": 1, "materialized": 0, "failed": 1}
    events = {key: what["events"] for key, what in dev.asset("judged/kept", list("abc")).items()}
    assert (events["a"], events["c"]) == (1, 1)

    dev.write("judged", "b", [1, 2, 3])
    dev.succeeded(dev.launch(JUDGED, "b"))

    assert dev.checks("judged/doubles")["null_rate"] == dict.fromkeys("abc", "SUCCEEDED")
    assert dev.checks("judged/kept")["ids_complete"] == dict.fromkeys("abc", "SUCCEEDED")
    assert dev.rows("judged/kept", "b")["double"] == [2, 4, 6]


def test_checks_are_executed_alone_for_every_partition(dev):
    """The button of an asset's checks names no partition. The test before has materialized them."""
    before = dev.asset("judged/doubles", list("abc"))
    run = dev.execute_checks("judged/doubles", ["null_rate", "ids_complete"])
    dev.succeeded(run)

    for key in "abc":
        for name in ("null_rate", "ids_complete"):
            latest, *_ = dev.evaluations("judged/doubles", name, key)
            assert latest["runId"] == run
            assert latest["status"] == "SUCCEEDED"
        assert dev.evaluations("judged/doubles", "error_rate", key)[0]["runId"] != run
    assert dev.checks("judged/doubles")["null_rate"] == dict.fromkeys("abc", "SUCCEEDED")
    assert dev.asset("judged/doubles", list("abc")) == before


def _passed(dev: Project, stage: str, partitions: list[str]) -> dict[str, bool]:
    """For each check of an asset, whether it passed in these partitions."""
    return {
        name: all(found.get(key) == "SUCCEEDED" for key in partitions)
        for name, found in dev.checks(stage).items()
    }


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
