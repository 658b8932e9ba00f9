"""The use of the worker's GPUs, by NVML, if the package `nvidia-ml-py` is installed."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from vane_dagster.worker.reports import GpuUse


def gpu_use(since: float, seconds: float) -> GpuUse:
    """Measure the GPUs of this worker.

    Args:
        since: Unix time in seconds from which it counts. NVML keeps samples of about 20 seconds.
        seconds: Seconds that the measurement stands for.
    """
    nvml, devices = _devices()
    shares, memory = [], 0
    for device in devices:
        try:
            shares.append(_busy_share(nvml, device, since))
            memory += nvml.nvmlDeviceGetMemoryInfo(device).used
        except nvml.NVMLError:  # such as in a MIG slice, which has no utilization
            return GpuUse()
    return GpuUse(seconds, seconds * sum(shares) / len(shares), memory) if shares else GpuUse()


@functools.cache
def _devices() -> tuple[Any, list[Any]]:
    """Return NVML, and the GPUs that this worker reserves; none if NVML does not know them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, [
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.strip().isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name.strip())
            for name in filter(None, names)
        ]
    except Exception:  # NVML, its package or the GPU is missing
        return None, []


def _busy_share(nvml: Any, device: Any, since: float) -> float:
    """Return the share of time in which a GPU ran a kernel: since a time, or at last."""
    try:
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = nvml.nvmlDeviceGetSamples(device, kind, int(since * 1e6))
        found = [float(sample.sampleValue.uiVal) for sample in samples]
    except nvml.NVMLError:  # there is none yet, or the GPU keeps none
        found = []
    return (
        sum(found) / len(found) if found else nvml.nvmlDeviceGetUtilizationRates(device).gpu
    ) / 100
