"""What both versions of Ray's autoscaler report, and what follows from it, with a fake GCS."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from ray._private import ray_constants
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from support.pool_claims import ask, claim
from vane_dagster.compute import autoscaler
from vane_dagster.compute.autoscaler import Autoscaler, ClusterScaler
from vane_dagster.compute.demand import ScaleVerdict
from vane_dagster.compute.placement import Bundle
from vane_dagster.compute.pool_state import PoolState

UNSEEN, SERVED, INFEASIBLE = ScaleVerdict.UNSEEN, ScaleVerdict.SERVED, ScaleVerdict.INFEASIBLE
_POSTED_KEY = ray_constants.AUTOSCALER_RESOURCE_REQUEST_CHANNEL
_REPORT_KEY = ray_constants.DEBUG_AUTOSCALING_STATUS.encode()
TPU = {"TPU": 1.0}
BARE, GROWN = [{"CPU": 1.0}], [{"CPU": 1.0}, {"CPU": 1.0, "TPU": 1.0}]


class Gcs:
    """The key-value store and the state that an autoscaler of either version reports."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.status = GetClusterStatusReply()

    def internal_kv_get(self, key: bytes, namespace: bytes | None, timeout: float) -> bytes | None:
        return self.stored.get(key)

    def internal_kv_put(
        self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float
    ) -> None:
        self.stored[key] = value

    def get_cluster_status(self, timeout_s: float) -> bytes:
        return self.status.SerializeToString()

    def post(self, bundles: Sequence[Bundle]) -> None:
        """Ray's `request_resources`, which tells both versions."""
        self.stored[_POSTED_KEY] = json.dumps(bundles).encode()
        state = self.status.cluster_resource_state
        state.cluster_resource_state_version += 1
        del state.cluster_resource_constraints[:]
        if bundles:
            _constrain(state.cluster_resource_constraints.add(), bundles)

    def posted(self) -> list[Bundle]:
        return json.loads(self.stored.get(_POSTED_KEY, b"[]"))

    def report(self, asked: Sequence[Bundle] = (), at: float | None = None, **of: Any) -> None:
        """What the first version reports, of a request that it has looked at."""
        empty = {"active_nodes": {}, "pending_launches": {}, "pending_nodes": []}
        load = {"request_demand": [[bundle, 1] for bundle in asked]}
        found = {
            "time": time.time() if at is None else at,
            "load_metrics_report": load,
            "autoscaler_report": {**empty, "pending_resources": {}, **of},
        }
        self.stored[_REPORT_KEY] = json.dumps(found).encode()

    def looked(self, infeasible: Sequence[Bundle] = ()) -> None:
        """The second version has looked at what is posted."""
        state = self.status.autoscaling_state
        now = self.status.cluster_resource_state.cluster_resource_state_version
        state.last_seen_cluster_resource_state_version = now + 1
        del state.infeasible_cluster_resource_constraints[:]
        if infeasible:
            _constrain(state.infeasible_cluster_resource_constraints.add(), infeasible)


def _constrain(constraint: Any, bundles: Sequence[Bundle]) -> None:
    for bundle in bundles:
        request = constraint.resource_requests.add(count=1)
        request.request.resources_bundle.update(bundle)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Gcs:
    made = Gcs()
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: made)
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", made.post)
    return made


@pytest.fixture(params=[autoscaler._First, autoscaler._Second])
def either(request: pytest.FixtureRequest, gcs: Gcs) -> Autoscaler:
    return request.param()


# Requests


def test_a_request_is_posted_once_and_withdrawn(either: Autoscaler, gcs: Gcs):
    either.ask([])
    assert gcs.stored == {}, "who asks for nothing leaves no trace"
    either.ask([TPU, TPU])
    version = gcs.status.cluster_resource_state.cluster_resource_state_version
    either.ask([TPU, TPU])
    assert gcs.status.cluster_resource_state.cluster_resource_state_version == version
    assert gcs.posted() == either.asked == [TPU, TPU]
    either.ask([])
    assert gcs.posted() == either.asked == []


