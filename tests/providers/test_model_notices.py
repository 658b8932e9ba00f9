"""Advice about real models: loaded on import, or not moved to the GPU that a worker reserves."""

from __future__ import annotations

import dagster as dg
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from vane_dagster.fingerprint.loaded_models import models_on_import

linear = torch.nn.Linear(1, 1)
bert = BertModel(
    BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
)
activation = torch.nn.Sigmoid()


def by_torch(batch):
    values = torch.as_tensor(batch["id"], dtype=torch.float32).reshape(-1, 1)
    return {"y": linear(values).reshape(-1)}


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


def test_real_models_are_known():
    bert_text, linear_text = models_on_import([__name__])  # `activation` has no weights
    assert f"{__name__}.bert is a BertModel that is loaded" in bert_text
    assert f"{__name__}.linear is a Linear that is loaded" in linear_text


def test_a_model_loaded_on_import_is_noticed_in_the_run(tmp_path, materialize):
    log = run_log(tmp_path, vd.LocalCompute(num_cpus=1), materialize, by_torch)
    assert (
        log.count(f"{__name__}.linear is a Linear that is loaded when the module is imported") == 1
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch uses the GPU of the machine")
def test_a_reserved_gpu_that_torch_cannot_use_is_noticed_in_the_run(tmp_path, materialize):
    compute = vd.LocalCompute(num_cpus=2, num_gpus=1)
    log = run_log(tmp_path, compute, materialize, OnTheCpu, gpus=0.5, concurrency=2)
    assert log.count("'y': OnTheCpu reserves 0.5 GPU for a worker, and torch") == 1
    assert "finds no CUDA device. Install a build of torch" in log
    log = run_log(tmp_path / "none", compute, materialize, OnTheCpu)
    assert "reserves" not in log
