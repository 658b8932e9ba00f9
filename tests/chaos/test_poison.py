"""Rows whose exceptions are hard to handle, and code that closes what belongs to the worker."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import resource
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.poison import EXCEPTIONS
from support.results import failure

ROWS = 20
BAD = 7


# In a run


def plain(batch):
    for name in batch["kind"].to_pylist():
        if name:
            raise EXCEPTIONS[name]()
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


async def later(batch):
    await asyncio.sleep(0)
    return plain(batch)


async def in_a_task(batch):
    """Raised in a task of the user's own: asyncio ends its loop by some."""
    return await asyncio.create_task(later(batch))


class Column:
    def __init__(self, batch) -> None:
        self.batch = batch

    def __iter__(self):
        return iter(plain(self.batch)["y"])


def output(batch):
    return {"y": Column(batch)}


class Constructor:
    def __init__(self, name: str) -> None:
        raise EXCEPTIONS[name]()

    def __call__(self, batch):
        return plain(batch)


def pipeline(tmp_path: Path, *fns, kinds=(), **kwargs) -> vd.Pipeline:
    """A stage for each function, with its name."""
    kinds = [*kinds, *[None] * ROWS]
    source = {"id": pa.array(range(len(kinds)), pa.int64()), "kind": pa.array(kinds, pa.string())}
    write_source(tmp_path / "source", source)
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id="id")
    given = {"schema": {"y": "BIGINT"}, "batch_size": 8, "version": "1", "concurrency": 1}
    options = {"on_error": "quarantine", "max_error_rate": 0.9, "max_retries": 0}
    for fn in fns:
        more = {"max_concurrency": 4} if fn is cancels_itself else {}
        docs.map_batches(fn.__name__, fn, **grouped({**given, **options, **more, **kwargs}))
    return docs


@pytest.mark.parametrize(
    ("fn", "timeout_s", "on_ray"), [(output, 60, True), (in_a_task, None, False)]
)
def test_each_poison_row_is_quarantined_alone(
    fn, timeout_s, on_ray, tmp_path, local, cluster, materialize
):
    kinds = list(EXCEPTIONS)
    docs = pipeline(tmp_path, fn, kinds=kinds, timeout_s=timeout_s)

    materialize(docs, vd.RayCompute(cluster=cluster) if on_ray else local)

    ys = read_stage(tmp_path / "store", "docs", fn.__name__)["y"].to_pylist()
    assert ys == [2 * i for i in range(len(kinds), len(kinds) + ROWS)]
    rows = vd.quarantine(f"docs/{fn.__name__}", store=str(tmp_path / "store")).to_pylist()
    found = {kinds[row["id"]]: row for row in rows}
    assert list(found) == kinds
    assert found["KeyboardInterrupt"]["message"] == "stop"
    assert found["CancelledError"]["error"] == "CancelledError"
    assert found["OnlyHere"]["message"] == "of the worker alone"
    assert len(found["Huge"]["message"]) == 4000
    group = found["BaseExceptionGroup"]["message"]
    assert "ValueError: the first; KeyboardInterrupt: the second" in group


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "Surrogates"])
def test_a_constructor_that_raises_it_fails_the_stage(name, tmp_path, local, materialize):
    docs = pipeline(tmp_path, Constructor, fn_constructor_kwargs={"name": name})

    message = failure(materialize(docs, local, raises=False))

    kind = "ValueError" if name == "Surrogates" else name
    assert f"Constructor could not be constructed in a worker: {kind}" in message
    assert "raise EXCEPTIONS[name]()" in message


# File descriptors


def closes(batch):
    if BAD in batch["id"].to_pylist():
        os.closerange(3, 1024)
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


def reuses(batch):
    """Has files of its own under the numbers that the worker's were closed at."""
    if BAD in batch["id"].to_pylist():
        os.closerange(3, 1024)
        for _ in range(64):
            os.open("/dev/null", os.O_RDWR)
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


def leaks(batch):
    if BAD in batch["id"].to_pylist():
        builtins.kept = []
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        with contextlib.suppress(OSError):
            while True:
                # SIM115: the descriptors are to stay open.
                builtins.kept.append(open("/dev/null"))  # noqa: SIM115  # kept open
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


# Processes and tasks


def forks(batch):
    if BAD in batch["id"].to_pylist() and os.fork() == 0:
        raise ValueError("of the child")
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


async def forks_later(batch):
    return forks(batch)


async def cancels_itself(batch):
    if BAD in batch["id"].to_pylist():
        asyncio.current_task().cancel()
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


@pytest.mark.parametrize(
    ("errors", "on_ray"),
    [
        ({closes: "WorkerDied"}, True),
        (
            {
                reuses: "WorkerDied",
                leaks: "WorkerDied",
                forks: None,  # the child is ended
                forks_later: None,
                cancels_itself: "CancelledError",
            },
            False,
        ),
    ],
    ids=["ray", "subprocesses"],
)
def test_what_code_does_to_its_worker_costs_its_row_at_most(
    errors, on_ray, tmp_path, local, cluster, materialize
):
    compute = vd.RayCompute(cluster=cluster) if on_ray else local
    materialize(pipeline(tmp_path, *errors), compute)

    for fn, error in errors.items():
        ys = read_stage(tmp_path / "store", "docs", fn.__name__)["y"].to_pylist()
        assert ys == [2 * i for i in range(ROWS) if error is None or i != BAD], fn
        rows = vd.quarantine(f"docs/{fn.__name__}", store=str(tmp_path / "store")).to_pylist()
        assert [(row["id"], row["error"]) for row in rows] == ([(BAD, error)] if error else []), fn