def test_a_request_that_another_program_overwrote_is_repeated_but_not_withdrawn(
    either: Autoscaler, gcs: Gcs
):
    either.ask([TPU])
    gcs.post([{"GPU": 8}])
    either.ask([TPU])
    assert gcs.posted() == [TPU]
    gcs.post([{"GPU": 8}])
    either.ask([])
    assert gcs.posted() == [{"GPU": 8}]


def test_what_a_former_pool_manager_asked_for_is_withdrawn(either: Autoscaler, gcs: Gcs):
    either.ask([TPU])
    heir = type(either)()
    assert heir.asked == [TPU]
    heir.ask([])
    assert gcs.posted() == []


# Verdicts of the first version, which never says that it cannot


def test_the_first_version_is_there_while_it_reports_nodes_of_its_own(gcs: Gcs):
    first = autoscaler._First()
    assert not first._is_there()
    gcs.report(active_nodes={"accelerated": 1})
    assert first._is_there()
    gcs.report(active_nodes={"node_" + "a" * 56: 1})
    assert not first._is_there(), "it mirrors nodes that were started by hand"
    gcs.report(active_nodes={"accelerated": 1}, at=time.time() - 1000)
    assert not first._is_there(), "it is silent"


def test_the_first_version_serves_what_it_starts_nodes_for(gcs: Gcs):
    first = autoscaler._First()
    first.ask([TPU])
    gcs.report()
    assert first.verdict(BARE) is UNSEEN
    gcs.report([TPU], pending_launches={"accelerated": 1}, pending_resources={"TPU": 1})
    assert first.verdict(BARE) is SERVED
    assert first.under_way() == "nodes that start: 1 x accelerated"
    gcs.report([TPU])
    assert first.verdict(GROWN) is SERVED
    assert first.under_way() == ""


def test_the_first_version_has_refused_after_three_reports_without_a_node(gcs: Gcs):
    first = autoscaler._First()
    first.ask([TPU])
    for at, verdict in ((1.0, UNSEEN), (1.0, UNSEEN), (2.0, UNSEEN), (3.0, INFEASIBLE)):
        gcs.report([TPU], at=at)
        assert first.verdict(BARE) is verdict
    first.ask([TPU, TPU])
    gcs.report([TPU, TPU], at=4.0)
    assert first.verdict(BARE) is UNSEEN, "another request is judged anew"


def test_a_node_that_failed_to_start_is_no_refusal(gcs: Gcs):
    first = autoscaler._First()
    first.ask([TPU])
    fault = {
        "is_available": False,
        "unavailable_node_information": {"description": "no capacity"},
        "last_checked_timestamp": time.time(),
    }
    summary = {"node_availabilities": {"accelerated": fault}}
    for at in range(5):
        gcs.report([TPU], at=at, node_availability_summary=summary)
        assert first.verdict(BARE) is SERVED
    assert first.under_way() == "a node accelerated could not be started: no capacity"


# Verdicts of the second version


def test_the_second_version_says_what_it_cannot_add(gcs: Gcs):
    second = autoscaler._Second()
    assert not second._is_there()
    second.ask([TPU])
    assert second.verdict(BARE) is UNSEEN
    gcs.looked()
    assert second._is_there()
    assert second.verdict(BARE) is SERVED
    gcs.looked([TPU])
    assert second.verdict(BARE) is INFEASIBLE
    gcs.looked([TPU, TPU])
    assert second.verdict(BARE) is SERVED, "that was another program's request"


def test_the_second_version_names_nodes_that_start_and_that_failed_to(gcs: Gcs):
    second = autoscaler._Second()
    state = gcs.status.autoscaling_state
    state.pending_instance_requests.add(ray_node_type_name="accelerated", count=2)
    state.pending_instances.add(ray_node_type_name="accelerated")
    state.failed_instance_requests.add(
        ray_node_type_name="spot", reason="no capacity", failed_ts=int(time.time())
    )
    state.failed_instance_requests.add(ray_node_type_name="old", reason="long ago", failed_ts=1)
    assert second.under_way() == (
        "nodes that start: 3 x accelerated; a node spot could not be started: no capacity"
    )


# The pool manager's requests


