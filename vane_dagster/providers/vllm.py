"""vLLM in the worker itself: continuous batching on the GPUs that the worker reserves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vane_dagster.errors import names
from vane_dagster.providers.base import Answer, Request, SamplingRefused
from vane_dagster.providers.openai import chat_messages
from vane_dagster.providers.vllm_engine import VllmEngine, has_gpu

_ADAPTER = "adapter"
_SAME = {"max_completion_tokens": "max_tokens"}


class VllmProvider(VllmEngine):
    """Generates with vLLM's asynchronous engine; each row is a separate request.

    The engine starts new requests as others finish, so it never drains between batches. Choose a
    `batch_size` and a `max_concurrency` with a product of at least the engine's ``max_num_seqs``.
    The engine stays loaded in its worker. Stages with the same model and options share it, even if
    their sampling, adapters or formats differ.

    The model's chat template renders the messages; without one, their contents are joined by blank
    lines. Sampling parameters that the stage does not set follow the model's generation config.
    Without ``max_tokens``, an answer may fill the model's length.

    Images and sounds are given to vLLM's own processor of the model.
    """

    @classmethod
    def content_kinds(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Provider`."""
        return frozenset({"image", "image url", "audio"})

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
        engine_kwargs = dict(engine_kwargs or {})
        if lora:
            engine_kwargs = {"enable_lora": True, **engine_kwargs}
            engine_kwargs["max_loras"] = _slots(len(lora), engine_kwargs.get("max_loras"))
        super().__init__(model, revision, tensor_parallel_size, engine_kwargs)
        from vllm.lora.request import LoRARequest
        from vllm.renderers.params import ChatParams

        self._adapters = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(sorted((lora or {}).items()), 1)
        }
        self._defaults = dict(self._engine.model_config.get_diff_sampling_param())
        chat = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        self._chat = ChatParams(chat_template, chat_template_kwargs=chat)
        tokenizer = self._engine.get_tokenizer()
        self._templated = bool(chat_template or getattr(tokenizer, "chat_template", True))

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        sampling = dict(request.sampling)
        adapter = self._adapter(sampling.pop(_ADAPTER, None))
        params = self._sampling_params(sampling, request)
        prompt = await self._rendered(request)
        id = f"{request.id}-{next(self._numbers)}"
        steps = self._engine.generate(prompt, params, id, lora_request=adapter)
        *_, found = [step async for step in steps]  # a single step with the whole answer
        answer = found.outputs[0]
        return Answer(
            answer.text,
            len(found.prompt_token_ids),
            len(answer.token_ids),
            found.num_cached_tokens or 0,
            answer.finish_reason or "",
        )

    async def _rendered(self, request: Request) -> Any:
        """Return the prompt's tokens."""
        texts = [message["content"] for message in request.messages]
        if not self._templated and all(isinstance(text, str) for text in texts):
            return await self._tokens("\n\n".join(texts))
        messages = chat_messages(request.messages)
        _, (prompt,) = await self._engine.renderer.render_chat_async([messages], self._chat)
        return prompt

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self._adapters:
            raise SamplingRefused(
                f"sampling_params has the adapter {name!r}; the model's option 'lora' has "
                f"{names(self._adapters, 20)}"
            )
        return self._adapters[name]

    def _sampling_params(self, sampling: Mapping[str, Any], request: Request) -> Any:
        """Return vLLM's parameters for a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        given = {_SAME.get(name, name): value for name, value in sampling.items()}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {int(token): value for token, value in bias.items()}
        held: dict[str, Any] = {}
        if request.choices:
            held["choice"] = list(request.choices)
        elif request.schema is not None:
            held["json"] = dict(request.schema)
        try:
            return SamplingParams(
                **{"max_tokens": None, **self._defaults, **given},
                n=1,  # a row has one whole answer
                detokenize=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # nothing else references them
                structured_outputs=(StructuredOutputsParams(**held) if held else None),
            )
        except Exception as error:  # vLLM's own error, or a type error
            raise SamplingRefused(f"sampling_params are refused by vLLM: {error}") from error


def _slots(adapters: int, asked: int | None) -> int:
    """Return the number of adapter slots in the model.

    vLLM's kernels for CPUs use the last slot for requests without an adapter: `lora/ops/torch_ops`
    uses the index -1, which means none, as an array index. One slot is therefore kept empty there.
    """
    return asked or adapters if has_gpu() else max(asked or 0, adapters + 1)
