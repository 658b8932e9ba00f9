"""How many times a run writes to Dagster's database."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy
from dagster._core.storage.event_log import SqlEventLogStorage
from sqlalchemy.engine import Engine

from support.event_world import KEYS, World, embed, instance, one_group, world  # noqa: F401  # fixtures
from vane_dagster.orchestration import reporting


def test_connections_and_look_ups_do_not_grow_with_partitions(
    world, instance, one_group, monkeypatch
):
    keys = KEYS[:6]
    assert world.run(instance, *keys).success
    look_up = SqlEventLogStorage.get_latest_storage_id_by_partition
    looked_up: Counter[str] = Counter()
    monkeypatch.setattr(
        SqlEventLogStorage,
        "get_latest_storage_id_by_partition",
        lambda self, key, *rest, **more: (
            looked_up.update([key.path[-1]]) or look_up(self, key, *rest, **more)
        ),
    )

    count: Counter[str] = Counter()
    flush = reporting.RunReport.flush

    def counted(report: reporting.RunReport) -> None:
        """Without the connections by which Dagster stores what it has planned."""

        def connected(*given: Any) -> None:
            count["connections"] += 1

        sqlalchemy.event.listen(Engine, "engine_connect", connected)
        try:
            flush(report)
        finally:
            sqlalchemy.event.remove(Engine, "engine_connect", connected)

    monkeypatch.setattr(reporting.RunReport, "flush", counted)

    def connections(*keys: str) -> int:
        """Connections of a run that reports what an earlier one has made."""
        count.clear()
        assert world.run(instance, *keys).success
        return count["connections"]

    few = connections(*keys[:2])
    assert looked_up == {"vectors": 1, "labels": 1}
    looked_up.clear()
    many = connections(*keys)
    assert looked_up == {"vectors": 1, "labels": 1}
    assert many == few < 10
