"""vLLM in the worker itself: continuous batching on the GPUs that the worker reserves."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from vane_dagster.errors import StageError, names
from vane_dagster.providers import guard
from vane_dagster.providers.base import Answer, PromptTooLong, Request
from vane_dagster.providers.registry import needs

_ADAPTER = "adapter"
_SAME = {"max_completion_tokens": "max_tokens"}
_REFUSED = frozenset(
    {
        "n",
        "detokenize",
        "logprobs",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprobs",
        "skip_clone",
        "stream_interval",
        "structured_outputs",
    }
)
"""Fields of vLLM's SamplingParams that are not the stage's to set: a row has one whole answer."""
_OPERATIONAL_ENGINE = (
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
    "load_format",
    "max_loras",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_parallel_loading_workers",
    "pipeline_parallel_size",
    "swap_space",
    "tensor_parallel_size",
)


class VllmProvider:
    """Generates with vLLM's asynchronous engine: each row is a request of its own.

    The engine takes requests in as others end, so that it never drains between batches; give the
    stage a `batch_size` and a `max_concurrency` whose product is at least the engine's
    ``max_num_seqs``. It stays loaded with its worker, and stages of the same model and options
    share it, whatever their sampling, adapters and formats.

    A model's chat template makes text of messages; without one, their contents are joined by blank
    lines. Sampling that the stage does not give is as the model's generation config has it;
    without ``max_tokens``, an answer may fill the model's length.

    Args:
        model: A name on the Hugging Face hub, or a folder.
        revision: Of the model and its tokenizer on the hub.
        tensor_parallel_size: GPUs that the model is spread over. Default: those that the worker
            reserves (`gpus_per_actor`), at least 1.
        lora: Folders of LoRA adapters by name; a stage picks one by ``"adapter"`` among its
            sampling parameters.
        chat_template: In place of the tokenizer's own.
        chat_template_kwargs: For the chat template.
        engine_kwargs: What vLLM's AsyncEngineArgs take: ``max_model_len``, ``quantization``,
            ``gpu_memory_utilization`` and so on. Prefix caching is on unless switched off.
    """

    OPERATIONAL = frozenset(
        {"tensor_parallel_size", *(f"engine_kwargs.{name}" for name in _OPERATIONAL_ENGINE)}
    )

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tensor_parallel_size: int | None = None,
        lora: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a worker has threads
        self._vllm = needs("vllm", "vllm", "vllm")
        self._sampling = needs("vllm.sampling_params", "vllm", "vllm")
        self._params = needs("vllm.renderers.params", "vllm", "vllm")
        requests = needs("vllm.lora.request", "vllm", "vllm")
        self._adapters = {
            name: requests.LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(sorted((lora or {}).items()), 1)
        }
        given = _engine_arguments(model, revision, tensor_parallel_size, engine_kwargs or {})
        if self._adapters:
            given = {"enable_lora": True, "max_loras": len(self._adapters), **given}
        known = [field.name for field in fields(self._vllm.AsyncEngineArgs)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"engine_kwargs has {names(unknown)}, which vLLM {self._vllm.__version__} does not "
                f"know; see vllm.AsyncEngineArgs for what it takes"
            )
        if not _has_gpu():
            # vLLM binds threads to cores by itself; with a worker's share it is many times slower.
            os.environ.pop("OMP_NUM_THREADS", None)
        guard.start()
        engine = needs("vllm.v1.engine.async_llm", "vllm", "vllm").AsyncLLM
        # Outside of any loop: the engine's tasks begin with its first request, in that one's loop.
        self._engine = engine.from_engine_args(self._vllm.AsyncEngineArgs(**given))
        self._defaults = dict(self._engine.model_config.get_diff_sampling_param())
        self._longest = int(self._engine.model_config.max_model_len)
        self._chat = self._params.ChatParams(
            chat_template=chat_template,
            chat_template_kwargs={"add_generation_prompt": True, **(chat_template_kwargs or {})},
        )
        tokenizer = self._engine.get_tokenizer()
        self._templated = bool(chat_template or getattr(tokenizer, "chat_template", True))

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine's process has died."""
        await self._engine.check_health()

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        began = time.perf_counter()
        sampling = dict(request.sampling)
        adapter = self._adapter(sampling.pop(_ADAPTER, None))
        params = self._sampling_params(sampling, request)
        prompt = await self._rendered(request)
        self._check_length(len(prompt["prompt_token_ids"]), params.max_tokens, sampling)
        id = f"{request.id}-{uuid.uuid4().hex}"
        steps = self._engine.generate(prompt, params, id, lora_request=adapter)
        *_, found = [step async for step in steps]  # one, of the whole answer
        answer = found.outputs[0]
        return Answer(
            answer.text,
            len(found.prompt_token_ids),
            len(answer.token_ids),
            found.num_cached_tokens or 0,
            answer.finish_reason or "",
            time.perf_counter() - began,
        )

    async def _rendered(self, request: Request) -> Any:
        """The prompt's tokens; of any length, so that the error of one too long is ours."""
        renderer = self._engine.renderer
        if self._templated:
            lengths = replace(renderer.default_chat_tok_params, max_total_tokens=None)
            messages = [dict(message) for message in request.messages]
            _, (prompt,) = await renderer.render_chat_async([messages], self._chat, lengths)
        else:
            text = "\n\n".join(message["content"] for message in request.messages)
            lengths = replace(renderer.default_cmpl_tok_params, max_total_tokens=None)
            (prompt,) = await renderer.render_cmpl_async([{"prompt": text}], lengths)
        return prompt

    def _check_length(self, prompt: int, most: int | None, sampling: Mapping[str, Any]) -> None:
        asked = "max_tokens" in sampling or "max_completion_tokens" in sampling
        wanted = most if asked and most else 1
        if prompt + wanted > self._longest:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens; the model takes {self._longest}, of which "
                f"{wanted} are for the answer" + (" (max_tokens)" if asked else "")
            )

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self._adapters:
            raise StageError(
                f"sampling_params has the adapter {name!r}; provider_options['lora'] has "
                f"{names(self._adapters, 20)}"
            )
        return self._adapters[name]

    def _sampling_params(self, sampling: Mapping[str, Any], request: Request) -> Any:
        """Parameters for a request, as vLLM takes them.

        Raises:
            StageError: If there is none of a name, or its value is refused.
        """
        kind = self._vllm.SamplingParams
        known = {n for n in kind.__struct_fields__ if not n.startswith("_")} - _REFUSED
        given = {_SAME.get(name, name): value for name, value in sampling.items()}
        if unknown := sorted(set(given) - known):
            raise StageError(
                f"sampling_params has {names(unknown)}, which provider 'vllm' does not take; it "
                f"takes {names(sorted({*known, *_SAME, _ADAPTER}), 100)}"
            )
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {int(token): value for token, value in bias.items()}
        held: dict[str, Any] = {}
        if request.choices:
            held["choice"] = list(request.choices)
        elif request.schema is not None:
            held["json"] = dict(request.schema)
        try:
            return kind(
                **{"max_tokens": None, **self._defaults, **given},
                output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
                structured_outputs=(
                    self._sampling.StructuredOutputsParams(**held) if held else None
                ),
            )
        except Exception as error:  # vLLM's own, or that of a type
            raise StageError(f"sampling_params are refused by vLLM: {error}") from error


def _engine_arguments(
    model: str, revision: str | None, parallel: int | None, engine: Mapping[str, Any]
) -> dict[str, Any]:
    size = parallel or engine.get("tensor_parallel_size") or reserved_gpus()
    given = {
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **engine,
        "model": model,
        "tensor_parallel_size": size,
    }
    if size > 1:  # not Ray's, which would ask the cluster for GPUs that the worker holds already
        given.setdefault("distributed_executor_backend", "mp")
    if revision is not None:
        given["revision"] = revision
        given.setdefault("tokenizer_revision", revision)
    return given


def _has_gpu() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")


def reserved_gpus() -> int:
    """GPUs that this process was given; at least 1, as vLLM counts a CPU so too."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(1, sum(device.strip() not in ("", "-1") for device in visible))
