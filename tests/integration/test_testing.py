"""Faults that users inject into their own pipelines: by id, by count, and nowhere else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import failure, metadata
from vane_dagster import _failpoints, testing

ROWS = 20


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"y": [2 * x for x in batch["x"].to_pylist()]})


class Doubler:
    """Like `double`, as a class; reports whether its process has a fault plan."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        known = [str(_failpoints.VARIABLE in os.environ)] * batch.num_rows
        return double(batch).append_column("known", pa.array(known))


def pipeline(tmp_path: Path, fn=double, **given) -> vd.Pipeline:
    """source -> made -> published, four fragments of five rows."""
    if not (tmp_path / "src").exists():
        write_source(tmp_path / "src", {"id": range(ROWS), "x": range(ROWS)}, row_group_size=5)
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=5)
    schema = {"y": "BIGINT", **({"known": "VARCHAR"} if fn is Doubler else {})}
    made = docs.map_batches("made", fn, schema=schema, **grouped({"max_error_rate": 0.2, **given}))
    made.write("published", f"{tmp_path}/out")
    return docs


def quarantined(tmp_path: Path) -> dict[int, str]:
    rows = vd.quarantine("docs/made", store=vd.FragmentStore(root=f"{tmp_path}/store"))
    return {row["id"]: row["error"] for row in rows.to_pylist()}


def published(tmp_path: Path) -> list[int]:
    files = sorted((tmp_path / "out").glob("*.parquet"))
    return sorted(y for file in files for y in pq.read_table(file)["y"].to_pylist())


def doubles(*without: int) -> list[int]:
    return [2 * x for x in range(ROWS) if x not in without]


def test_faults_of_calls_loads_and_storage(tmp_path, local, materialize):
    # Storage that fails under the first runs, and then for a moment.
    docs = pipeline(tmp_path)
    for url, operation, does, message in [
        (f"{tmp_path}/src/a.parquet", "read", "denied", "Permission denied"),
        ("*/store/*/made/parts/*", "write", "no_space", "The disk is full"),
        ("*/manifests/*", "write", "denied", "Permission is denied"),
        ("*/out/*", "write", "no_space", "No space left on device"),
    ]:
        with testing.faults(testing.StorageFault(url, does, operation)) as injected:
            assert message in failure(materialize(docs, local, raises=False))
            assert injected.fired[0] > 0
        assert not list((tmp_path / "out").glob("*.parquet"))
    with testing.faults(
        testing.StorageFault("*/src/*", "disconnect", "read", times=2),
        testing.StorageFault("*/parts/*", "disconnect", times=1),
        testing.StorageFault("*/manifests/*", "disconnect", times=1),
        testing.StorageFault("*/out/*", "disconnect", calls=[2]),
    ) as injected:
        materialize(docs, local)
    assert injected.fired == (2, 0, 1, 1)  # the parts of `made` are those of the first runs
    assert published(tmp_path) == doubles()

    # Rows that fail by id and by count over all workers. What the run has finished is taken up.
    docs = pipeline(tmp_path, batch_size=1, concurrency=2, on_error="quarantine", max_error_rate=1)
    with testing.faults(
        testing.CallFault("made", ids=[7, 8], error="ValueError", message="of old"),
        testing.CallFault("docs/made", error="IndexError", ids=[13]),
        testing.CallFault("made", calls=[3, 9], error="KeyError"),
        testing.CallFault("other/made", ids=1),
    ) as injected:
        materialize(docs, local, config={"force": True})
    assert injected.fired == (2, 1, 2, 0)
    kinds = quarantined(tmp_path)
    assert (kinds.pop(7), kinds.pop(8), kinds.pop(13)) == ("ValueError", "ValueError", "IndexError")
    assert [*kinds.values()] == ["KeyError"] * 2
    assert published(tmp_path) == doubles(7, 8, 13, *kinds)
    assert metadata(materialize(docs, local), "made")["fragments_computed"] == 0

    # Calls that are repeated or halved.
    docs = pipeline(tmp_path, batch_size=5)
    with testing.faults(
        testing.CallFault("made", "disconnect", ids=3, times=1),
        testing.CallFault("made", "raise", ids=8, times=1, error="APIConnectionError"),
        testing.CallFault("made", "out_of_memory", ids=13, times=1),
    ) as injected:
        result = materialize(docs, local, config={"force": True})
    assert injected.fired == (1, 1, 1)
    assert published(tmp_path) == doubles()
    assert metadata(result, "made")["retries"] == 2

    # Loads.
    docs = pipeline(tmp_path, Doubler)
    with testing.faults(
        testing.LoadFault("Doubler", error="OSError", message="no weights"),
        testing.LoadFault("Other"),
    ) as injected:
        message = failure(materialize(docs, local, raises=False))
    assert "Doubler could not be constructed in a worker: OSError: no weights" in message
    assert injected.fired[0] > 0
    assert injected.fired[1] == 0
    with testing.faults(testing.LoadFault("Doubler", "kill", calls=1)) as injected:
        materialize(docs, local)
    assert injected.fired == (1,)
    assert published(tmp_path) == doubles()


def test_warm_workers_follow_the_block_and_forget_it(tmp_path, compute, materialize):
    """Between two runs without faults, of one process on Ray and of one compute on subprocesses."""
    docs = pipeline(tmp_path, Doubler, concurrency=1)
    known = []
    for turn in range(3):
        write_source(tmp_path / "src", {"id": range(5), "x": [turn] * 5})
        if turn == 1:
            with testing.faults(testing.CallFault("made", "disconnect", times=1)) as injected:
                result = materialize(docs, compute)
            assert injected.fired == (1,)
        else:
            result = materialize(docs, compute)
        known.append(set(read_stage(tmp_path / "store", "docs", "made")["known"].to_pylist()))
        if turn and isinstance(compute, vd.RayCompute):
            assert metadata(result, "made")["model_loads"] == 0
    assert known == [{"False"}, {"True"}, {"False"}]


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
