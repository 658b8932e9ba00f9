"""Servers in actors on Ray: their address, their log, and their end with the actor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.paths import TESTS
from support.server_processes import FAST, answer, is_free, launch, left, port, until


@pytest.fixture
def actor(cluster):
    """An actor that holds a server, and what it says of it."""
    cluster.connect()
    import ray

    @ray.remote(num_cpus=0)
    class Holder:
        def __init__(self, launch, limits, path):
            sys.path.insert(0, path)
            from vane_dagster.servers.process import ServerProcess

            self._server = ServerProcess(launch, limits=limits)

        def state(self):
            from support.server_processes import guarded

            return self._server.status(), ray.util.get_node_ip_address(), guarded(os.getpid())

        def exit(self):
            ray.actor.exit_actor()

    holder = Holder.remote(launch("--leak-children", 2), FAST, str(TESTS))
    yield holder
    ray.kill(holder)
    ray.shutdown()


def state(actor):
    import ray

    status, address, pids = ray.get(actor.state.remote())
    assert len(pids) == 4
    return status, address, pids


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_it_is_bound_to_the_nodes_address_and_nothing_is_left_of_it_after_the_actor(actor, how):
    """Its log is beside those of Ray."""
    import ray

    status, address, pids = state(actor)
    assert status.endpoint.url == f"http://{address}:{port(status.endpoint)}"
    assert answer(status.endpoint, "a") == "echo: a"
    log = Path(status.log_path)
    session = Path(ray._private.worker._global_node.get_session_dir_path()).resolve()
    assert log.parent.resolve() == session / "logs"
    assert log.name.startswith("vane-server-echo-")
    assert log.exists()
    if how == "killed":
        ray.kill(actor)
    else:
        actor.exit.remote()
    until(lambda: not left(pids))
    assert is_free(port(status.endpoint), address)
