"""What the local backend takes of its machine."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from vane_dagster.compute import local_backend
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


@pytest.mark.parametrize(
    ("code", "kills", "cause"),
    [
        (-signal.SIGKILL, 1, "memory"),
        (-signal.SIGKILL, 0, "unclear"),
        (-signal.SIGSEGV, 1, "crash"),
        (3, 0, "crash"),
    ],
)
def test_a_killed_worker_is_out_of_memory_if_the_kernel_has_killed_a_process_for_it(
    code: int, kills: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        pid = 1

        def wait(self, timeout: float) -> int:
            return code

    worker: Any = local_backend.WorkerProcess.__new__(local_backend.WorkerProcess)
    worker.process, worker._memory_kills = Ended(), 7
    monkeypatch.setattr(local_backend, "_memory_kills", lambda: 7 + kills)
    assert worker.ending()[1] == cause
