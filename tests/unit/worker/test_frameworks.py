"""What a worker knows of frameworks: errors, threads and devices, without importing any."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from vane_dagster.worker import frameworks


def error(name: str, text: str = "", base: type[BaseException] = Exception) -> BaseException:
    return type(name, (base,), {})(text)


OUT_OF_MEMORY = [
    error("OutOfMemoryError"),
    error("Child", base=type(error("CUDAOutOfMemoryError"))),
    error("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory"),
    RuntimeError("CUDA error: out of memory"),
]
DEAD = [
    error("EngineDeadError"),
    error("AcceleratorError", "an illegal memory access"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("NCCL error: unhandled system error"),
]
OTHERS = [
    MemoryError(),
    ValueError("CUDA error: out of memory"),
    error("XlaRuntimeError", "INVALID_ARGUMENT"),
    RuntimeError("shapes do not match"),
]


@pytest.mark.parametrize("raised", [*OUT_OF_MEMORY, *DEAD, *OTHERS], ids=repr)
def test_errors_of_devices(raised):
    assert frameworks.is_out_of_memory(raised) is (raised in OUT_OF_MEMORY)
    assert frameworks.is_dead(raised) is (raised in DEAD)


class Tensor:
    def __init__(self, inference: bool = False) -> None:
        self._version, self._inference = 3, inference

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return np.arange(2)

    def is_inference(self) -> bool:
        return self._inference


@pytest.fixture
def torch(monkeypatch):
    calls: list[object] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_device_name=lambda: "A100",
        empty_cache=lambda: calls.append("empty_cache"),
    )
    module = SimpleNamespace(Tensor=Tensor, cuda=cuda, set_num_threads=calls.append, calls=calls)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_an_imported_framework_is_used(torch, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "9")
    before = pa.cpu_count()
    try:
        frameworks.set_threads(1)
        frameworks.free_memory()
    finally:
        pa.set_cpu_count(before)
    assert torch.calls == [1, "empty_cache"]
    assert frameworks.device() == "A100"
    assert frameworks.tensor_version(Tensor()) == 3
    assert frameworks.tensor_version(Tensor(inference=True)) is None
    assert frameworks.without_tensor(Tensor()).tolist() == [0, 1]


def test_no_framework_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    frameworks.set_threads(0)
    frameworks.free_memory()
    assert frameworks.device() == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert frameworks.device() == "gpu 1"
    assert frameworks.tensor_version(object()) is None
    assert frameworks.without_tensor([1]) == [1]
    assert "torch" not in sys.modules
