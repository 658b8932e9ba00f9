"""vLLM in the worker itself: continuous batching on the GPUs that the worker reserves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vane_dagster.errors import names
from vane_dagster.providers.base import Answer, PromptTooLong, Request, SamplingRefused
from vane_dagster.providers.registry import needs
from vane_dagster.providers.vllm_engine import VllmEngine, has_gpu

_ADAPTER = "adapter"
_SHORT = 4000
"""Prompts of fewer characters are tokenized in the event loop; longer ones in a thread."""
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
"""Fields of vLLM's SamplingParams that a stage cannot set: a row has one whole answer."""


class VllmProvider(VllmEngine):
    """Generates with vLLM's asynchronous engine; each row is a separate request.

    The engine starts new requests as others finish, so it never drains between batches. Choose a
    `batch_size` and a `max_concurrency` with a product of at least the engine's ``max_num_seqs``.
    The engine stays loaded in its worker. Stages with the same model and options share it, even if
    their sampling, adapters or formats differ.

    The model's chat template renders the messages; without one, their contents are joined by blank
    lines. Sampling parameters that the stage does not set follow the model's generation config.
    Without ``max_tokens``, an answer may fill the model's length.
    """

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
        self._sampling = needs("vllm.sampling_params", "vllm", "vllm")
        self._params = needs("vllm.renderers.params", "vllm", "vllm")
        requests = needs("vllm.lora.request", "vllm", "vllm")
        self._adapters = {
            name: requests.LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(sorted((lora or {}).items()), 1)
        }
        self._defaults = dict(self._engine.model_config.get_diff_sampling_param())
        chat = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        self._chat = self._params.ChatParams(chat_template, chat_template_kwargs=chat)
        self._text = self._params.ChatParams(
            chat_template, chat_template_kwargs={**chat, "tokenize": False}
        )
        tokenizer = self._engine.get_tokenizer()
        self._encode = _TokenizerBatch(tokenizer) if getattr(tokenizer, "is_fast", False) else None
        fields = self._vllm.SamplingParams.__struct_fields__
        self._known = {name for name in fields if not name.startswith("_")} - _REFUSED
        self._templated = bool(chat_template or getattr(tokenizer, "chat_template", True))

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        sampling = dict(request.sampling)
        adapter = self._adapter(sampling.pop(_ADAPTER, None))
        params = self._sampling_params(sampling, request)
        prompt = await self._rendered(request)
        self._check_length(len(prompt["prompt_token_ids"]), params.max_tokens, sampling)
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
        """Return the prompt's tokens, without a length limit: the provider raises its own error."""
        if not self._templated:
            return await self._tokens("\n\n".join(m["content"] for m in request.messages))
        renderer = self._engine.renderer
        messages = [dict(message) for message in request.messages]
        if self._encode is None or sum(len(message["content"]) for message in messages) >= _SHORT:
            lengths = replace(renderer.default_chat_tok_params, max_total_tokens=None)
            _, (prompt,) = await renderer.render_chat_async([messages], self._chat, lengths)
            return prompt
        _, text = renderer.render_messages(messages, self._text)
        tokens = await self._encode(text["prompt"])
        return renderer.process_for_engine({"prompt_token_ids": tokens}, time.time())

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
            raise SamplingRefused(
                f"sampling_params has the adapter {name!r}; the model's option 'lora' has "
                f"{names(self._adapters, 20)}"
            )
        return self._adapters[name]

    def _sampling_params(self, sampling: Mapping[str, Any], request: Request) -> Any:
        """Return vLLM's parameters for a request."""
        given = {_SAME.get(name, name): value for name, value in sampling.items()}
        if unknown := sorted(set(given) - self._known):
            raise SamplingRefused(
                f"sampling_params has {names(unknown)}, which provider 'vllm' does not take; it "
                f"takes {names(sorted({*self._known, *_SAME, _ADAPTER}), 100)}"
            )
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {int(token): value for token, value in bias.items()}
        held: dict[str, Any] = {}
        if request.choices:
            held["choice"] = list(request.choices)
        elif request.schema is not None:
            held["json"] = dict(request.schema)
        try:
            return self._vllm.SamplingParams(
                **{"max_tokens": None, **self._defaults, **given},
                output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # nothing else references them
                structured_outputs=(
                    self._sampling.StructuredOutputsParams(**held) if held else None
                ),
            )
        except Exception as error:  # vLLM's own error, or a type error
            raise SamplingRefused(f"sampling_params are refused by vLLM: {error}") from error


class _TokenizerBatch:
    """Tokenizes all texts that arrive in one turn of the event loop in one call.

    One call per text takes a tokenizer several times as long.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[tuple[str, asyncio.Future[list[int]]]] = []

    async def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        self._waiting.append((text, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._answer)
        return await future

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        if wanted := [(text, future) for text, future in waiting if not future.done()]:
            self._tell(wanted)

    def _tell(self, wanted: Sequence[tuple[str, asyncio.Future[list[int]]]]) -> None:
        try:
            texts = [text for text, _ in wanted]
            found = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception as error:
            if len(wanted) == 1:
                wanted[0][1].set_exception(error)
                return
            for one in wanted:  # the error concerns one text; the others must not fail
                self._tell([one])
            return
        for (_, future), tokens in zip(wanted, found):
            future.set_result(tokens)


def _slots(adapters: int, asked: int | None) -> int:
    """Return the number of adapter slots in the model.

    vLLM's kernels for CPUs use the last slot for requests without an adapter: `lora/ops/torch_ops`
    uses the index -1, which means none, as an array index. One slot is therefore kept empty there.
    """
    return asked or adapters if has_gpu() else max(asked or 0, adapters + 1)
