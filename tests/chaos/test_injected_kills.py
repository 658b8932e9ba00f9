"""Faults of `vane_dagster.testing` that hang, or that kill a worker."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from support.doublers import double
from support.fault_runs import doubles, pipeline, published, quarantined
from vane_dagster import testing


async def later(batch: pa.Table) -> pa.Table:
    await asyncio.sleep(0)
    return double(batch)


@pytest.mark.parametrize("fn", [double, later])
def test_rows_that_hang_or_kill(fn, tmp_path, local, materialize):
    """And one call that ends its worker for no row's sake: none of its rows is lost by that."""
    docs = pipeline(tmp_path, fn, on_error="quarantine", timeout_s=1, max_retries=0)
    with testing.faults(
        testing.CallFault("made", ids=2),
        testing.CallFault("made", "hang", ids=6),
        testing.CallFault("made", "kill", calls=1),
        testing.CallFault("made", "kill", ids=11),
    ) as injected:
        materialize(docs, local)
    assert quarantined(tmp_path) == {2: "InjectedError", 6: "TimeoutError", 11: "WorkerDied"}
    assert published(tmp_path) == doubles(2, 6, 11)
    assert injected.fired[2] == 1
    assert injected.fired[3] >= 2
