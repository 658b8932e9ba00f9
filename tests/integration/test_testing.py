"""Faults that users inject into their own pipelines: by id, by count, and nowhere else."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import failure, metadata
from vane_dagster import _failpoints, testing
from vane_dagster.errors import DefinitionError
from vane_dagster.storage.filesystem import Location

ROWS = 20


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"y": [2 * x for x in batch["x"].to_pylist()]})


async def later(batch: pa.Table) -> pa.Table:
    await asyncio.sleep(0)
    return double(batch)


class Doubler:
    """As `double`, with a state; tells which plan its process knows."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        known = [str(_failpoints.VARIABLE in os.environ)] * batch.num_rows
        return double(batch).append_column("known", pa.array(known))


def pipeline(tmp_path: Path, fn=double, **given) -> vd.Pipeline:
    """source -> made -> published, four fragments of five rows."""
    if not (tmp_path / "src").exists():
        write_source(tmp_path / "src", {"id": range(ROWS), "x": range(ROWS)}, row_group_size=5)
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=5)
    schema = {"y": "BIGINT", **({"known": "VARCHAR"} if fn is Doubler else {})}
    made = docs.map_batches("made", fn, schema=schema, **{"max_error_rate": 0.2, **given})
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


# Calls


def test_rows_that_fail_by_id_on_any_compute(tmp_path, compute, materialize):
    docs = pipeline(tmp_path, on_error="quarantine")
    with testing.faults(
        testing.CallFault("made", ids=[7, 8], error="ValueError", message="of old"),
        testing.CallFault("docs/made", error="IndexError", ids=[13]),
        testing.CallFault("elsewhere", ids=1),
        testing.CallFault("other/made", ids=1),
    ) as injected:
        materialize(docs, compute)
        assert injected.fired[0] > 2  # the batch, and what it was halved into
    assert quarantined(tmp_path) == {7: "ValueError", 8: "ValueError", 13: "IndexError"}
    assert published(tmp_path) == doubles(7, 8, 13)
    assert injected.fired[2:] == (0, 0)


def test_the_pipeline_is_the_real_one(tmp_path, local, materialize):
    """What a disturbed run has finished is taken up, as its keys are those of the code itself."""
    docs = pipeline(tmp_path, batch_size=5, concurrency=1)
    with testing.faults(testing.CallFault("made", ids=18, message="in the last one")):
        told = failure(materialize(docs, local, raises=False))
    assert "InjectedError: in the last one" in told
    result = materialize(docs, local)
    assert metadata(result, "made")["fragments_reused"] >= 1
    assert published(tmp_path) == doubles()


def test_calls_are_counted_over_all_workers(tmp_path, local, materialize):
    docs = pipeline(tmp_path, batch_size=1, concurrency=2, on_error="null", max_error_rate=1)
    with testing.faults(
        testing.CallFault("made", calls=[3, 9], error="KeyError"),
        testing.CallFault("made", times=4, error="IndexError"),
    ) as injected:
        materialize(docs, local)
    assert injected.fired == (2, 4)
    errors = read_stage(tmp_path / "store", "docs", "made")["error"].to_pylist()
    kinds = sorted(error.partition(":")[0] for error in errors if error)
    assert kinds == ["IndexError"] * 4 + ["KeyError"] * 2


def test_calls_that_are_repeated_or_halved(tmp_path, local, materialize):
    docs = pipeline(tmp_path, batch_size=5)
    with testing.faults(
        testing.CallFault("made", "disconnect", ids=3, times=1),
        testing.CallFault("made", "raise", ids=8, times=1, error="APITimeoutError"),
        testing.CallFault("made", "out_of_memory", ids=13, times=1),
    ) as injected:
        result = materialize(docs, local)
    assert injected.fired == (1, 1, 1)
    assert published(tmp_path) == doubles()
    assert metadata(result, "made")["retries"] == 2


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


# Loads


def test_loads_that_fail(tmp_path, local, materialize):
    docs = pipeline(tmp_path, Doubler)
    with testing.faults(
        testing.LoadFault("Doubler", error="OSError", message="no weights"),
        testing.LoadFault("Other"),
    ) as injected:
        told = failure(materialize(docs, local, raises=False))
    assert "Doubler could not be constructed in a worker: OSError: no weights" in told
    assert injected.fired[0] > 0
    assert injected.fired[1] == 0

    with testing.faults(testing.LoadFault("Doubler", "kill", calls=1)) as injected:
        materialize(docs, local)
    assert injected.fired == (1,)
    assert published(tmp_path) == doubles()


# Workers that are warm


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


def test_a_plan_that_is_gone_does_nothing(tmp_path, monkeypatch):
    with testing.faults(testing.CallFault("made"), testing.StorageFault("*")) as injected:
        place = os.environ[_failpoints.VARIABLE]
        with pytest.raises(_failpoints._error_class("InjectedError")):
            _failpoints.at_call("docs/made", pa.array([1]))
    assert _failpoints.VARIABLE not in os.environ
    assert not os.path.exists(place)
    assert injected.fired == (1, 0)

    monkeypatch.setenv(_failpoints.VARIABLE, place)  # as in a worker of a killed run
    _failpoints.at_call("docs/made", pa.array([1]))
    asyncio.run(_failpoints.at_call_later("docs/made", pa.array([1])))
    _failpoints.at_load("Doubler")
    Location(str(tmp_path)).write("f", b"written")
    assert injected.fired == (1, 0)


# Storage


