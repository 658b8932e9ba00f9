"""The state of a run: how many rows may fail before a partition is given up."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from support.plans import plan
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.run_state import RunState


def repeated(n: int) -> list[int]:
    return [n] * 9


def itself(parts: int) -> int:
    return parts


def same(n: int) -> int:
    return n


def test_rows_below_a_fan_out_may_be_more_than_those_of_the_source(tmp_path, store):
    (tmp_path / "src").mkdir()
    pq.write_table(pa.table({"id": range(100), "n": range(100)}), tmp_path / "src/0.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(tmp_path / "src"), id="id")
    strict = {"on_error": vd.Failures("quarantine", max_error_rate=0.5)}
    docs.map("direct", same, output_column="m", **strict)
    parts = docs.flat_map("parts", repeated, id="part", **strict)
    parts.map("below", itself, output_column="m", **strict)

    planned = plan(docs, store)
    state = RunState(planned, store, "run", [].append, {}, CheckRunner(docs, store))

    limits = [state.max_faults(0, stage) for stage in ("direct", "parts", "below")]
    assert limits == [50, 50, sys.maxsize]
