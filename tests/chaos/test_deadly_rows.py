"""Rows that kill their process or hang are found by halving, and quarantined."""

from __future__ import annotations

import os
import signal
import time

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.bad_row_runs import pipeline
from support.bad_rows import double
from support.data import read_stage
from support.results import failure


def deadly(batch: pa.Table, killers=(3, 77), hangs=()) -> pa.Table:
    """Ends its process at some rows, as a segmentation fault would, and hangs at others."""
    xs = set(batch["x"].to_pylist())
    if xs & set(killers):
        os.kill(os.getpid(), signal.SIGKILL)
    if xs & set(hangs):
        time.sleep(600)
    return double(batch, bad=())


class Deadly:
    """As `deadly`, with a state."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        return deadly(batch)


def always_dead(batch: pa.Table) -> pa.Table:
    os._exit(1)


@pytest.mark.parametrize("fn", [deadly, Deadly])
def test_rows_that_kill_their_process_are_found(fn, tmp_path, compute, materialize):
    docs = pipeline(tmp_path, rows=100, fn=fn, batch_size=10)
    materialize(docs, compute)
    table = read_stage(tmp_path / "store", "docs", "double")
    assert table["id"].to_pylist() == [i for i in range(100) if i not in (3, 77)]
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert aside["id"].to_pylist() == [3, 77]
    assert set(aside["error"].to_pylist()) == {"WorkerDied"}
    assert set(aside["attempts"].to_pylist()) == {2}


def test_rows_that_hang_are_found(tmp_path, local, materialize):
    docs = pipeline(
        tmp_path,
        rows=50,
        fn=deadly,
        fn_kwargs={"killers": (), "hangs": (7,)},
        batch_size=10,
        timeout_s=1.0,
        on_error="null",
    )
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "double")
    assert table["id"].to_pylist() == list(range(50))
    assert table["y"].to_pylist() == [None if i == 7 else 2 * i for i in range(50)]
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert aside["error"].to_pylist() == ["TimeoutError"]


def test_a_model_that_dies_of_everything_is_given_up(tmp_path, local, materialize):
    docs = pipeline(tmp_path, rows=1000, fn=always_dead, max_error_rate=1.0)
    message = failure(materialize(docs, local, raises=False))
    assert "'docs/double'" in message
    assert "lost its worker" in message


def test_a_row_that_kills_fails_the_partition_by_default(tmp_path, local, materialize):
    docs = pipeline(tmp_path, rows=20, fn=deadly, on_error="raise")
    message = failure(materialize(docs, local, raises=False))
    assert "on_error='quarantine' finds it" in message
