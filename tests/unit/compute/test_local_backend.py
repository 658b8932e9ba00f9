"""What the local backend takes of its machine."""

from __future__ import annotations

import pytest

from vane_dagster.compute.local_backend import own_gpus


@pytest.mark.parametrize(
    ("wanted", "taken", "gpus"),
    [
        (None, 0, ["4", "5", "6"]),
        (None, 1, ["5", "6"]),
        (None, 3, []),
        (1, 1, ["5"]),
        (5, 2, ["6"]),
    ],
)
def test_gpus_that_others_have_are_left_to_them(wanted, taken, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert own_gpus(wanted, taken) == gpus


def test_a_number_counts_where_no_gpu_is_listed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_gpus(2, 0) == ["0", "1"]
