"""Where the time of a step went, from its events alone."""

from __future__ import annotations

from support.counted_runs import Clock
from vane_dagster.events import Connected, Progress, WaveStarted, WorkerReady
from vane_dagster.orchestration.timeline import Timeline
from vane_dagster.worker.reports import LoadReport


def test_each_phase_ends_with_its_event() -> None:
    clock = Clock()
    clock.now = 100.0
    timeline = Timeline(clock)
    wave, progress = WaveStarted(1, 1, ("a",), ()), Progress({"a": 1}, {"a": 1}, 0.0)
    load = LoadReport(warm=False, seconds=3.0, pid=1, device="cpu", node="n")
    ready = WorkerReady(("a",), "Model", "w", load)
    events = [Connected(), wave, ready, ready, progress]
    for clock.now, event in zip([101.0, 102.0, 109.0, 110.0, 114.0], events):
        timeline.take(event)
    clock.now = 115.0

    lines = list(timeline._lines({**timeline._marks, "RUN_START": 95.0}))
    assert [line.split(maxsplit=3) for line in lines[1:-1]] == [
        ["0.00", "5.00", "25%", "import of the code of a step"],
        ["5.00", "1.00", "5%", "connection, or start of the local head"],
        ["6.00", "1.00", "5%", "preflight validation"],
        ["7.00", "4.00", "20%", "lease, start of the workers"],
        ["11.00", "3.00", "15%", "load of the model"],
        ["14.00", "5.00", "25%", "read, compute, write"],
        ["19.00", "1.00", "5%", "events in Dagster"],
    ]
    assert lines[-1] == "    20.00  until here"
