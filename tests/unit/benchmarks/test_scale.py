"""The simulation of many workers runs on the present driver."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import scale


def test_simulated_workers_are_busy(tmp_path: Path) -> None:
    scale._write_source(tmp_path, 2, 1, 4)
    found = scale._workers(tmp_path, Namespace(workers=4))
    assert 0 < found["steady"] <= 1
