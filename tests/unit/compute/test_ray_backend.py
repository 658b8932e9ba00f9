"""What the driver concludes from Ray's errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vane_dagster.compute.api import Worker
from vane_dagster.compute.ray_backend import RayLease

UNAVAILABLE = ray.exceptions.ActorUnavailableError("Socket closed", None)
DIED = ray.exceptions.ActorDiedError()
NO_MEMORY = ray.exceptions.OutOfMemoryError("too much")


@pytest.mark.parametrize(
    ("error", "alive", "lost"),
    [
        (DIED, True, False),  # its node has said so
        (DIED, False, True),
        (UNAVAILABLE, True, True),  # nobody has, and Ray does not know yet that the node is dead
        (NO_MEMORY, True, False),
    ],
)
def test_a_worker_is_lost_with_its_node_unless_the_node_reports_its_death(
    error: Exception, alive: bool, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": "a", "Alive": alive}, {"NodeID": "b", "Alive": not alive}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    lease: Any = RayLease.__new__(RayLease)
    lease._nodes = {"w": "a"}
    lease._watch = SimpleNamespace(call=lambda function: function())
    assert lease._node_is_lost(Worker("w", "pool"), error) is lost
