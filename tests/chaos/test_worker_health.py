"""Workers that start for too long, whose model is dead while they live, or that reach a limit."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.pool_models import alive, note, until
from support.pool_models import noted as lines
from support.results import failure, metadata

ROWS = 200


def doubled(batch: pa.Table) -> pa.Table:
    xs = batch["x"].to_pylist()
    return pa.table({"y": [2 * x for x in xs], "pid": [os.getpid()] * len(xs)})


def waits_for_its_weights() -> None:
    while True:
        time.sleep(0.1)


class Loaded:
    """Notes its process; `first` is whether it is the first instance."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        note(self.folder / "loads", os.getpid())
        self.first = len(lines(self.folder / "loads")) == 1


class Stuck(Loaded):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        waits_for_its_weights()

    def __call__(self, batch):
        return doubled(batch)


class Engine(Loaded):
    """Its first instance is dead after some calls, and says so when it is asked."""

    def __init__(self, folder: str, calls: int = 3) -> None:
        super().__init__(folder)
        self.left = calls

    @property
    def dead(self) -> bool:
        return self.first and self.left < 0

    def check_health(self) -> None:
        note(self.folder / "probes", os.getpid())
        if self.dead or (self.folder / f"dead-{os.getpid()}").exists():
            raise RuntimeError("the engine is gone")

    def __call__(self, batch):
        self.left -= 1
        if self.dead:
            raise ValueError("no answer")
        return doubled(batch)


class Silent(Engine):
    """Nothing tells that it is dead."""

    check_health = None


class Double(Loaded):
    def __call__(self, batch):
        return doubled(batch)


def pipeline(tmp_path: Path, fn, arguments=None, **kwargs) -> vd.Pipeline:
    ids = pa.array(range(ROWS), pa.int64())
    if not (tmp_path / "source").exists():
        write_source(tmp_path / "source", {"id": ids, "x": ids})
    source = vd.parquet(str(tmp_path / "source"))
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=20)
    given = {"folder": str(tmp_path), **(arguments or {})}
    options = {"schema": {"y": "BIGINT", "pid": "BIGINT"}, "batch_size": 10, "version": "1"}
    docs.map_batches("double", fn, fn_constructor_kwargs=given, **grouped({**options, **kwargs}))
    return docs


def read(tmp_path: Path) -> pa.Table:
    return read_stage(tmp_path / "store", "docs", "double")


def has_rows(tmp_path: Path, loads: int | None = None) -> None:
    assert read(tmp_path)["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert loads is None or len(lines(tmp_path / "loads")) == loads


def test_a_start_that_takes_too_long_tells_where_it_is(tmp_path, cluster, materialize):
    compute = vd.RayCompute(cluster=cluster)
    docs = pipeline(tmp_path, Stuck, startup_timeout_s=3)

    message = failure(materialize(docs, compute, raises=False))

    assert "Stuck was not constructed within 3 seconds" in message
    assert "raise startup_timeout_s" in message
    assert "in waits_for_its_weights" in message
    assert "local_worker.py" not in message
    assert "threading.py" not in message
    (pid,) = lines(tmp_path / "loads")
    until(lambda: not alive(pid), "the worker ends")


# A model that is dead while its process lives


def test_a_warm_model_that_is_dead_by_the_next_run_is_replaced(tmp_path, cluster, materialize):
    compute = vd.RayCompute(cluster=cluster)
    docs = pipeline(tmp_path, Engine, {"calls": 10**6})
    materialize(docs, compute)
    (pid,) = set(read(tmp_path)["pid"].to_pylist())
    (tmp_path / f"dead-{pid}").touch()

    materialize(docs, compute, config={"force": True})

    assert pid not in read(tmp_path)["pid"].to_pylist()
    has_rows(tmp_path, loads=2)


def test_failures_at_fragments_in_a_row_replace_the_worker(tmp_path, local, materialize):
    options = {"on_error": "quarantine", "max_error_rate": 1.0, "concurrency": 1}
    docs = pipeline(tmp_path, Silent, {"calls": 8}, **options)

    result = materialize(docs, local)

    assert len(lines(tmp_path / "loads")) == 2
    aside = metadata(result, "double")["rows_quarantined"]
    assert 0 < aside <= 3 * 20
    assert read(tmp_path).num_rows == ROWS - aside

    materialize(docs, local, config={"retry_quarantined": True})
    has_rows(tmp_path)


def test_a_worker_is_replaced_at_its_limit(tmp_path, local, materialize):
    materialize(pipeline(tmp_path, Double, max_batches=5), local)

    has_rows(tmp_path)
    batches = [n / 10 for n in Counter(read(tmp_path)["pid"].to_pylist()).values()]
    assert len(batches) >= 3
    assert max(batches) <= 2 * 5, "what it had queued is done too"
