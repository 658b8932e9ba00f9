"""The order of partitions, for each kind of Dagster's definitions."""

from __future__ import annotations

import dagster as dg
import pytest

from vane_dagster.orchestration.partition_order import DagsterOrder

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
NAMES = dg.StaticPartitionsDefinition(["c", "a", "b"])
PLACES = dg.StaticPartitionsDefinition(["x", "y"])


@pytest.mark.parametrize(
    ("definition", "partition", "expected"),
    [
        (DAYS, "2026-01-03", ["2026-01-02", "2026-01-01"]),
        (NAMES, "b", ["a", "c"]),
        (NAMES, "c", []),
        (
            dg.MultiPartitionsDefinition({"place": PLACES, "day": DAYS}),
            "2026-01-03|y",
            ["2026-01-02|y", "2026-01-01|y"],
        ),
        (dg.MultiPartitionsDefinition({"a": PLACES, "name": NAMES}), "y|a", ["y|c"]),
    ],
)
def test_the_partitions_before_a_partition_are_those_of_its_other_dimensions(
    definition, partition, expected
):
    order = DagsterOrder(definition, None)
    assert list(order.before(partition)) == expected


def test_an_unpartitioned_pipeline_has_none():
    assert list(DagsterOrder(None, None).all()) == []


# The runs that go on with the answers of batches

LETTERS = dg.StaticPartitionsDefinition([*"abcdef"])
TWO = dg.MultiPartitionsDefinition({"day": LETTERS, "kind": dg.StaticPartitionsDefinition(["x"])})


@pytest.mark.parametrize(
    ("definition", "keys", "ranges"),
    [
        (LETTERS, "abcdef", ["af"]),
        (LETTERS, "fcba", ["ac", "ff"]),
        (LETTERS, "e", ["ee"]),
        (LETTERS, "axb", ["ab"]),
        (TWO, ["a|x", "b|x"], [("a|x", "a|x"), ("b|x", "b|x")]),
        (TWO, ["a|x", "a|removed"], [("a|x", "a|x")]),
        (None, [None], [(None, None)]),
    ],
)
def test_neighbouring_partitions_are_reported_by_one_run(definition, keys, ranges):
    assert list(DagsterOrder(definition, None).ranges([*keys])) == [tuple(each) for each in ranges]
