"""Which pool limits a run, and what a change is predicted to save."""

from __future__ import annotations

from typing import Any

import pytest

from vane_dagster.engine.bottleneck import Advice, WaveTime, advise
from vane_dagster.events import PoolTime


def pool(stage: str, workers: int, computing: float, **others: Any) -> PoolTime:
    return PoolTime((stage,), stage == "io", workers, computing=computing, **others)


def advised(
    *pools: PoolTime,
    seconds: float = 100.0,
    fragments: int = 100,
    in_code: float = 1.0,
    groups: float = 1.0,
    **resources: float,
) -> Advice | None:
    stages = [stage for each in pools for stage in each.stages]
    found, shares = dict.fromkeys(stages, fragments), dict.fromkeys(stages, in_code)
    return advise([WaveTime(resources, pools)], seconds, found, 1000, shares, groups)


@pytest.mark.parametrize(
    ("pools", "option", "saved"),
    [
        # As many workers as make it as fast as the next one, and at most four times as many.
        ([pool("a", 2, 180), pool("b", 1, 30)], "concurrency=6 instead of 2", 60),
        ([pool("a", 2, 180), pool("b", 1, 1)], "concurrency=8 instead of 2", 67.5),
        ([pool("io", 2, 180), pool("b", 1, 60)], "3 CPUs for reading and writing instead of 2", 30),
        # Few fragments: the first one passes all stages before the last stage has work.
        ([pool("a", 1, 40), pool("b", 1, 36)], "fragment_rows=250, a quarter of the curr", 13.5),
        # Loads, and memory.
        (
            [pool("a", 2, 60, loading=80), pool("b", 1, 29)],
            "warm workers, which RayCompute keeps after this process ends",
            40,
        ),
        ([pool("a", 2, 60, room=60), pool("b", 1, 29)], "fragment_rows=250, a quarter", 30),
    ],
)
def test_the_option_that_saves_most(pools: list[PoolTime], option: str, saved: float) -> None:
    found = advised(*pools, fragments=2 if pools[0].computing == 40 else 1000, CPU=2)
    assert found is not None
    assert found.option.startswith(option)
    assert found.saved == pytest.approx(saved, abs=0.1)
    assert found.gain == pytest.approx(100 / (100 - saved), rel=0.01)


def test_a_cluster_which_keeps_workers_is_not_advised_to_keep_them() -> None:
    pools = [pool("a", 2, 60, loading=80), pool("b", 1, 29)]
    found = advise([WaveTime({}, pools, is_cluster=True)], 100.0, {"a": 1000}, 1000)
    assert found is not None
    assert "warm" not in found.option


def test_a_run_without_calls_has_no_advice_and_no_option_is_an_answer() -> None:
    assert advised(pool("a", 0, 0)) is None
    found = advised(pool("a", 2, 6), pool("b", 1, 3))
    assert str(found) == (
        "bottleneck: 'a', whose 2 workers computed 100% of the time. No option is "
        "predicted to save 10% and at least 3 seconds"
    )
    started = advised(pool("a", 2, 10, loading=30))
    assert str(started).startswith(
        "bottleneck: starting the workers for 'a', 75% of their time; then 'a', whose 2 workers "
    )
    beside = str(advised(pool("io", 2, 4, loading=2), pool("a", 1, 1, loading=25)))
    assert beside.startswith(
        "bottleneck: starting the workers for 'a', 96% of their time; then reading and writing"
    )
    assert "1.3 times as fast with warm workers" in beside
    found = advised(pool("a", 1, 3.6), seconds=4)  # it would be four times as fast
    assert found is not None
    assert not found.option


@pytest.mark.parametrize(
    ("pools", "in_code", "option"),
    [
        ([pool("a", 2, 160, input=40)], 1.0, "concurrency=8 instead of 2, if its code waits"),
        ([pool("a", 1, 80, input=20)], 0.2, "concurrency=2 instead of 1"),
        ([pool("a", 2, 160, input=40)], 0.2, ""),  # as many as CPUs, and its code does not wait
        ([pool("a", 2, 160, input=40, bundle={"GPU": 1})], 0.2, "concurrency=8 instead of 2"),
        ([pool("a", 2, 50, input=150)], 1.0, ""),
        ([pool("io", 2, 50, input=150)], 1.0, ""),
    ],
)
def test_workers_that_wait_for_input_or_for_cpus_get_no_others(
    pools: list[PoolTime], in_code: float, option: str
) -> None:
    found = advised(*pools, in_code=in_code, CPU=2)
    assert found is not None
    assert found.option.startswith(option)
    assert bool(found.option) == bool(option)


@pytest.mark.parametrize(("rows", "is_split"), [(3, False), (99, False), (100, True)])
def test_fragments_of_few_rows_are_not_split(rows: int, is_split: bool) -> None:
    for pools in ([pool("io", 1, 90), pool("a", 1, 1)], [pool("a", 2, 60, room=60)]):
        wave = WaveTime({"CPU": 2}, pools, is_cluster=True)
        found = advise([wave], 100.0, dict.fromkeys("a", 1), rows)
        assert found is not None
        assert ("fragment_rows" in found.option) == is_split


def test_small_files_are_grouped_if_the_time_is_not_in_the_code() -> None:
    found = advised(pool("a", 2, 160), in_code=0.1, groups=50, CPU=2)
    assert found is not None
    assert (found.option, found.saved) == (
        'small_files="group" of vd.parquet',
        pytest.approx(70.56),
    )
    for in_code, groups in ((1.0, 50), (0.1, 5)):
        found = advised(pool("a", 2, 160), in_code=in_code, groups=groups)
        assert found is not None
        assert "small_files" not in found.option


def test_limits_of_an_endpoint_are_not_raised_by_more_workers() -> None:
    found = advised(pool("a", 1, 90, limited_by="their limits"), pool("b", 1, 3))
    assert "'a', whose 1 worker computed 100% of the time, limited by their lim" in str(found)
    assert found is not None
    assert not found.option
