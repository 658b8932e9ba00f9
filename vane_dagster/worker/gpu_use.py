"""The use of the worker's GPUs, by NVML, if the package `nvidia-ml-py` is installed."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from typing import Any

from vane_dagster.worker.reports import GpuUse

_PERIOD_SECONDS = 0.1


class GpuMeter:
    """Samples the GPUs that this worker reserves, on a thread, from its construction on."""

    def __init__(self) -> None:
        self._nvml, self._devices = _reserved()
        self._shares: list[float] = []
        self._memory = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self._devices:
            self._thread.start()

    def stop(self, seconds: float) -> GpuUse:
        """End the samples, and return the use for the seconds that they stand for."""
        self._end.set()
        if self._devices:
            self._thread.join()
        if not self._shares:
            return GpuUse()
        return GpuUse(seconds, seconds * sum(self._shares) / len(self._shares), self._memory)

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(_PERIOD_SECONDS)
            try:
                rates = [self._nvml.nvmlDeviceGetUtilizationRates(each) for each in self._devices]
                memory = [self._nvml.nvmlDeviceGetMemoryInfo(each) for each in self._devices]
            except self._nvml.NVMLError:  # such as in a MIG slice, which has no utilization
                return
            self._shares.append(sum(each.gpu for each in rates) / 100 / len(rates))
            self._memory = sum(each.used for each in memory)


@functools.cache
def _reserved() -> tuple[Any, list[Any]]:
    """Return NVML, and the GPUs that this worker reserves; none if NVML does not know them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    if names == [""]:
        return None, []
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
        return nvml, [by_index(int(each)) if each.isdigit() else by_uuid(each) for each in names]
    except Exception:  # NVML, its package or the GPU is missing
        return None, []