class Scaler(Autoscaler):
    """An autoscaler with given verdicts."""

    def __init__(self, *verdicts: ScaleVerdict, growth: Any = None) -> None:
        self.verdicts, self.asked, self._growth = list(verdicts), [], growth
        self.log: list[Sequence[Bundle]] = []

    def growth(self) -> Any:
        return self._growth

    def ask(self, bundles: Sequence[Bundle]) -> None:
        if list(bundles) != self.asked:
            self.log.append(list(bundles))
        self.asked = list(bundles)

    def verdict(self, nodes: Sequence[Bundle]) -> ScaleVerdict:
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]

    def under_way(self) -> str:
        return "nodes that start: 1 x accelerated"

    def _is_there(self) -> bool:
        return True

    def _posted(self) -> Any:
        return {}


def scaler(pool_state: PoolState, monkeypatch: pytest.MonkeyPatch, fake: Scaler) -> ClusterScaler:
    monkeypatch.setattr(autoscaler, "of_cluster", lambda: fake)
    monkeypatch.setattr(autoscaler, "_LOOK_SECONDS", 0)
    return ClusterScaler(pool_state)


NODES = {"head": {"CPU": 1.0}}


def test_what_fits_asks_for_nothing(monkeypatch: pytest.MonkeyPatch):
    pool_state, fake = PoolState(), Scaler(INFEASIBLE)
    scaling = scaler(pool_state, monkeypatch, fake)
    assert ask(pool_state, "1", claim("a", CPU=1), nodes=NODES) is not None
    scaling.step(NODES)
    assert asyncio.run(scaling.infeasible_reason([{"CPU": 1.0}], lambda: NODES)) is None
    assert fake.log == []


def test_a_lease_that_waits_is_asked_for_until_it_is_gone(monkeypatch: pytest.MonkeyPatch):
    pool_state, fake = PoolState(), Scaler(UNSEEN)
    scaling = scaler(pool_state, monkeypatch, fake)
    now = time.monotonic()
    assert ask(pool_state, "1", claim("a", TPU=1), nodes=NODES, now=now) is None
    assert scaling.asked_for("1") == ""
    scaling.step(NODES)
    assert fake.asked == [TPU]
    assert scaling.asked_for("1") == "1 x 1 TPU (nodes that start: 1 x accelerated)"
    pool_state.queue.clear()
    scaling.step(NODES)
    assert fake.log == [[TPU], []]


def test_a_lease_that_no_nodes_can_be_added_for_is_hopeless(monkeypatch: pytest.MonkeyPatch):
    pool_state, fake = PoolState(), Scaler(INFEASIBLE)
    scaling = scaler(pool_state, monkeypatch, fake)
    assert (
        ask(pool_state, "1", claim("a", (3, 3), TPU=1), nodes=NODES, now=time.monotonic()) is None
    )
    scaling.step(NODES)
    assert not scaling.is_hopeless("1")
    scaling.step(NODES)
    assert scaling.is_hopeless("1")
    assert fake.log == [[TPU] * 3, []]


def test_a_cluster_that_cannot_grow_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    pool_state, fake = PoolState(), Scaler(SERVED, growth=())
    scaling = scaler(pool_state, monkeypatch, fake)
    assert ask(pool_state, "1", claim("a", TPU=1), nodes=NODES, now=time.monotonic()) is None
    scaling.step(NODES)
    assert fake.log == []


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ([UNSEEN, UNSEEN, SERVED], None),
        ([UNSEEN, INFEASIBLE], "its autoscaler has no nodes to add for that"),
    ],
)
def test_whether_nodes_can_be_added_is_what_the_autoscaler_says(verdicts, reason, monkeypatch):
    fake = Scaler(*verdicts)
    scaling = scaler(PoolState(), monkeypatch, fake)
    assert asyncio.run(scaling.infeasible_reason([TPU] * 3, lambda: NODES)) == reason
    assert fake.log == [[TPU] * 3]


def test_an_autoscaler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    scaling = scaler(PoolState(), monkeypatch, Scaler(UNSEEN))
    # Not `time.monotonic` itself, which is the clock of asyncio too.
    monkeypatch.setattr(autoscaler, "time", Clock(0.0, 1.0, 46.0))
    reason = asyncio.run(scaling.infeasible_reason([TPU], lambda: NODES))
    assert reason == "its autoscaler has not answered for 45 s"


class Clock:
    """Times that are given, one a call."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def monotonic(self) -> float:
        return next(self._times)
