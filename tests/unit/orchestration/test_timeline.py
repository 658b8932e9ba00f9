"""Where the time of a step went, from its events alone."""

from __future__ import annotations

import pytest

from support.counted_runs import Clock
from vane_dagster.events import Connected, Progress, WaveStarted, WorkerReady
from vane_dagster.orchestration.timeline import PROFILE, Timeline
from vane_dagster.worker.reports import LoadReport


@pytest.mark.parametrize(
    ("value", "command"),
    [(None, "off"), ("", "off"), ("true", None), ("1", 1.0), ("90.5", 90.5)],
)
def test_the_environment_asks_for_a_timeline(value, command, monkeypatch) -> None:
    monkeypatch.delenv(PROFILE, raising=False)
    if value is not None:
        monkeypatch.setenv(PROFILE, value)
    requested = Timeline.requested()
    assert (requested._command if requested else "off") == command


@pytest.mark.parametrize("command", [None, 1.0, 1e9, float("nan")])
def test_without_the_time_of_the_command_the_first_event_begins_the_timeline(command) -> None:
    lines = list(Timeline(command, lambda: 1e5 + 2)._lines({"step": 1e5}))
    assert lines[1].split(maxsplit=3) == ["0.00", "2.00", "100%", "events in Dagster"]


def test_each_phase_ends_with_its_event() -> None:
    clock = Clock()
    clock.now = 100.0
    timeline = Timeline(90.0, clock)
    wave, progress = WaveStarted(1, 1, ("a",), ()), Progress({"a": 1}, {"a": 1}, 0.0)
    load = LoadReport(warm=False, seconds=3.0, pid=1, device="cpu", node="n")
    ready = WorkerReady(("a",), "Model", "w", load)
    events = [Connected(), wave, ready, ready, progress]
    for clock.now, event in zip([101.0, 102.0, 109.0, 110.0, 114.0], events):
        timeline.take(event)
    clock.now = 115.0

    lines = list(timeline._lines({**timeline._marks, "RUN_START": 95.0}))
    assert [line.split(maxsplit=3) for line in lines[1:-1]] == [
        ["0.00", "5.00", "20%", "start of Python, import of Dagster and the definitions"],
        ["5.00", "5.00", "20%", "import of the code of a step"],
        ["10.00", "1.00", "4%", "connection, or start of the local head"],
        ["11.00", "1.00", "4%", "preflight validation"],
        ["12.00", "4.00", "16%", "lease, start of the workers"],
        ["16.00", "3.00", "12%", "load of the model"],
        ["19.00", "5.00", "20%", "read, compute, write"],
        ["24.00", "1.00", "4%", "events in Dagster"],
    ]
    assert lines[-1] == "    25.00  until here"
