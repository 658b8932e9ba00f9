"""Metrics and spans of runs, as OpenTelemetry's SDK receives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import vane_dagster as vd
from support.data import partitioned
from support.in_process import InProcessCompute
from support.paths import REPOSITORY
from vane_dagster.events import (
    CallEnded,
    CallStarted,
    Event,
    LeaseChanged,
    PoolTime,
    Progress,
    WorkerReplaced,
)
from vane_dagster.orchestration import telemetry
from vane_dagster.orchestration.telemetry import RunTelemetry
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.worker.reports import Fault, GpuUse, Tally, WorkReport

READER, SPANS = InMemoryMetricReader(), InMemorySpanExporter()


@pytest.fixture(scope="session", autouse=True)
def _sdk() -> None:
    """The process has one provider, which cannot be replaced."""
    metrics.set_meter_provider(MeterProvider([READER]))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)


@pytest.fixture(autouse=True)
def _forget() -> None:
    SPANS.clear()


def recorded(pipeline: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and attributes, without the pipeline's."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    data = READER.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            given = dict(point.attributes or {})
            if given.pop("vane_dagster.pipeline") == pipeline:
                name = metric.name.removeprefix("vane_dagster.")
                key = tuple(str(value) for _, value in sorted(given.items()))
                found.setdefault(name, {})[key] = point.value
    return found


def parents() -> Iterator[tuple[str, str]]:
    spans = {span.context.span_id: span for span in SPANS.get_finished_spans()}
    for span in spans.values():
        yield span.name, spans[span.parent.span_id].name if span.parent else ""


def failed() -> dict[str, ReadableSpan]:
    return {span.name: span for span in SPANS.get_finished_spans() if not span.status.is_ok}


class Half:
    def __call__(self, batch: Any) -> Any:
        if 13 in batch["n"].to_pylist():
            raise ValueError("thirteen")
        return {"half": [n / 2 for n in batch["n"].to_pylist()]}


def numbers(name: str, last: int) -> vd.Pipeline:
    rows = [{"id": n, "n": n, "part": "ab"[n % 2]} for n in range(1, last + 1)]
    made = partitioned(vd.table(rows, partition_column="part"), ["a", "b"], name)
    clean = made.project("clean", ["id", "n"], where="n > 2")
    clean.map_batches("halved", Half, schema={"half": "DOUBLE"})
    return made


def test_a_run_has_metrics_and_spans(tmp_path):
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    numbers("whole", 12).run(**given)
    found = recorded("whole")

    assert found["rows"] == {
        ("computed", "clean"): 10,
        ("filtered", "clean"): 2,
        ("computed", "halved"): 10,
    }
    assert found["partitions"] == {("committed", "clean"): 2, ("committed", "halved"): 2}
    assert found["loads"] == {("Half", "halved", "False"): 1}
    assert found["load.time"].keys() == {("Half", "halved")}
    assert found["leases"] == {("Half",): 0}
    assert {stage for stage, _ in found["call.time"]} == {"clean", "halved"}
    assert set(parents()) == {
        ("run whole", ""),
        *((f"partition {stage}", "run whole") for stage in ("clean", "halved")),
        *((f"call {stage}", f"partition {stage}") for stage in ("clean", "halved")),
    }
    names = [name for name, _ in parents()]
    assert names.count("partition halved") == 2
    assert not failed()

    numbers("whole", 12).run(**given)
    assert recorded("whole")["partitions"][("unchanged", "halved")] == 2


def test_what_workers_report_is_counted():
    """Tokens, cost, GPUs, restarts and queues, which a run in this process does not have."""
    prompts = vd.Pipeline("prompts", source=vd.table([{"id": 1, "t": "a"}]), id="id")
    model = vd.Model("m", prices={"prompt": 1.0, "completion": 2.0})
    prompts.prompt("asked", "{t}", provider="openai", model=model)
    sums = {"asked_usage": {"prompt_tokens": 4e6, "completion_tokens": 1e6}}
    part = PartInfo("key", "digest", 2, 1, copied=3, measures=sums)
    tally, gpus = Tally(rows_in=3, quarantined=1), GpuUse(2.0, 1.5, 10)
    answer = WorkReport(tally, seconds=2.0, gpus=gpus, part=part)
    pool = PoolTime(("asked",), computing=2.0, input=1.0)
    events: list[Event] = [
        LeaseChanged(("m",), is_held=True),
        CallStarted(1, "asked", None, 0, "whole", "w-1", 100),
        CallStarted(2, "asked", None, 1, "whole", "w-2", 101),
        CallEnded(1, answer, "", 102),
        CallEnded(2, None, "its node was lost", 103),
        WorkerReplaced("worker w-2 was lost", stages=("asked",)),
        Progress({}, {}, 1.0, (pool,)),
        Progress({}, {}, 2.0, (replace(pool, computing=5.0),), {"asked": 7}),
    ]
    passed_on: list[Event] = []
    recorder = RunTelemetry(prompts, "run-1", passed_on.append)
    for event in events:
        recorder.listen(event)

    found = recorded("prompts")
    assert passed_on == events
    rows = {("computed", "asked"): 2, ("quarantined", "asked"): 1, ("copied", "asked"): 3}
    assert found["rows"] == rows
    assert found["tokens"] == {("input", "asked"): 4e6, ("output", "asked"): 1e6}
    assert found["cost"] == {("asked",): 6.0}
    assert found["gpu.utilization"] == {("asked", "w-1"): 0.75}
    assert found["gpu.memory"] == {("asked", "w-1"): 10}
    times = {"computing": 5.0, "input": 1.0, "loading": 0.0, "room": 0.0}
    assert found["worker.time"] == {("asked", state): time for state, time in times.items()}
    assert found["restarts"] == {("lost", "asked"): 1}
    assert (found["queue.length"], found["leases"]) == ({("asked",): 7}, {("m",): 1})

    recorder.__exit__(None, None, None)  # interrupted: what is open ends
    (lost,) = failed().values()
    assert (lost.name, lost.status.description) == ("call asked", "its node was lost")
    assert (lost.start_time, lost.end_time) == (101, 103)
    assert lost.attributes["vane_dagster.fragment"] == 1
    assert [name for name, _ in parents()].count("call asked") == 2


def test_an_error_of_a_worker_is_masked_and_has_no_traceback():
    pipeline = vd.Pipeline("masked", source=vd.table([{"id": 1}]), id="id")
    pipeline.project("same", ["id"])
    recorder = RunTelemetry(pipeline, "run-1", lambda event: None)
    recorder.listen(CallStarted(1, "same", "a", 0, "whole", "w", 1))
    fault = Fault("ComputeError", "s3://key:hidden-secret@bucket failed\nrow 17", "Traceback")
    recorder.listen(CallEnded(1, WorkReport(fault=fault), "", 2))
    recorder.__exit__(None, None, None)
    assert failed()["call same"].status.description == "s3://***@bucket failed"


@pytest.mark.parametrize("works", [0, 1])
def test_an_sdk_that_raises_fails_no_run(monkeypatch, works):
    spans = itertools.repeat(trace.get_tracer("").start_span("run"), works)
    raising = SimpleNamespace(start_span=lambda *args, **options: next(spans))
    monkeypatch.setattr(telemetry, "_tracer", raising)
    pipeline = vd.Pipeline("raises", source=vd.table([{"id": 1}]), id="id")
    events = [CallStarted(1, "a", None, 0, "whole", "w", 1), CallEnded(1, None, "lost", 2)]
    heard: list[Any] = []
    with RunTelemetry(pipeline, "run-1", heard.append) as recorder:
        for event in events:
            recorder.listen(event)
    assert "no more telemetry, because recording it raised StopIteration" in heard.pop(0).text
    assert heard == events


def test_the_page_and_the_dashboard_have_every_metric():
    made = {
        kind: each for kind, each in vars(telemetry).items() if hasattr(each, "_real_instrument")
    }
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    dashboard = (REPOSITORY / "docs" / "grafana" / "vane-dagster.json").read_text()
    assert len(made) == 13
    for instrument in made.values():
        name = instrument._name.removeprefix("vane_dagster.")
        assert f"| `{name}` |" in page
        assert instrument._name.replace(".", "_") in dashboard
