"""What an autoscaler is asked for: which leases wait for nodes, and how many nodes are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.pool_claims import ask, claim, spec
from vane_dagster.compute.admission import check_can_fit, plan_waves, unsatisfiable
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.autoscaler import _kinds
from vane_dagster.compute.demand import Demand, ScaleVerdict, listed, short_of_nodes, wanted
from vane_dagster.compute.placement import NodeType
from vane_dagster.compute.pool_state import POLL_SECONDS, PoolState
from vane_dagster.errors import ComputeError

BARE = {"head": {"CPU": 1.0}}
ONE = {"head": {"CPU": 1.0}, "n1": {"GPU": 1.0}}
GPU, TPU = {"GPU": 1}, {"TPU": 1}
UNSEEN, SERVED, INFEASIBLE = ScaleVerdict.UNSEEN, ScaleVerdict.SERVED, ScaleVerdict.INFEASIBLE


# What waits, and what is wanted in all


def test_nothing_is_wanted_where_the_nodes_suffice():
    pool_state = PoolState()
    assert ask(pool_state, "1", claim("a", GPU=1), claim("io"), nodes=ONE) is not None
    assert short_of_nodes(pool_state, ONE, 0.0, ()) == []
    pool_state.release("1", 0.0)
    ask(pool_state, "2", claim("b", CPU=2), nodes=ONE)
    assert short_of_nodes(pool_state, {"n": {"CPU": 2.0}}, 0.0, ()) == [], (
        "there is a larger node now"
    )


def test_what_is_leased_counts_and_what_is_idle_does_not():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    assert ask(pool_state, "2", claim("b", (2, 4), GPU=1), claim("io"), nodes=ONE) is None
    assert short_of_nodes(pool_state, ONE, 0.0, ()) == ["2"]
    assert wanted(pool_state, ["2"]) == [GPU] * 3, (
        "the one that is leased, and the least of the other"
    )
    pool_state.release("1", 0.0)
    assert wanted(pool_state, ["2"]) == [GPU] * 2


def test_workers_that_are_shared_are_wanted_once():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    assert ask(pool_state, "2", claim("a", (3, 3), GPU=1), nodes=ONE) is None
    assert ask(pool_state, "3", claim("a", (2, 2), GPU=1), nodes=ONE) is None
    assert wanted(pool_state, ["2", "3"]) == [GPU] * 3


@pytest.mark.parametrize("how", ["released", "dead"])
def test_who_does_not_wait_any_more_wants_nothing(how):
    pool_state, demand = PoolState(), Demand()
    assert ask(pool_state, "1", claim("a", GPU=1), nodes=BARE) is None
    assert demand.step(pool_state, BARE, 0.0, UNSEEN) == [GPU]
    now = 1.0 if how == "released" else POLL_SECONDS
    if how == "released":
        pool_state.release("1", now)
    assert demand.step(pool_state, BARE, now, SERVED) == []
    assert demand.asked_for() == []


# One after another


def test_those_that_wait_are_added_one_after_another():
    pool_state, demand = PoolState(), Demand()
    ask(pool_state, "1", claim("a", GPU=1), nodes=BARE)
    ask(pool_state, "2", claim("b", TPU=1), nodes=BARE)
    assert demand.step(pool_state, BARE, 0.0, UNSEEN) == [GPU]
    assert demand.step(pool_state, BARE, 1.0, UNSEEN) == [GPU], "not before it has looked"
    assert demand.step(pool_state, BARE, 2.0, SERVED) == [GPU, TPU]
    assert demand.asked_for() == ["1", "2"]
    assert demand.step(pool_state, BARE, 3.0, SERVED) == [GPU, TPU]
    assert ask(pool_state, "1", claim("a", GPU=1), nodes=ONE, now=4.0) is not None
    assert demand.step(pool_state, ONE, 4.0, SERVED) == [GPU, TPU], "what is held is still needed"


def test_who_cannot_be_served_beside_the_leases_waits_for_their_end():
    pool_state, demand = PoolState(), Demand()
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    ask(pool_state, "2", claim("b", GPU=1), nodes=ONE)
    ask(pool_state, "3", claim("c", GPU=1), nodes=ONE)
    ask(pool_state, "4", claim("d", TPU=1), nodes=ONE)
    assert demand.step(pool_state, ONE, 0.0, UNSEEN) == [GPU, GPU]
    assert demand.step(pool_state, ONE, 1.0, INFEASIBLE) == [GPU, TPU], (
        "3 comes after 2, 4 needs neither"
    )
    assert not demand.hopeless, "it may have room once 1 is over"
    assert demand.step(pool_state, ONE, 2.0, SERVED) == [GPU, TPU]
    pool_state.release("1", 3.0)
    nodes = {"head": {"CPU": 1.0}}  # and its node goes
    assert demand.step(pool_state, nodes, 3.0, SERVED) == [GPU, TPU]
    assert demand.asked_for() == ["4", "2"]


def test_who_cannot_be_served_alone_is_hopeless():
    pool_state, demand = PoolState(), Demand()
    ask(pool_state, "1", claim("a", (3, 3), GPU=1), nodes=ONE)
    assert demand.step(pool_state, ONE, 0.0, UNSEEN) == [GPU] * 3
    assert demand.step(pool_state, ONE, 1.0, INFEASIBLE) == []
    assert demand.hopeless == {"1"}
    pool_state.release("1", 2.0)
    ask(pool_state, "2", claim("a", (2, 2), GPU=1), nodes=ONE, now=2.0)
    assert demand.step(pool_state, ONE, 2.0, UNSEEN) == [GPU] * 2
    assert not demand.hopeless


def test_a_request_is_tried_again_once_another_is_given_up():
    pool_state, demand = PoolState(), Demand()
    ask(pool_state, "1", claim("a", GPU=1), nodes=BARE)
    ask(pool_state, "2", claim("b", TPU=1), nodes=BARE)
    demand.step(pool_state, BARE, 0.0, UNSEEN)
    demand.step(pool_state, BARE, 1.0, SERVED)
    assert demand.step(pool_state, BARE, 2.0, INFEASIBLE) == [GPU]
    pool_state.release("1", 3.0)
    assert demand.step(pool_state, BARE, 3.0, SERVED) == [TPU]


# Room that may be added


def test_nodes_that_may_be_added_count():
    kind = NodeType({"CPU": 4.0, "GPU": 1.0}, 2)
    capacity = Capacity(({"CPU": 1.0},), 0, (kind,))
    check_can_fit(capacity, spec("m", (2, 2), GPU=1))
    with pytest.raises(ComputeError) as caught:
        check_can_fit(capacity, spec("m", (3, 3), GPU=1))
    assert "the cluster has 0 GPU on 1 node, and may add 2 with 4 CPU, 1 GPU. " in str(caught.value)
    pools = {name: spec(name, GPU=1) for name in "abc"}
    upstream = {"a": [], "b": [], "c": []}
    assert plan_waves(capacity, "abc", upstream, pools) == [["a", "b"], ["c"]]


def test_replicas_of_a_server_that_do_not_fit_are_called_so():
    capacity = Capacity(({"CPU": 4.0},), 0)
    server = replace(spec("llm", (5, 5), CPU=1), server="llm")
    with pytest.raises(ComputeError) as caught:
        check_can_fit(capacity, server)
    assert "5 replicas of 1 CPU each were asked for" in str(caught.value)
    assert "Declare replicas=(1, 5) to take what there is" in str(caught.value)


def test_where_the_kinds_of_nodes_are_not_known_the_autoscaler_is_asked():
    capacity, requested = Capacity(({"CPU": 1.0},), 0, None), []

    def infeasible_reason(bundles):
        requested.append(bundles)
        return "it is full" if len(bundles) > 1 else None

    assert unsatisfiable(capacity, "M", (1, 1), {"CPU": 1.0}, infeasible_reason) is None
    assert requested == [], "that fits already"
    assert unsatisfiable(capacity, "M", (1, 1), GPU, infeasible_reason) is None
    message = unsatisfiable(capacity, "M", (2, 2), GPU, infeasible_reason)
    assert message == (
        "M: 2 workers of 1 GPU each were asked for; the cluster has 0 GPU on 1 node, and it is "
        "full. Lower concurrency or what a worker reserves, or use a larger cluster"
    )
    check_can_fit(capacity, spec("m", GPU=1))
    pools = {name: spec(name, GPU=1) for name in "ab"}
    waves = plan_waves(capacity, "ab", {"a": [], "b": []}, pools)
    assert waves == [["a"], ["b"]], "one node after another, not all at once"


def test_what_a_configuration_lets_a_cluster_add():
    from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeState

    def group(name, most, **resources):
        return {"name": name, "max_count": most, "resources": resources}

    groups = [
        group("head", 1, CPU=1),
        group("gpu", 3, CPU=4, GPU=1),
        group("spot", -1, CPU=16),
        group("full", 1, TPU=4),
    ]
    config = ClusterConfig(node_group_configs=groups, max_resources={"CPU": 50})
    nodes = [
        NodeState(total_resources={"CPU": 1}),
        NodeState(ray_node_type_name="gpu", total_resources={"CPU": 4, "GPU": 1}),
        NodeState(ray_node_type_name="full", total_resources={"TPU": 4}),
    ]
    assert _kinds(config, nodes) == (
        NodeType({"CPU": 4.0, "GPU": 1.0}, 2),
        NodeType({"CPU": 16.0}, 2),
    )


def test_bundles_as_text():
    assert listed([GPU, {"GPU": 0.5, "CPU": 2}, GPU]) == "2 x 1 GPU, 1 x 0.5 GPU and 2 CPU"
