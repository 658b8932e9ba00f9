"""How busy the GPU is, by NVML."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

_PERIOD_S = 0.05


class Utilization:
    """Samples the share of time in which the first GPU ran a kernel; nothing without one."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.device: str | None = None
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.device = str(pynvml.nvmlDeviceGetName(self._handle))
            self._nvml = pynvml
        except Exception as error:  # NVML, its package or a GPU is missing
            print(f"No figures of NVML: {type(error).__name__}: {error}", file=sys.stderr)

    def __enter__(self) -> Utilization:
        if self._nvml:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._nvml:
            self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(_PERIOD_S):
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            self._samples.append((time.time(), int(rates.gpu)))

    def busy(self, began: float, ended: float) -> float | None:
        """Return the mean share between two times, from 0 to 1, or None without samples."""
        found = [share for moment, share in self._samples if began <= moment <= ended]
        return sum(found) / len(found) / 100 if found else None
