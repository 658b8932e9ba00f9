"""The runs that publish and report what was promoted."""

from __future__ import annotations

import dagster as dg
import pytest

from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.orchestration.promote import _by_stages

DAYS = dg.StaticPartitionsDefinition([*"abcdef"])
TWO = dg.MultiPartitionsDefinition({"day": DAYS, "kind": dg.StaticPartitionsDefinition(["x"])})


@pytest.mark.parametrize(
    ("definition", "keys", "ranges"),
    [
        (DAYS, "abcdef", ["af"]),
        (DAYS, "fcba", ["ac", "ff"]),
        (DAYS, "e", ["ee"]),
        (TWO, ["a|x", "b|x"], [("a|x", "a|x"), ("b|x", "b|x")]),
        (None, [None], [(None, None)]),
    ],
)
def test_neighbouring_partitions_are_reported_by_one_run(definition, keys, ranges):
    assert list(DagsterOrder(definition, None).ranges([*keys])) == [tuple(each) for each in ranges]


def test_partitions_with_the_same_stages_are_together():
    places = [("s", "a"), ("t", "a"), ("s", "b"), ("s", "c"), ("t", "c")]
    assert _by_stages(places) == {("s", "t"): ["a", "c"], ("s",): ["b"]}
