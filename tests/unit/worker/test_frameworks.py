"""What a worker knows of frameworks: errors, threads and devices, without importing any."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from vane_dagster.types.host_arrays import without_tensor
from vane_dagster.worker import frameworks


def error(name: str, text: str = "", base: type[BaseException] = Exception) -> BaseException:
    return type(name, (base,), {})(text)


OUT_OF_MEMORY = [
    error("OutOfMemoryError"),
    error("Child", base=type(error("CUDAOutOfMemoryError"))),
    error("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory"),
    error("ResourceExhaustedError", "OOM when allocating tensor with shape[8,8] and type float"),
    error("Fail", "[ONNXRuntimeError] : 1 : FAIL : Failed to allocate memory for requested buffer"),
    error("RuntimeException", "[ONNXRuntimeError] : CUDA failure 2: out of memory ; GPU=0"),
    error("XGBoostError", "cudaErrorMemoryAllocation: out of memory", ValueError),
    RuntimeError("CUDA error: out of memory"),
]
DEAD = [
    error("EngineDeadError"),
    error("AcceleratorError", "an illegal memory access"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("NCCL error: unhandled system error"),
    error("InternalError", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"),
    error("RuntimeException", "[ONNXRuntimeError] : CUDA failure 700: an illegal memory access"),
]
OTHERS = [
    ValueError("cannot parse 'he ran out of memory'"),
    ValueError("cannot parse 'CUDA error: an illegal memory access'"),
    MemoryError(),
    error("XlaRuntimeError", "INVALID_ARGUMENT"),
    RuntimeError("shapes do not match"),
    error("InternalError", "Graph execution error"),
    error("Fail", "[ONNXRuntimeError] : 1 : FAIL : Load model failed"),
]


@pytest.mark.parametrize("raised", [*OUT_OF_MEMORY, *DEAD, *OTHERS], ids=repr)
def test_errors_of_devices(raised):
    assert frameworks.is_out_of_memory(raised) is (raised in OUT_OF_MEMORY)
    assert frameworks.is_dead(raised) is (raised in DEAD)


class Tensor:
    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return np.arange(2)


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
    for name in frameworks._THREADS:
        monkeypatch.setenv(name, "9")
    before = pa.cpu_count()
    try:
        frameworks.set_threads(1)
        frameworks.free_memory()
    finally:
        pa.set_cpu_count(before)
    assert {os.environ[name] for name in frameworks._THREADS} == {"1"}
    assert torch.calls == [1, "empty_cache"]
    assert frameworks.device() == "A100"
    assert without_tensor(Tensor()).tolist() == [0, 1]


def test_memory_of_gpus_is_taken_as_needed_unless_a_variable_says_otherwise(monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    frameworks.share_gpus()
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_a_gpu_that_torch_never_used_is_reported(torch, monkeypatch):
    for name in frameworks._OTHER_GPU_USERS & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    assert frameworks.unused_gpu() == ""
    torch.cuda.is_initialized = lambda: False
    assert 'model.to("cuda")' in frameworks.unused_gpu()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    assert frameworks.unused_gpu() == "", "of another framework"


def test_no_framework_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    frameworks.set_threads(0)
    frameworks.free_memory()
    assert frameworks.device() == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert frameworks.device() == "gpu 1"
    assert frameworks.unused_gpu() == ""
    assert without_tensor([1]) == [1]
    assert "torch" not in sys.modules
