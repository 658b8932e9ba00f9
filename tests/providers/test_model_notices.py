"""Advice about a real model that is not moved to the GPU that its worker reserves."""

from __future__ import annotations

import dagster as dg
import numpy as np
import pytest
import torch

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source


class OnTheCpu:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)

    def __call__(self, batch):
        values = torch.as_tensor(batch["id"], dtype=torch.float32).reshape(-1, 1)
        return {"y": self.model(values).reshape(-1)}


def run_log(tmp_path, compute, materialize, fn, **given) -> str:
    """The log of a run of one stage over two partitions of rows."""
    write_source(tmp_path / "src", {"id": np.arange(20)})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    docs.map_batches(
        "y", fn, schema={"y": "FLOAT"}, batch_format="numpy", batch_size=5, **grouped(given)
    )
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(docs, compute, instance=instance)
        records = instance.get_records_for_run(result.run_id).records
        return "\n".join(record.event_log_entry.user_message for record in records)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch uses the GPU of the machine")
def test_a_reserved_gpu_that_torch_cannot_use_is_noticed_in_the_run(tmp_path, materialize):
    compute = vd.LocalCompute(num_cpus=2, num_gpus=1)
    log = run_log(tmp_path, compute, materialize, OnTheCpu, gpus=0.5, concurrency=2)
    assert log.count("'y': OnTheCpu reserves 0.5 GPU for a worker, and torch") == 1
    assert "finds no CUDA device. Install a build of torch" in log
    log = run_log(tmp_path / "none", compute, materialize, OnTheCpu)
    assert "reserves" not in log
