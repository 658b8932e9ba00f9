"""Faults of `vane_dagster.testing` that hang, or that kill a worker or the run."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.doublers import double
from support.fault_runs import doubles, pipeline, published, quarantined
from support.results import metadata
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


def run_killed(tmp_path: Path) -> None:
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    compute = vd.LocalCompute(num_cpus=1)
    assets = pipeline(tmp_path).build_assets()
    dg.materialize([assets], resources={"compute": compute, "store": store})


def test_a_run_that_is_killed_while_it_publishes(tmp_path, local, materialize):
    """A process that is started in the block follows it."""
    pipeline(tmp_path)
    fault = testing.StorageFault("*/out/*-*.parquet", "kill", calls=2)
    with testing.faults(fault) as injected:  # one is published
        process = multiprocessing.get_context("spawn").Process(target=run_killed, args=[tmp_path])
        process.start()
        process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert injected.fired == (1,)
    assert published(tmp_path) != doubles()
    result = materialize(pipeline(tmp_path), local)
    assert metadata(result, "made")["fragments_computed"] == 0
    assert published(tmp_path) == doubles()
