"""Definitions of checks in other processes: equal, and found without heavy imports."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import vane_dagster as vd

MANY = """
import vane_dagster as vd
c = vd.checks
checks = [c.IdsComplete(), c.ErrorRate(), c.NullRate(0.2, ["a"]), c.NullRate(0.1),
    c.NullRate(0.1, blocking=True), c.Vectors(dimension=3), c.Vectors(), c.Text(), c.Drift("a"),
    c.Drift("a", bins=5), c.Golden({"id": [1], "x": ["a"]}), c.Golden({"id": [1], "x": ["b"]}),
    c.Golden({"id": [1], "x": ["a"]}, tolerance=0.1)]
"""


def test_definitions_are_the_same_in_every_process_and_differ_by_threshold():
    scope: dict[str, Any] = {}
    exec(MANY, scope)
    here = [check.definition for check in scope["checks"]]
    assert len(set(here)) == len(here)
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", MANY + "print(*[check.definition for check in checks])"],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        )
        assert found.stdout.split() == here
    assert [pickle.loads(pickle.dumps(check)).definition for check in scope["checks"]] == here
    assert vd.checks.NullRate(1).definition == vd.checks.NullRate(1.0).definition


def test_checks_are_found_without_heavy_imports():
    code = (
        "import vane_dagster as vd, sys\n"
        "vd.checks.NullRate(), vd.checks.Golden\n"
        "import vane_dagster.engine.check_runner\n"
        "print([m for m in ('ray', 'torch', 'pandas', 'dagster') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
