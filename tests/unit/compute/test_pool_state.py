"""The pool state alone: grants, their order, and evictions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pool_claims import ONE, ask, claim, spec
from vane_dagster.compute.admission import check_can_fit, plan_waves
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.placement import FreeResources, fits
from vane_dagster.compute.pool_state import LEASE_SECONDS, LeaseRecord, PoolState
from vane_dagster.errors import ComputeError

TWO = {"n1": {"CPU": 4.0, "GPU": 1.0}, "n2": {"CPU": 4.0, "GPU": 1.0}}


def sizes(pool_state: PoolState) -> dict[str, int]:
    return {identity: len(pool.workers) for identity, pool in pool_state.pools.items()}


# First come, first served


def test_a_request_waits_until_the_resource_is_free():
    pool_state = PoolState()
    assert ask(pool_state, "1", claim("a", GPU=1)) is not None
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    assert pool_state.blocking_runs("2") == ["run-1"]
    pool_state.release("1", 1.0)
    grant = ask(pool_state, "2", claim("b", GPU=1), now=1.0)
    assert grant is not None
    assert len(grant.kill) == 1
    assert sizes(pool_state) == {"b": 1}


def test_nobody_overtakes_where_resources_compete():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1))
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    assert ask(pool_state, "3", claim("a", GPU=1)) is None, "a is warm, but 2 was first"
    assert pool_state.blocking_runs("3") == ["run-1", "run-2"]
    pool_state.release("1", 1.0)
    assert ask(pool_state, "3", claim("a", GPU=1), now=1.0) is None
    assert ask(pool_state, "2", claim("b", GPU=1), now=1.0) is not None
    pool_state.release("2", 2.0)
    assert ask(pool_state, "3", claim("a", GPU=1), now=2.0) is not None


def test_who_wants_other_resources_does_not_wait():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1))
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    assert ask(pool_state, "3", claim("c", CPU=1)) is not None
    assert ask(pool_state, "4", claim("d")) is not None


def test_a_request_that_is_not_repeated_loses_its_place():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1))
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    pool_state.release("1", 1.0)
    assert ask(pool_state, "3", claim("c", GPU=1), now=5.0) is None
    assert ask(pool_state, "3", claim("c", GPU=1), now=20.0) is not None


def test_a_request_asked_twice_has_one_lease():
    pool_state = PoolState()
    first = ask(pool_state, "1", claim("a", (2, 2), CPU=1))
    again = ask(pool_state, "1", claim("a", (2, 2), CPU=1))
    assert first is not None
    assert again is not None
    assert again.workers == first.workers
    assert not again.start
    assert sizes(pool_state) == {"a": 2}


# Priority


def test_the_highest_priority_goes_first_then_who_came_first():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1))
    waiting = {"2": 0, "3": 5, "4": 5}
    for now, (id, priority) in enumerate(waiting.items()):
        assert ask(pool_state, id, claim("b", GPU=1), now=float(now), priority=priority) is None
    assert pool_state.blocking_runs("2") == ["run-1", "run-3", "run-4"]
    assert pool_state.blocking_runs("3") == ["run-1"]
    pool_state.release("1", 5.0)
    granted = []
    while waiting:
        for id, priority in list(waiting.items()):
            if ask(pool_state, id, claim("b", GPU=1), now=6.0, priority=priority) is not None:
                granted.append(id)
                del waiting[id]
                pool_state.release(id, 6.0)
    assert granted == ["3", "4", "2"]


def test_a_low_priority_does_not_wait_for_ever():
    pool_state = PoolState()
    ask(pool_state, "held", claim("a", GPU=1))
    assert ask(pool_state, "low", claim("b", GPU=1), now=0.0) is None
    for now in range(10, 1800, 10):  # runs of a higher priority keep coming, each for ten seconds
        ask(pool_state, "low", claim("b", GPU=1), now=float(now))
        ask(pool_state, f"high-{now}", claim("c", GPU=1), now=float(now), priority=2)
    pool_state.release("held", 1800.0)
    assert ask(pool_state, "high-1790", claim("c", GPU=1), now=1800.0, priority=2) is None
    assert ask(pool_state, "low", claim("b", GPU=1), now=1800.0) is not None


def test_a_new_lease_gets_workers_that_no_higher_priority_uses():
    pool_state = PoolState()
    nodes = {"n": {"GPU": 2.0}}
    high = ask(pool_state, "1", claim("a", GPU=1), nodes=nodes, priority=5)
    second = ask(pool_state, "2", claim("a", (2, 2), GPU=1), nodes=nodes)
    pool_state.release("2", 1.0)
    low = ask(pool_state, "3", claim("a", GPU=1), nodes=nodes, now=1.0)
    lower = ask(pool_state, "4", claim("a", GPU=1), nodes=nodes, now=2.0)
    assert high is not None
    assert second is not None
    assert low is not None
    assert lower is not None
    other = set(second.workers["a"]) - set(high.workers["a"])
    assert set(low.workers["a"]) == set(lower.workers["a"]) == other


# Sharing and growing


def test_runs_share_a_pool_and_it_grows_to_the_largest_lease():
    pool_state = PoolState()
    first = ask(pool_state, "1", claim("a", (1, 1), CPU=1))
    second = ask(pool_state, "2", claim("a", (2, 2), CPU=1))
    assert first is not None
    assert second is not None
    assert len(second.start) == 1
    assert first.workers["a"][0] in second.workers["a"]
    assert len(second.workers["a"]) == 2


def test_a_lease_gets_no_more_than_its_most_and_the_least_used_workers():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", (2, 2), CPU=1))
    pool_state.release("1", 0.0)
    second = ask(pool_state, "2", claim("a", CPU=1))
    third = ask(pool_state, "3", claim("a", CPU=1))
    assert second is not None
    assert third is not None
    assert set(second.workers["a"]).isdisjoint(third.workers["a"])
    assert sizes(pool_state) == {"a": 2}


def test_min_and_max_takes_what_there_is_without_ending_anything():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", CPU=1))
    pool_state.release("1", 0.0)
    grant = ask(pool_state, "2", claim("b", (1, 8), CPU=1))
    assert grant is not None
    assert not grant.kill
    assert sizes(pool_state) == {"a": 1, "b": 3}


def test_two_growing_pools_take_turns():
    pool_state = PoolState()
    assert ask(pool_state, "1", claim("a", (1, 8), CPU=1), claim("b", (1, 8), CPU=1)) is not None
    assert sizes(pool_state) == {"a": 2, "b": 2}


def test_workers_beyond_the_least_make_room_for_the_same_lease():
    pool_state = PoolState()
    first = ask(pool_state, "1", claim("a", (2, 2), GPU=1), nodes=TWO)
    pool_state.release("1", 0.0)
    grant = ask(pool_state, "2", claim("a", GPU=1), claim("b", GPU=1), nodes=TWO)
    assert first is not None
    assert grant is not None
    assert grant.kill == first.workers["a"][1:], "the elder stays"
    assert sizes(pool_state) == {"a": 1, "b": 1}


# Eviction


def test_the_least_recently_used_idle_pool_goes_first():
    pool_state = PoolState()
    nodes = {"n": {"GPU": 3.0}}
    for name in "abc":
        ask(pool_state, name, claim(name, GPU=1), nodes=nodes)
    for at, name in enumerate("bca"):
        pool_state.release(name, float(at))
    assert ask(pool_state, "4", claim("d", GPU=1), nodes=nodes, now=9.0) is not None
    assert set(pool_state.pools) == {"a", "c", "d"}


def test_pools_that_hold_nothing_of_use_are_spared():
    pool_state = PoolState()
    nodes = {"n": {"GPU": 1.0, "CPU": 1.0}}
    ask(pool_state, "1", claim("cpu", CPU=1), nodes=nodes)
    ask(pool_state, "2", claim("free"), nodes=nodes)
    ask(pool_state, "3", claim("gpu", GPU=1), nodes=nodes)
    for at, id in enumerate("123"):
        pool_state.release(id, float(at))
    assert ask(pool_state, "4", claim("new", GPU=1), nodes=nodes, now=9.0) is not None
    assert set(pool_state.pools) == {"cpu", "free", "new"}


def test_idle_time_counts_from_the_last_release():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", idle=10))
    ask(pool_state, "2", claim("a", idle=10))
    pool_state.release("1", 100.0)
    assert pool_state.expired_pools(500.0) == [], "still leased"
    pool_state.release("2", 500.0)
    assert pool_state.expired_pools(509.0) == []
    assert pool_state.expired_pools(511.0) == ["a"]


def test_a_pool_on_the_wrong_node_is_moved_for_its_own_lease():
    pool_state = PoolState()
    pool_state.adopt(claim("a", GPU=1), "a-1", "big", 0.0)
    nodes = {"big": {"GPU": 2.0}, "small": {"GPU": 1.0}}
    grant = ask(pool_state, "1", claim("a", GPU=1), claim("b", GPU=2), nodes=nodes)
    assert grant is not None
    assert grant.kill == ("a-1",)
    assert {start.claim.identity: start.node for start in grant.start} == {
        "a": "small",
        "b": "big",
    }


# Expiry and restart


def test_a_lease_expires_without_heartbeats_and_is_not_learnt_again():
    pool_state = PoolState()
    ask(pool_state, "1", claim("a", GPU=1))
    beat = LeaseRecord("1", "run-1", (claim("a", GPU=1),), 0.0)
    assert pool_state.heartbeat(beat, 20.0)
    assert pool_state.expired(20.0 + LEASE_SECONDS) == []
    assert pool_state.expired(21.0 + LEASE_SECONDS) == ["1"]
    pool_state.release("1", 51.0)
    assert not pool_state.heartbeat(beat, 52.0), "its queued calls were revoked"
    assert not pool_state.leases


def test_a_restarted_pool_manager_learns_leases_again_and_evicts_nothing_meanwhile():
    pool_state = PoolState(settled_at=LEASE_SECONDS)
    pool_state.adopt(claim("a", idle=1, GPU=1), "a-1", "n1", 0.0)
    assert ask(pool_state, "2", claim("b", GPU=1), now=1.0) is None, "a may be leased"
    assert pool_state.expired_pools(5.0) == []
    beat = LeaseRecord("1", "run-1", (claim("a", GPU=1),), 0.0, workers=("a-1",))
    assert pool_state.heartbeat(beat, 5.0)
    for now in (10.0, 20.0, 31.0):
        assert pool_state.heartbeat(beat, now)
        assert ask(pool_state, "2", claim("b", GPU=1), now=now) is None
    assert pool_state.blocking_runs("2") == ["run-1"]
    pool_state.release("1", 32.0)
    grant = ask(pool_state, "2", claim("b", GPU=1), now=32.0)
    assert grant is not None
    assert grant.kill == ("a-1",)


def test_a_restarted_pool_manager_evicts_unclaimed_pools_after_a_lease_time():
    pool_state = PoolState(settled_at=LEASE_SECONDS)
    pool_state.adopt(claim("a", GPU=1), "a-1", "n1", 0.0)
    for now in range(0, 30, 10):
        assert ask(pool_state, "2", claim("b", GPU=1), now=float(now)) is None
    assert ask(pool_state, "2", claim("b", GPU=1), now=LEASE_SECONDS) is not None


# Lost workers


def test_two_runs_that_lose_a_shared_worker_get_the_same_heir():
    pool_state = PoolState()
    lost = ask(pool_state, "1", claim("a", GPU=1)).workers["a"][0]
    ask(pool_state, "2", claim("a", GPU=1))
    replacement, start = pool_state.replace(lost, claim("a", GPU=1), ONE)
    assert start is not None
    assert start.node == "n1"
    assert pool_state.replace(lost, claim("a", GPU=1), ONE) == (replacement, None)
    next_heir, start = pool_state.replace(replacement, claim("a", GPU=1), ONE)
    assert start is not None
    assert pool_state.replace(lost, claim("a", GPU=1), ONE) == (next_heir, None)
    assert sizes(pool_state) == {"a": 1}


def test_a_worker_of_a_pool_that_was_evicted_by_force_is_replaced_too():
    pool_state = PoolState()
    lost = ask(pool_state, "1", claim("a", GPU=1)).workers["a"][0]
    pool_state.remove_workers([lost])
    replacement, start = pool_state.replace(lost, claim("a", GPU=1), ONE)
    assert start is not None
    assert list(pool_state.pools["a"].workers) == [replacement]


def test_what_died_of_an_idle_pool_is_struck_off():
    pool_state = PoolState()
    leased = ask(pool_state, "1", claim("a", GPU=1))
    idle = ask(pool_state, "2", claim("b", (2, 2), CPU=1))
    assert leased is not None
    assert idle is not None
    pool_state.release("2", 0.0)
    pool_state.remove_dead_idle({idle.workers["b"][0]})
    assert sizes(pool_state) == {"a": 1, "b": 1}, "a is for its own run to replace"


# Room


def test_a_share_of_a_gpu_lies_on_one_gpu():
    assert fits([{"GPU": 2}], [{"GPU": 0.5}] * 4)
    assert not fits([{"GPU": 2}], [{"GPU": 0.6}] * 3), "the rests of two GPUs are no GPU"
    assert not fits([{"GPU": 1}, {"GPU": 1}], [{"GPU": 2}])
    assert fits([{"GPU": 2}], [{"GPU": 0.5}, {"GPU": 1}, {"GPU": 0.5}])


def test_small_bundles_leave_the_large_node_free():
    room = FreeResources({"big": {"GPU": 4.0}, "small": {"GPU": 1.0}})
    assert room.place({"GPU": 1}) == "small"
    assert room.place({"GPU": 4}) == "big"
    assert room.place({"GPU": 1}) is None


def test_workers_that_reserve_nothing_spread_by_cpus():
    room = FreeResources({"head": {"CPU": 0.0}, "a": {"CPU": 2.0}, "b": {"CPU": 4.0}})
    placed = [room.place({}) for _ in range(6)]
    assert {node: placed.count(node) for node in set(placed)} == {"a": 2, "b": 4}


def test_waves_hold_what_fits_together_and_keep_the_order():
    capacity = Capacity(({"CPU": 4, "GPU": 1},), 0)
    upstream = {"clean": [], "a": ["clean"], "b": ["clean"], "c": ["a"], "join": ["a", "b", "c"]}
    pools = {"a": spec("a", GPU=1), "b": spec("b", GPU=1), "c": spec("c", GPU=1)}
    waves = plan_waves(capacity, list(upstream), upstream, pools)
    assert waves == [["clean", "a"], ["b"], ["c", "join"]]


def test_stages_of_one_pool_share_a_wave():
    capacity = Capacity(({"CPU": 4, "GPU": 1},), 0)
    pools = {"a": spec("m", GPU=1), "b": spec("m", GPU=1)}
    assert plan_waves(capacity, ["a", "b"], {"a": [], "b": ["a"]}, pools) == [["a", "b"]]


def test_waves_count_each_place_for_itself():
    machine = Capacity(({"CPU": 2, "GPU": 1},), 0, is_cluster=False)
    capacity = Capacity(({"CPU": 4, "GPU": 1},), 0, driver=machine)
    there, here, also_here = (spec(name, GPU=1) for name in "abc")
    here, also_here = replace(here, on_driver=True), replace(also_here, on_driver=True)
    pools = {"a": there, "b": here, "c": also_here}
    waves = plan_waves(capacity, list(pools), dict.fromkeys(pools, ()), pools)
    assert waves == [["a", "b"], ["c"]]


def test_a_stage_that_does_not_fit_beside_its_server_is_refused():
    capacity = Capacity(({"CPU": 4}, {"CPU": 4}), 0)
    caller = replace(spec("ask", CPU=1), uses={"llm": "llm"})
    servers = {"llm": spec("llm", (2, 2), CPU=4)}
    with pytest.raises(ComputeError) as caught:
        plan_waves(capacity, ["a"], {"a": []}, {"a": caller}, servers)
    assert "stage 'a' needs 1 of 1 CPU for Ask and 2 of 4 CPU for Llm" in str(caught.value)
    servers = {"llm": spec("llm", (1, 2), CPU=4)}
    assert plan_waves(capacity, ["a"], {"a": []}, {"a": caller}, servers) == [["a"]]


def test_more_than_the_drivers_machine_has_is_refused():
    machine = Capacity(({"CPU": 2},), 0, is_cluster=False)
    capacity = Capacity(({"CPU": 4, "GPU": 1},), 0, driver=machine)
    check_can_fit(capacity, spec("m", GPU=1))
    with pytest.raises(ComputeError) as caught:
        check_can_fit(capacity, replace(spec("m", GPU=1), on_driver=True))
    assert "1 GPU was asked for; this machine has 0 GPU for subprocesses" in str(caught.value)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (spec("m", GPU=2), "2 GPU was asked for; the cluster has 1 GPU"),
        (spec("m", (2, 3), GPU=1), "concurrency=(1, 3)"),
        (spec("m", tpu=1), "has 0 tpu"),
    ],
)
def test_more_than_the_cluster_has_is_refused(pool, message):
    with pytest.raises(ComputeError) as caught:
        check_can_fit(Capacity(({"CPU": 4, "GPU": 1},), 0), pool)
    assert message in str(caught.value)
    assert "M: " in str(caught.value)


# Properties

AMOUNTS = st.fixed_dictionaries(
    {},
    optional={
        "GPU": st.sampled_from([0.25, 0.5, 0.6, 1.0, 2.0]),
        "CPU": st.sampled_from([0.5, 1.0, 2.0]),
    },
)
NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.sampled_from([1.0, 2.0, 4.0]), "GPU": st.integers(0, 2)}),
    min_size=1,
    max_size=3,
)
MODELS = st.lists(st.tuples(AMOUNTS, st.floats(1, 100)), min_size=1, max_size=5)
REQUESTS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(0, 2)), max_size=3),
    min_size=1,
    max_size=8,
)


def over_committed(pool_state: PoolState, nodes) -> list[str]:
    """Nodes of which more is held than there is."""
    held = {id: {"CPU": 0.0, "GPU": 0.0} for id in nodes}
    for pool in pool_state.pools.values():
        for node in pool.workers.values():
            for name, amount in pool.claim.bundle.items():
                held[node][name] += amount
    return [id for id in nodes if any(held[id][name] > nodes[id][name] + 1e-6 for name in held[id])]


@settings(max_examples=150)
@given(NODES, MODELS, REQUESTS, st.randoms(use_true_random=False))
def test_never_over_committed_and_nobody_starves(node_list, models, wishes, random):
    nodes = {f"n{i}": node for i, node in enumerate(node_list)}
    requests = []
    for number, wish in enumerate(wishes):
        claims = {}
        for index, least, more in wish:
            bundle, idle = models[index % len(models)]
            identity = f"m{index % len(models)}"
            claims[identity] = claim(identity, (least, least + more), idle, **bundle)
        needed = [c.bundle for c in claims.values() for _ in range(c.workers[0])]
        if fits(node_list, needed):
            requests.append((str(number), tuple(claims.values())))

    pool_state, held, waiting = PoolState(), [], list(requests)
    for now in itertools.count():
        assert now < 40 * (1 + len(requests)), f"{len(waiting)} requests starve"
        if not waiting and not held:
            break
        for id, claims in list(waiting):
            before = {i: dict(pool.workers) for i, pool in pool_state.pools.items()}
            grant = ask(pool_state, id, *claims, nodes=nodes, now=float(now))
            if grant is None:
                assert before == {i: p.workers for i, p in pool_state.pools.items()}, "half granted"
                continue
            leased = {c.identity for lease in pool_state.leases.values() for c in lease.claims}
            mine = {c.identity for c in claims}
            others = {w for i in leased - mine for w in before.get(i, {})}
            assert not others & set(grant.kill), "a leased pool was evicted"
            for c in claims:
                assert c.workers[0] <= len(grant.workers[c.identity]) <= c.workers[1]
            waiting.remove((id, claims))
            held.append(id)
        assert not over_committed(pool_state, nodes)
        if held and random.random() < 0.5:
            pool_state.release(held.pop(random.randrange(len(held))), float(now))
        for identity in pool_state.expired_pools(float(now)):
            pool_state.remove_workers(list(pool_state.pools[identity].workers))
