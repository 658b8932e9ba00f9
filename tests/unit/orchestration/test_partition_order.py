"""The partitions before a partition, for each kind of Dagster's definitions."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster._core.instance import DynamicPartitionsStore

from vane_dagster.orchestration.partition_order import DagsterOrder

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
NAMES = dg.StaticPartitionsDefinition(["c", "a", "b"])
PLACES = dg.StaticPartitionsDefinition(["x", "y"])


class Dynamic(DynamicPartitionsStore):
    def get_dynamic_partitions(self, partitions_def_name: str) -> list[str]:
        return ["2", "1"]

    def get_paginated_dynamic_partitions(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_dynamic_partitions_definition_id(self, partitions_def_name: str) -> str:
        return "id"

    def has_dynamic_partition(self, partitions_def_name: str, partition_key: str) -> bool:
        return partition_key in "12"


DYNAMIC: Any = Dynamic()


@pytest.mark.parametrize(
    ("definition", "partition", "expected"),
    [
        (DAYS, "2026-01-03", ["2026-01-02", "2026-01-01"]),
        (NAMES, "b", ["a", "c"]),
        (NAMES, "c", []),
        (NAMES, "unknown", []),
        (dg.DynamicPartitionsDefinition(name="d"), "1", ["2"]),
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
    order = DagsterOrder(definition, DYNAMIC)
    assert list(order.before(partition)) == expected


def test_an_unpartitioned_pipeline_has_none():
    assert list(DagsterOrder(None, DYNAMIC).all()) == []
