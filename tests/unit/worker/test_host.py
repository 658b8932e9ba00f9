"""A worker that is stopped, the seconds of its calls, and models that are dead."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from support.udf_calls import IDS, call, row_stage, run_stage
from vane_dagster.compute.api import forwarded
from vane_dagster.errors import StageError
from vane_dagster.errors import __file__ as errors_file
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.providers.base import EndpointRefused
from vane_dagster.retries import Backoff
from vane_dagster.servers.launch import Endpoint
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.health import UnhealthyModelError
from vane_dagster.worker.host import Host
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.pools import ModelSpec, PoolSpec
from vane_dagster.worker.protocol import CallUdf, TableRows, Work
from vane_dagster.worker.retry import BatchError


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in ("stdout", "stderr"):  # which a host taps
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(OutputTap, "_instance", None)
    return Host()


WORK = Work(
    "stage 'docs/m', fragment 0",
    CallUdf(cloudpickle.dumps({}), None, BatchCall(), 5, "one_to_one", 16, ("id",), ()),
    (TableRows(0),),
    pa.schema({"id": pa.int64()}),
    "id",
    None,
    keep=False,
    lease="lease",
)
ROWS = pa.table({"id": range(10)})


def test_worker_that_is_told_to_stop_writes_no_part_of_half_its_batches(host, tmp_path):
    def told_to_stop(batch):
        host.revoke("lease")
        works_for.extend(map(host.works_for, ("lease", "other")))
        return batch

    works_for: list[bool] = []

    host.hold(ModelSpec("told_to_stop", False, b""), told_to_stop)
    target = PartTarget(StoragePath(str(tmp_path)), "key", "id")

    _, report = host.run(replace(WORK, target=target), ROWS)

    assert report.cancelled
    assert not any(tmp_path.iterdir())
    assert works_for == [True, False]
    assert not host.works_for("lease")


@pytest.mark.parametrize(("bad", "all_failed"), [(0, True), (5, False)])
def test_a_task_with_rows_before_its_error_is_no_sign_of_a_dead_model(host, bad, all_failed):
    def refuse(batch):
        if bad in batch["id"].to_pylist():
            raise ValueError("refused")
        return batch

    host.hold(ModelSpec("refuse", False, b""), refuse)
    _, report = host.run(WORK, ROWS)
    assert "refused" in report.fault.message
    assert report.all_rows_failed == all_failed


def refusing(error: type[StageError], owner: str) -> Any:
    """A function that raises in this file, or in one of the package."""
    code = compile("def refuse(batch):\n    raise error('wrong key')", owner, "exec")
    exec(code, names := {"error": error})
    return names["refuse"]


@pytest.mark.parametrize("error", [StageError, EndpointRefused])
def test_the_error_of_a_stage_has_no_ids_and_no_frames_of_the_package(host, error):
    host.hold(ModelSpec("refuse", False, b""), refusing(error, errors_file))
    _, report = host.run(WORK, ROWS)
    assert str(report.fault.error()) == "stage 'docs/m', fragment 0: wrong key"
    assert report.fault.of_stage == (error is EndpointRefused)
    assert report.fault.error().is_permanent

    host.hold(ModelSpec("refuse", False, b""), refusing(error, "theirs.py"))
    _, report = host.run(WORK, ROWS)
    assert str(report.fault.error()).startswith("stage 'docs/m', fragment 0: wrong key\n\nTrace")
    assert report.fault.traceback.count("File") == report.fault.traceback.count("theirs.py") == 1


def test_a_model_whose_server_is_gone_when_it_is_constructed_is_tried_again(monkeypatch):
    """Its error is that of the server, so a fresh worker takes its place once one answers."""
    host, gone = Host(), Endpoint("http://127.0.0.1:9")

    def construct(*given: Any) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(host, "_construct", construct)
    call = LoadCall(ModelSpec("Client", True, b""), endpoints={"llm": [gone]})
    report = host.load(call)
    assert "connection refused" in report.unhealthy_reason
    report = host.load(replace(call, endpoints={}))
    assert not report.unhealthy_reason
    assert "connection refused" in report.fault.message


def test_a_worker_knows_the_leases_that_used_it_and_were_not_revoked():
    host = Host()
    for lease in ("one", "two"):
        host.load(LoadCall(None, lease=lease))
    host.revoke("one")
    assert host.leases == {"two"}


def test_a_variable_that_the_driver_lacks_and_that_counts_is_unset_in_the_worker(monkeypatch):
    monkeypatch.setenv("VT_ONE", "the value of the head")
    monkeypatch.setenv("VT_TWO", "2")
    pool = PoolSpec("p", "p", (1, 1), env_vars=("VT_ONE", "VT_TWO"), unset_vars=("VT_ONE",))
    monkeypatch.delenv("VT_ONE")
    sent = forwarded(pool)
    monkeypatch.setenv("VT_ONE", "the value of the head")

    Host().load(LoadCall(None, env=sent))

    assert "VT_ONE" not in os.environ
    assert os.environ["VT_TWO"] == "2"


def test_a_worker_says_what_it_waits_to_repeat(host, monkeypatch):
    monkeypatch.setattr("vane_dagster.retries.CALLS", Backoff(60.0, 60.0))
    asked = threading.Event()

    def overloaded(batch):
        threading.Timer(0.05, asked.set).start()
        raise ConnectionError("503, overloaded")

    host.hold(ModelSpec("overloaded", False, b""), overloaded)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(host.run, WORK, ROWS)
        assert asked.wait(10)
        expected = (
            "5 rows are being retried after errors, the last: ConnectionError: 503, overloaded"
        )
        assert host.status().waits == expected
        host.revoke("lease")
        assert running.result(10)[1].cancelled
    assert host.status().waits == ""


def test_a_worker_names_the_row_that_it_waits_for(host, monkeypatch):
    monkeypatch.setattr("vane_dagster.worker.open_calls._LONG_SECONDS", 0.0)
    waits, end = threading.Event(), threading.Event()

    def slow(batch):
        waits.set()
        end.wait(10)
        return batch

    host.hold(ModelSpec("slow", False, b""), slow)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(host.run, WORK, ROWS)
        assert waits.wait(10)
        assert host.status().waits.startswith("the call for the 5 rows from 0 has run for")
        end.set()
        running.result(10)
    assert host.status().waits == ""


class EngineDeadError(RuntimeError):
    """As of vLLM."""


def dead(n: Any) -> Any:
    raise EngineDeadError("the engine is dead")


async def dead_later(n: Any) -> Any:
    raise EngineDeadError("the engine is dead")


@pytest.mark.parametrize("fn", [dead, dead_later])
def test_an_error_that_means_a_dead_model_is_no_error_of_its_rows(fn):
    with pytest.raises(UnhealthyModelError, match="the engine is dead") as raised:
        call(fn, {"y": "BIGINT"})
    assert raised.value.rows
    assert not isinstance(raised.value.__context__, BatchError), "a fault of the task"
    with pytest.raises(UnhealthyModelError, match="the engine is dead"):
        run_stage(row_stage("map", fn, schema={"y": "BIGINT"}, on_error="quarantine"), IDS)


class Broken:
    """A model that an error has broken, as its own check says."""

    def __init__(self) -> None:
        self.is_broken = False

    def check_health(self) -> None:
        if self.is_broken:
            raise ConnectionError("no answer")


class BrokenBatch(Broken):
    def __call__(self, batch: Any) -> Any:
        self.is_broken = True
        raise ValueError("wrong")


class BrokenLater(Broken):
    async def __call__(self, batch: Any) -> Any:
        self.is_broken = True
        raise ValueError("wrong")


class CheckedLater(BrokenLater):
    async def check_health(self) -> None:  # type: ignore[override]  # as a model may have it
        super().check_health()


@pytest.mark.parametrize("model", [BrokenBatch, BrokenLater, CheckedLater])
def test_a_model_is_asked_after_an_error(model):
    with pytest.raises(UnhealthyModelError, match="no answer") as raised:
        call(model, {"y": "BIGINT"})
    assert raised.value.rows
