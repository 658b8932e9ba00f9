"""What a container may use of its machine."""

from __future__ import annotations

import os

import pytest

from vane_dagster import _container
from vane_dagster.compute.local_backend import local_capacity


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch):
    """A machine with 64 CPUs and much memory, 6 CPUs of which are this process's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.get)
    monkeypatch.setattr(_container, "_CGROUP", str(tmp_path))


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
def test_cpus_are_those_of_the_affinity_and_the_quota(quota, cpus, tmp_path):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert local_capacity().nodes[0]["CPU"] == cpus
    assert local_capacity(num_cpus=3).nodes[0]["CPU"] == 3


@pytest.mark.parametrize(
    ("limit", "memory"), [("max", 4 << 30), (str(1 << 30), 1 << 30), (None, 4 << 30)]
)
def test_memory_is_limited(limit, memory, tmp_path):
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert local_capacity().nodes[0]["memory"] == memory