def test_each_operation_on_storage(tmp_path):
    folder = Location(str(tmp_path / "deep"))
    folder.write("f", b"1")
    with testing.faults(
        testing.StorageFault("*/f", "denied", "read"),
        testing.StorageFault("*/f", "no_space", times=1),
        testing.StorageFault("*/f", "denied", "delete"),
        testing.StorageFault("*/deep", "disconnect", "list", times=2),
        testing.StorageFault(f"file://{tmp_path}/deep/g", "disconnect", calls=1),
    ) as injected:
        with pytest.raises(vd.StoreError, match=r"cannot be written: .*No space left on device"):
            folder.write("f", b"2")
        folder.write("f", b"3")
        with pytest.raises(vd.StoreError, match=r"cannot be read: .*Permission denied"):
            folder.read("f")
        with pytest.raises(vd.StoreError, match=r"cannot be deleted from: .*Permission denied"):
            folder.delete(["f"])
        folder.move("f", folder, "g")
        assert list(folder.names()) == ["g"]
        # What does not pass is not tried again; what passes is.
        assert injected.fired == (1, 1, 1, 2, 1)
    assert folder.read("g") == b"3"


def test_storage_that_fails_under_a_run(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    for url, operation, does, told in [
        (f"{tmp_path}/src/a.parquet", "read", "denied", "Permission denied"),
        ("*/store/*/made/parts/*", "write", "no_space", "The disk is full"),
        ("*/manifests/*", "write", "denied", "Permission is denied"),
        ("*/out/*", "write", "no_space", "No space left on device"),
    ]:
        with testing.faults(testing.StorageFault(url, does, operation)) as injected:
            assert told in failure(materialize(docs, local, raises=False))
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


def run_killed(tmp_path: Path) -> None:
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    compute = vd.LocalCompute(num_cpus=1)
    assets = pipeline(tmp_path).build_assets()
    dg.materialize([assets], resources={"compute": compute, "store": store})


def test_a_run_that_is_killed_while_it_publishes(tmp_path, local, materialize):
    """A process that is started in the block follows it."""
    pipeline(tmp_path)
    fault = testing.StorageFault("*/out/*-*.parquet", "kill", calls=6)
    with testing.faults(fault) as injected:  # four are staged, and one is published
        process = multiprocessing.get_context("spawn").Process(target=run_killed, args=[tmp_path])
        process.start()
        process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert injected.fired == (1,)
    assert published(tmp_path) != doubles()
    result = materialize(pipeline(tmp_path), local)
    assert metadata(result, "made")["fragments_computed"] == 0
    assert published(tmp_path) == doubles()


# Declarations


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (testing.CallFault, ("",), "stage is ''; expected a text"),
        (testing.CallFault, (double,), "expected a text"),
        (testing.CallFault, ("made", "explode"), "does is 'explode'; expected one of 'raise', "),
        (testing.CallFault, ("made", "raise", [1], 1), "ids and calls are both given"),
        (testing.CallFault, ("made", "raise", []), "ids is empty"),
        (testing.CallFault, ("made", "raise", None, []), "calls is empty"),
        (testing.CallFault, ("made", "raise", None, 0), "calls is 0; expected a whole number"),
        (testing.CallFault, ("made", "raise", None, [1, "2"]), "calls is '2'; expected a whole"),
        (testing.CallFault, ("made", "raise", None, None, 0), "times is 0; expected a whole"),
        (testing.CallFault, ("made", "kill", 1, None, 1, "ValueError"), "for does='raise', not"),
        (testing.CallFault, ("made", "raise", 1, None, 1, "a b"), "expected the name of a class"),
        (testing.CallFault, ("made", "hang", 1, None, 1, None, "x"), "there is no error to tell"),
        (testing.LoadFault, ("Model", "no_space"), "does is 'no_space'; expected one of 'raise', "),
        (testing.StorageFault, ("*", "hang"), "does is 'hang'; expected one of 'no_space', "),
        (testing.StorageFault, ("*", "denied", "move"), "operation is 'move'; expected one of"),
        (testing.StorageFault, ("*", "denied", "read", None, None, 5), "message is 5; expected"),
    ],
)
def test_faults_that_are_declared_wrongly(kind, given, told):
    with pytest.raises(DefinitionError) as raised:
        kind(*given)
    assert told in str(raised.value)


def test_blocks_that_are_declared_wrongly():
    fault = testing.CallFault("made", ids="seven")
    refused = pytest.raises(DefinitionError, match=r"a list; expected CallFault")
    with refused, testing.faults([fault]):
        pass
    twice = pytest.raises(DefinitionError, match="give all in one block")
    with testing.faults(fault), twice, testing.faults(fault):
        pass
    assert _failpoints.VARIABLE not in os.environ


def test_equal_faults_are_told_apart_and_ids_are_compared_as_texts():
    fault = testing.CallFault("made", ids=(5, "b"), times=1)
    assert fault == testing.CallFault("made", ids=["5", "b"], times=1)
    assert hash(fault) == hash(testing.CallFault("made", ids=[5, "b"], times=1))
    with testing.faults(fault, fault) as injected:
        for ids in (["a"], ["b"], [5], [6]):
            with_error = pytest.raises(Exception, match=r"injected by vane_dagster\.testing")
            if set(ids) & {"b", 5}:
                with with_error:
                    _failpoints.at_call("docs/made", pa.array(ids))
            else:
                _failpoints.at_call("docs/made", pa.array(ids))
    assert injected.fired == (1, 1)


def test_importing_it_is_light():
    code = "import sys, vane_dagster.testing; print(*{'ray', 'torch', 'pyarrow.dataset'} & set("
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.modules))"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
