"""The metadata of materializations."""

from __future__ import annotations

from dataclasses import asdict

from vane_dagster.events import ServerReplica
from vane_dagster.orchestration.metadata import servers_table


def test_only_the_first_of_many_replicas_are_shown():
    many = [ServerReplica("llm", f"http://n{i}:1", f"n{i}", "ready") for i in range(12)]
    shown = servers_table([asdict(one) for one in many])
    assert shown.count("http://") == 10
    assert shown.endswith("and 2 more replicas")
