"""The partitions before a partition, for each kind of Dagster's definitions."""

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
