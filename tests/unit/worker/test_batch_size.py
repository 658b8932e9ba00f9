"""The batch size that a worker finds: where throughput stops rising, within memory."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from support.udf_calls import row_stage, run_stage
from vane_dagster.pipeline.options import AUTO
from vane_dagster.worker.batch_size import BatchSizer


class Device:
    """Takes 10 ms per call and 10 us per row, like a device with a start-up cost per batch."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(0.01 + 1e-5 * len(batch))
        return pa.table({"size": [len(batch)] * len(batch)})


def found(cost, fits: int | None = None, calls: int = 200) -> BatchSizer:
    """What a worker finds whose batches cost seconds by their rows."""
    sizes = BatchSizer()
    for _ in range(calls):
        rows = sizes.of(AUTO, 10**9)
        if fits is not None and rows > fits:
            sizes.limit(rows // 2)
        else:
            sizes.learn(rows, cost(rows))
    return sizes


@pytest.mark.parametrize(
    ("fixed", "a_row", "least", "most"),
    [
        (0.01, 1e-5, 2048, 16_384),
        (0.01, 1e-3, 64, 128),
        (0.0, 1e-3, 16, 16),
        (1.0, 0.0, 65_536, 65_536),
    ],
)
def test_it_grows_until_throughput_stops_rising(fixed, a_row, least, most):
    sizes = found(lambda rows: fixed + a_row * rows)
    assert least <= sizes.used(AUTO) <= most
    rate = sizes.used(AUTO) / (fixed + a_row * sizes.used(AUTO))
    assert rate >= 0.8 * (1 / a_row if a_row else rate)


def test_it_stays_within_memory():
    sizes = found(lambda rows: 1.0, fits=300)
    assert 100 <= sizes.used(AUTO) <= 300
    assert sizes.of(4096, 10**6) <= 300


class OutOfMemoryError(RuntimeError):
    """Named like torch.cuda's error."""


def test_memory_that_runs_out_halves_the_batches_of_the_worker_and_costs_no_row(monkeypatch):
    sizes: list[int] = []
    freed: list[bool] = []
    monkeypatch.setattr("vane_dagster.worker.retry.free_memory", lambda: freed.append(True))

    def fn(batch: pa.Table) -> pa.Table:
        sizes.append(len(batch))
        if len(batch) > 8:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch

    stage = row_stage("map_batches", fn, schema={"id": "BIGINT"}, batch_size=50)
    assert run_stage(stage, pa.table({"id": range(200)})).num_rows == 200
    assert sizes[:4] == [50, 25, 12, 6]
    assert sizes.count(50) == 1, "the worker remembers"
    assert len(freed) == sum(size > 8 for size in sizes), "each time before the next attempt"


def test_a_stage_may_leave_the_size_to_its_worker():
    stage = row_stage("map_batches", Device, schema={"size": "BIGINT"}, batch_size="auto")
    table = run_stage(stage, pa.table({"id": range(10_000)}))
    sizes = table["size"].to_pylist()
    assert table["id"].to_pylist() == list(range(10_000))
    assert sizes[0] == 16
    assert max(sizes) > 16, "how far depends on this machine's other work"


def test_noise_of_small_last_batches_counts_for_nothing():
    sizes = BatchSizer()
    for _ in range(50):
        sizes.learn(3, 10.0)
    assert sizes.of(AUTO, 100) == 16
