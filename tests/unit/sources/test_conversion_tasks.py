"""Where files are converted, and how many at a time."""

from __future__ import annotations

import os

import pytest

from vane_dagster.compute.local_backend import local_capacity
from vane_dagster.sources import conversion_tasks


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 6),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 6),
        (None, 6),
    ],
)
def test_a_container_has_the_cpus_of_its_quota_and_affinity(quota, cpus, tmp_path, monkeypatch):
    """A machine with 64 CPUs would otherwise start 64 workers in a container of two."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(conversion_tasks, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert conversion_tasks.usable_cpus() == cpus
    assert local_capacity().nodes[0]["CPU"] == cpus
    assert local_capacity(num_cpus=3).nodes[0]["CPU"] == 3
