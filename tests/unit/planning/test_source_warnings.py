"""Rows whose key is no partition, and columns of several types, are warnings of the plan."""

from __future__ import annotations

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import partitioned, write_source
from vane_dagster.planning.planner import plan_run

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
WEEKS = dg.WeeklyPartitionsDefinition("2026-01-04", end_date="2026-02-01")
PARTS = dg.StaticPartitionsDefinition(["a", "b"])
BOTH = dg.MultiPartitionsDefinition({"day": DAYS, "part": PARTS})
ADDED = dg.DynamicPartitionsDefinition(name="added")
OPEN = dg.MultiPartitionsDefinition({"day": DAYS, "other": ADDED})


@pytest.mark.parametrize(
    ("partitions_def", "known", "later", "unknown"),
    [
        (DAYS, "2026-01-01", ["2026-01-03", "2027-01-01"], ["2025-12-31", "2026-1-1", "x"]),
        (WEEKS, "2026-01-11", ["2026-02-01"], ["2026-01-12"]),
        (PARTS, "a", ["b"], ["c", "d"]),
        (BOTH, "2026-01-01|a", ["2026-01-02|b", "2026-01-09|b"], ["a|2026-01-01", "2026-01-01"]),
        (BOTH, "2026-01-01|a", [], ["2026-01-01|c", "2026-01-09|c", "x|a"]),
        (OPEN, "2026-01-01|a", ["2026-01-01|z"], ["x|a"]),
        (ADDED, "a", ["z"], []),
    ],
)
def test_rows_of_no_partition(partitions_def, known, later, unknown, store):
    keys = [known, *later, *unknown, *unknown]
    rows = vd.table({"id": range(len(keys)), "day": keys}, partition_column="day")
    docs = vd.Pipeline("docs", source=rows, id="id", partitions_def=partitions_def)
    docs.project("kept", {"day": "day"})
    warnings = plan_run(docs, ["kept"], [known], store).warnings
    shown = ", ".join(map(repr, sorted(unknown)))
    text = (
        f"pipeline 'docs': a dict in memory has {2 * len(unknown)} rows of {shown}, which no run "
        f"computes: no partition has this key. Partition keys look like {known!r}"
    )
    assert warnings == ([text] if unknown else [])


def test_some_keys_are_named(store):
    rows = vd.table({"id": range(6), "part": [*"abcdef"]}, partition_column="part")
    docs = partitioned(rows, ["a"])
    docs.project("kept", {"part": "part"})
    (text,) = plan_run(docs, ["kept"], ["a"], store).warnings
    assert "5 rows of 'b', 'c', 'd' and 2 more, which" in text


def test_columns_with_other_types_in_some_partitions(tmp_path, store):
    for key, price in {"a": 1.5, "b": "1.5 EUR", "c": 2.5}.items():
        write_source(tmp_path / "src" / f"{key}.parquet", {"id": [1], "price": [price], "x": [1]})
    docs = partitioned(
        vd.parquet(str(tmp_path / "src" / "{partition_key}.parquet")), ["a", "b", "c"]
    )
    docs.project("kept", ["price"])
    docs.project("others", ["x"])
    docs.project("both", {"x": "price", "price": "price", "y": "x"})
    assert plan_run(docs, ["kept", "others"], ["a", "b", "c"], store).warnings == [
        "stage 'docs/kept': column 'price' is DOUBLE in 2 partitions (a, c) and VARCHAR in 1 "
        "partition (b); partitions with different types cannot be read together"
    ]
    assert plan_run(docs, ["others"], ["a", "b", "c"], store).warnings == []
    (text,) = plan_run(docs, ["both"], ["a", "b", "c"], store).warnings
    assert "columns 'x', 'price' have different types in some partitions: column 'x' is DOU" in text
