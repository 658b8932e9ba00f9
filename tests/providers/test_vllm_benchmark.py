"""The benchmarks of prompts and of servers, against bare loops."""

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


def test_a_server_is_measured_against_a_bare_client() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    command = [sys.executable, "-m", "benchmarks.servers", "--rows", "40", "--runs", "2"]
    command += ["--only", "ours", "--only", "bare"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert found["ours"]["server starts"] == 1
    assert found["bare"]["server starts"] == 0
    (ratio,) = found["ours against the bare client"]
    assert ratio > 0
