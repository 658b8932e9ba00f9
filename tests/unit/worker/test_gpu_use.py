"""What is measured of a worker's GPUs, with a stand-in for NVML, which needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vane_dagster.worker import gpu_use
from vane_dagster.worker.gpu_use import GpuMeter
from vane_dagster.worker.reports import GpuUse


class NvmlError(Exception):
    pass


class Nvml(SimpleNamespace):
    """Two GPUs, busy 80% and 40%; a MIG slice has no utilization."""

    NVMLError = NvmlError

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return ["GPU-a", "GPU-b"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, device: str) -> SimpleNamespace:
        if device.startswith("MIG"):
            raise NvmlError
        return SimpleNamespace(gpu={"GPU-a": 80, "GPU-b": 40}[device])

    def nvmlDeviceGetMemoryInfo(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(used=100)


@pytest.fixture(autouse=True)
def _nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    gpu_use._reserved.cache_clear()
    yield
    gpu_use._reserved.cache_clear()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("0", GpuUse(2.0, 1.6, 100)),
        ("0, 1", GpuUse(2.0, 1.2, 200)),
        ("GPU-b", GpuUse(2.0, 0.8, 100)),
        ("MIG-c", GpuUse()),
        ("7", GpuUse()),
        ("", GpuUse()),
    ],
)
def test_the_gpus_that_a_worker_reserves_are_measured(devices, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert GpuMeter().stop(2.0) == expected


def test_without_the_package_nothing_is_measured(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter().stop(2.0).utilization is None


def test_the_use_of_calls_adds_up():
    used = GpuUse(2.0, 1.0, 100) + GpuUse(2.0, 2.0, 300) + GpuUse()
    assert (used.utilization, used.memory) == (0.75, 300)
