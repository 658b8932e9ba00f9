"""What preflight refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vane_dagster.compute import versions
from vane_dagster.engine.preflight import PreflightFinding, refuse
from vane_dagster.errors import PreflightError


def test_one_finding_stands_alone():
    with pytest.raises(PreflightError) as caught:
        refuse([PreflightFinding("a", "b", "c"), PreflightFinding("a", "b", "c")])
    assert str(caught.value) == "a: b. c"
    assert caught.value.findings == ("a: b. c",)
    refuse([])


# Versions


@pytest.mark.parametrize("name", ["python", "ray", "pyarrow", "code"])
def test_versions_that_differ_are_named(name):
    here = versions.installed()
    assert list(versions.disagreements({"n": here})) == []
    other = replace(here, **{name: "0.1"})
    ((node, problem, fix),) = versions.disagreements({"good": here, "bad": other})
    assert node == "node bad"
    driver, worker = problem.split("; ")
    assert getattr(here, name) in driver
    assert worker.endswith(" 0.1")
    assert "driver's versions" in fix


def test_a_node_that_cannot_run_a_worker_is_named():
    ((node, problem, _),) = versions.disagreements({"n": "No module named 'vane_dagster'"})
    assert (node, "No module named 'vane_dagster'" in problem) == ("node n", True)
