"""The names of vLLM's arguments, known without an import of vLLM, which takes seconds."""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path

from vane_dagster._keywords import similar
from vane_dagster._worker_process import is_worker

OPERATIONAL_ARGUMENTS = (
    "block_size",
    "cpu_offload_gb",
    "device",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "enable_chunked_prefill",
    "enable_log_requests",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "logging_config",
    "max_loras",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_parallel_loading_workers",
    "pipeline_parallel_size",
    "swap_space",
    "tensor_parallel_size",
)
"""Arguments of vLLM's engine that do not change answers."""
_DECLARED = re.compile(r"""^    ([a-z][a-z0-9_]*): |["']--([a-z][a-z0-9-]*)["']""", re.MULTILINE)
"""A field of a dataclass, or a flag of a parser."""


def misspelled(name: str) -> str | None:
    """Describe a name that the installed vLLM has neither as an argument nor as a server's flag.

    None without an installed vLLM, and in workers, which may have another one than the driver.
    """
    installed = _installed()
    if installed is None or name in installed or is_worker():
        return None
    return f"The vLLM that is installed here does not have it. {similar(name, installed)}".rstrip()


@functools.lru_cache(maxsize=1)
def _installed() -> frozenset[str] | None:
    """Return the names in the source of the installed vLLM; None without one, or if it moved them.

    Arguments that plugins of vLLM add are not in it.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    files = [folder / "engine" / "arg_utils.py", *folder.glob("entrypoints/**/cli_args.py")]
    texts = [file.read_text() for file in files if file.is_file()]
    found = frozenset(
        (field or flag.replace("-", "_"))
        for text in texts
        for field, flag in _DECLARED.findall(text)
    )
    return found if "max_model_len" in found else None
