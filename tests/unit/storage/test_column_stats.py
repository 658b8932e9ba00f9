"""Fields that a stage declares are added up for each part, with what failed rows took."""

from __future__ import annotations

import pyarrow as pa

from vane_dagster.storage.column_stats import measure

USED = pa.array([{"calls": 1, "why": "a"}, None, {"calls": 4, "why": "b"}])


def test_declared_fields_of_a_struct_are_added_up():
    table = pa.table({"used": USED, "other": USED})
    assert measure(table, ["used", "other"], {"used": ["calls"]}) == {
        "used": {"nulls": 1, "calls": 5},
        "other": {"nulls": 1},
    }


def test_what_failed_rows_took_counts_too():
    table = pa.table({"used": USED.slice(0, 0)})
    assert measure(table, ["used"], {"used": ["calls"]}, {"calls": 7}) == {
        "used": {"nulls": 0, "calls": 7}
    }
