"""Support for deep learning frameworks: tensors, devices, threads and errors.

A framework is used only if the process has already imported it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping

import pyarrow as pa
import threadpoolctl

from vane_dagster.retries import class_names

# Classes of errors. One counts if its message has one of the texts; always if there are none.
_Table = Mapping[str, tuple[str, ...]]
_OUT_OF_MEMORY: _Table = {
    "OutOfMemoryError": (),  # torch, CuPy
    "CUDAOutOfMemoryError": (),
    "RuntimeError": ("CUDA error: out of memory",),
    "XlaRuntimeError": ("RESOURCE_EXHAUSTED",),  # JAX
    "JaxRuntimeError": ("RESOURCE_EXHAUSTED",),
    "ResourceExhaustedError": ("OOM", "out of memory", "Out of memory"),  # TensorFlow
    "XGBoostError": ("out of memory", "Failed to allocate"),
    "Fail": ("Failed to allocate memory",),  # ONNX Runtime
    "RuntimeException": ("Failed to allocate memory", "CUDA failure 2:"),
}
_DEAD: _Table = {
    **dict.fromkeys(
        ("EngineDeadError", "AcceleratorError", "DeviceLostError", "BrokenProcessPool"), ()
    ),
    "RuntimeError": ("CUDA error:", "HIP error:", "device-side assert", "NCCL error"),
    **dict.fromkeys(  # of TensorFlow, ONNX Runtime and XGBoost
        ("InternalError", "Fail", "RuntimeException", "XGBoostError"),
        ("illegal memory access", "CUDA_ERROR_ILLEGAL_ADDRESS", "device-side assert"),
    ),
}
_OTHER_GPU_USERS = frozenset(
    {"vllm", "sglang", "tensorflow", "jax", "onnxruntime", "ctranslate2", "llama_cpp", "cupy",
     "tensorrt", "tensorrt_llm", "numba.cuda", "cudf", "xgboost", "faiss"}
)  # fmt: skip
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
"""Variables that a worker sets to its number of threads."""
_GROW = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables by which TensorFlow and JAX take memory of a GPU as needed, not all of it at once."""


def set_threads(threads: int) -> None:
    """Set the number of threads of numeric libraries, including those imported later."""
    if threads < 1:
        return
    for name in _THREADS:
        os.environ[name] = str(threads)
    pa.set_cpu_count(threads)
    threadpoolctl.threadpool_limits(threads)  # those of libraries that are loaded, such as BLAS
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def share_gpus() -> None:
    """Let frameworks imported later leave memory of a GPU to others, unless variables say not to.

    Workers may share a GPU: by fractions, or where a stage that is done keeps its model warm.
    """
    for name, value in _GROW.items():
        os.environ.setdefault(name, value)


def device() -> str:
    """Return the device that this process computes on: the name of the GPU in use, or "cpu"."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return f"gpu {visible}" if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else "cpu"


def unused_gpu() -> str:
    """Return that torch has not used a GPU in this process; empty if it has, or others may have.

    Other frameworks compute on GPUs by themselves, or in processes of their own.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized() or _OTHER_GPU_USERS & sys.modules.keys():
        return ""
    return (
        "torch has used no memory of it after a batch. Move the model there in __init__, "
        'model.to("cuda"), and its inputs in each call; or reserve no GPU. It needs a build of '
        "torch for the worker's GPU"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device is out of memory."""
    return _is_among(error, _OUT_OF_MEMORY)


def _is_among(error: BaseException, table: _Table) -> bool:
    message, texts = str(error), (table[name] for name in class_names(error) & table.keys())
    return any(not each or any(text in message for text in each) for each in texts)


def free_memory() -> None:
    """Release the device memory that a framework caches."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_dead(error: BaseException) -> bool:
    """Return whether an error means that the process has lost its engine or device.

    After an illegal access or a failed assertion of a kernel, each later CUDA call in the process
    fails with the same error:
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, cudaError.
    """
    return not is_out_of_memory(error) and _is_among(error, _DEAD)
