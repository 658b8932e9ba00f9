"""The provider "vllm" before it has an engine."""

from __future__ import annotations

import sys

import pytest

from vane_dagster.providers.vllm import VllmProvider
from vane_dagster.providers.vllm_engine import reserved_gpus

pytestmark = pytest.mark.usefixtures("vllm_variables")


# Without an engine


def test_a_missing_vllm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'vane-dagster\[vllm\]'"):
        VllmProvider("m")


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 1), ("", 1), ("-1", 1), ("3", 1), ("0,2", 2), ("GPU-a,GPU-b", 2)]
)
def test_a_model_is_spread_over_the_gpus_that_its_worker_holds(visible, count, monkeypatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert reserved_gpus() == count
