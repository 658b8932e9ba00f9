"""Calls that convert files: as tasks of the run's Ray cluster, or in threads of this process."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from vane_dagster._container import usable_cpus
from vane_dagster.errors import ComputeError, first_line

T = TypeVar("T")


def call(function: Callable[..., T], *given: Any, on_cluster: bool, per_cpu: int) -> T:
    """Call a function once there is a free slot, and return its result.

    A task reserves no CPU, as I/O workers do: warm workers may hold all of them.
    """
    with _slots(on_cluster, per_cpu):
        if not on_cluster:
            return function(*given)
        ray: Any = importlib.import_module("ray")
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy="SPREAD")
        try:
            result: T = ray.get(task.remote(*given))
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), Exception):
                raise cause from None  # its own text has the worker's traceback
            raise ComputeError(
                f"a task that converts files failed: {type(error).__name__}: {first_line(error)}. "
                "Run the partition again, with more memory on the nodes if they had too little"
            ) from error
        return result


@functools.cache
def _slots(on_cluster: bool, per_cpu: int) -> threading.BoundedSemaphore:
    cpus = usable_cpus()
    if on_cluster:
        cpus = int(importlib.import_module("ray").cluster_resources().get("CPU", 1))
    return threading.BoundedSemaphore(per_cpu * max(1, cpus))
