"""The benchmark of prompts, against a bare loop of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import REPOSITORY


def test_prompts_are_measured_against_a_bare_loop_of_vllm() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    command = [sys.executable, "-m", "benchmarks.llm", "--quick", "--only", "loop"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["loop"]
    assert all(rate > 0 for rates in found["rows_per_second"].values() for rate in rates)
    assert len(found["ratios"]) == 1
