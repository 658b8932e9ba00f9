"""When a head counts as lost, by a clock of the test's own."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray

from vane_dagster.compute import head_watch
from vane_dagster.compute.head_watch import HeadWatch
from vane_dagster.errors import ClusterLostError


def test_a_head_that_this_process_starts_does_not_take_over_the_time(monkeypatch):
    monkeypatch.delenv(head_watch.RECONNECT, raising=False)
    with head_watch.outliving_head():
        assert os.environ[head_watch.RECONNECT] == "3660"
    assert head_watch.RECONNECT not in os.environ


class Gcs:
    def __init__(self) -> None:
        self.up = True
        self.error: Exception = ConnectionError("no answer")

    def get_all_node_info(self, timeout):
        if not self.up:
            raise self.error
        return {}


def test_a_restart_in_time_goes_unnoticed():
    gcs, clock = Gcs(), [100.0]
    watch = HeadWatch(gcs, "node", 60.0, clock=lambda: clock[0])

    def passes(seconds: int, is_up: bool, times: int = 1) -> None:
        gcs.up = is_up
        for _ in range(times):
            clock[0] += seconds
            watch.look()
            watch.check()

    passes(1, False, times=55)
    passes(0, True)
    passes(1, False)
    clock[0] += 60
    watch.check()
    clock[0] += 1
    with pytest.raises(ClusterLostError, match="has not responded for 61 seconds"):
        watch.check()


def test_another_cluster_at_the_same_address_is_a_loss_at_once():
    gcs = Gcs()
    watch = HeadWatch(gcs, "node", 60.0)
    gcs.error = ray.exceptions.AuthenticationError("RPC error: WrongClusterID: Perhaps ...")
    gcs.up = False
    watch.look()
    with pytest.raises(
        ClusterLostError, match="has ended, and another cluster responds at its address"
    ):
        watch.check()


@pytest.mark.parametrize("is_current", [True, False])
def test_a_lost_cluster_is_disconnected_also_if_a_run_begins_with_it(is_current, monkeypatch):
    """Unless another run of the process has reconnected meanwhile."""
    gcs, shut = Gcs(), []
    gcs.up, gcs.error = False, ConnectionError("WrongClusterID")
    clients = iter([gcs, gcs if is_current else Gcs()])
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: False)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(1))
    monkeypatch.setattr(
        "ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: next(clients)
    )
    with pytest.raises(ClusterLostError, match="another cluster responds"):
        HeadWatch.started()
    assert shut == [1] * is_current


def test_a_driver_that_was_stopped_for_a_while_is_not_failed():
    clock = [100.0]
    watch = HeadWatch(Gcs(), "node", 60.0, clock=lambda: clock[0])
    clock[0] += 1000
    watch.check()
    watch.look()
    clock[0] += 5
    watch.check()
    watch.close()
    for _ in range(2):
        clock[0] += 1000
        watch.check()


def test_a_call_waits_until_the_head_answers():
    gcs = Gcs()
    watch = HeadWatch(gcs, "node", 60.0)
    gcs.up = False
    asked = iter([False, False, True])

    def get_all_node_info(timeout):
        if not next(asked):
            raise ConnectionError("no answer")
        return {}

    gcs.get_all_node_info = get_all_node_info
    assert watch.call(lambda: 5) == 5
    assert next(asked, None) is None
