"""Runs with known counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from support.data import write_source
from vane_dagster.engine.accounting import WaveProgress
from vane_dagster.events import StageStats
from vane_dagster.worker.reports import Tally

KEYS = [f"p{i}" for i in range(3)]
FILES, ROWS = 3, 8


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for p, key in enumerate(KEYS):
        for f in range(FILES):
            first = 1000 * p + 100 * f
            ids = range(first, first + ROWS)
            write_source(tmp_path / "src" / key, {"id": ids, "x": ids}, f"{f}.parquet")
    return tmp_path


# Time, with a fake clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def counts(clock: Clock, events: list) -> tuple[WaveProgress, dict]:
    """Counts of a stage over two partitions of one fragment of 100 source rows."""
    partition = SimpleNamespace(fragments=[SimpleNamespace(rows=100)])
    stats = {(0, "a"): StageStats(), (1, "a"): StageStats()}
    state = SimpleNamespace(
        pipeline={"a": SimpleNamespace(spec=SimpleNamespace(upstream=("source",)))},
        plan=SimpleNamespace(partitions=[partition, partition]),
        fragments_left=lambda stages: {0: [0], 1: [0]},
        parts={},
        stats=stats,
        emit=events.append,
    )
    return WaveProgress(state, ["a"], clock), stats


def fragment(partition: int) -> SimpleNamespace:
    spec = SimpleNamespace(name="a", upstream=("source",), usage=None)
    task_state = SimpleNamespace(spec=spec, given_rows=100, done=False, tally=Tally(), pieces={})
    return SimpleNamespace(
        partition=partition, index=0, place=(partition, 0),
        task_states={"a": task_state},
    )  # fmt: skip
