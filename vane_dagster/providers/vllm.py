"""vLLM in the worker itself: continuous batching on the GPUs that the worker reserves."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from vane_dagster.providers.base import Answer, Media, Request
from vane_dagster.providers.format import finished
from vane_dagster.providers.openai import chat_messages
from vane_dagster.providers.vllm_engine import VllmEngine, visible_gpus

_SAME = {"max_completion_tokens": "max_tokens"}
_SHOWN = ("skip_special_tokens", "spaces_between_special_tokens")
"""Sampling parameters that a parser sets, to see the tokens around the reasoning."""


class VllmProvider(VllmEngine):
    """Generates with vLLM's asynchronous engine; each row is a separate request.

    The engine starts new requests as others finish, so it never drains between batches. Choose a
    `batch_size` and a `max_concurrency` with a product of at least the engine's ``max_num_seqs``.
    The engine stays loaded in its worker. Stages with the same model and options share it, even if
    their sampling, adapters or formats differ.

    The model's chat template renders the messages; without one, their contents are joined by blank
    lines. Sampling parameters that the stage does not set follow the model's generation config.
    Without ``max_tokens``, an answer may fill the model's length.

    Images and sounds are given to vLLM's own processor of the model. With a ``reasoning_parser`` in
    `engine_kwargs`, answers are without the reasoning.
    """

    @classmethod
    def features(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Provider`."""
        engine = options.get("engine_kwargs") or {}
        own = {"adapter": "enable_lora", "reasoning": "reasoning_parser"}
        asked = {feature for feature, argument in own.items() if engine.get(argument)}
        if engine.get("distributed_executor_backend") == "ray":
            asked -= {"adapter"}  # whose folder is on the worker's node alone
        return frozenset({"image", "image url", "audio", *asked})

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tensor_parallel_size: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, revision, tensor_parallel_size, engine_kwargs or {})
        from vllm.parser import ParserManager
        from vllm.renderers.params import ChatParams

        config = self._engine.model_config
        self._defaults = dict(config.get_diff_sampling_param())
        chat = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        self._chat = ChatParams(chat_template, chat_template_kwargs=chat)
        self._tokenizer = self._engine.get_tokenizer()
        self._templated = bool(chat_template or getattr(self._tokenizer, "chat_template", True))
        self._parser = ParserManager.get_parser(
            reasoning_parser_name=(engine_kwargs or {}).get("reasoning_parser"),
            is_harmony=config.hf_config.model_type == "gpt_oss",
            tokenizer=self._tokenizer,
        )
        self._adapters: dict[str, Any] = {}
        self._loading = asyncio.Lock()
        needs_adapter = self._engine.vllm_config.lora_config is not None and not visible_gpus()
        self._empty = self._empty_adapter() if needs_adapter else ""

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        folder = request.adapter or self._empty
        adapter = await self._adapter(folder) if folder else None
        parser, chat = self._parsing()
        params = self._sampling_params(request, chat)
        prompt = await self._rendered(request)
        id = f"{request.id}-{next(self._numbers)}"
        kwargs = {"chat_template_kwargs": self._chat.chat_template_kwargs} if parser else None
        steps = self._engine.generate(
            prompt, params, id, lora_request=adapter, reasoning_parser_kwargs=kwargs
        )
        *_, response = [step async for step in steps]  # a single step with the whole answer
        made, text, reasoning, thoughts = response.outputs[0], response.outputs[0].text, None, 0
        if parser is not None:
            parser.set_prompt_token_ids(response.prompt_token_ids)
            reasoning, text, _ = parser.parse(text, chat, model_output_token_ids=made.token_ids)
            thoughts = parser.count_reasoning_tokens(made.token_ids)
        counts = (
            len(response.prompt_token_ids),
            len(made.token_ids),
            response.num_cached_tokens or 0,
        )
        reason = made.finish_reason or ""
        answer = Answer("", *counts, reason, reasoning=reasoning, reasoning_tokens=thoughts)
        return finished(text, answer)

    async def _rendered(self, request: Request) -> Any:
        """Return the prompt's tokens."""
        texts = [message["content"] for message in request.messages]
        if not self._templated and all(isinstance(text, str) for text in texts):
            return await self._tokens("\n\n".join(texts))
        parts = (part for text in texts if isinstance(text, list) for part in text)
        if any(isinstance(part, Media) and part.kind == "audio" for part in parts):
            _check_audio()
        messages = chat_messages(request.messages)
        try:
            _, (prompt,) = await self._engine.renderer.render_chat_async([messages], self._chat)
        except ImportError as error:
            cause: BaseException = error  # vLLM's own error may not name what it lacks
            while cause.__context__ is not None:
                cause = cause.__context__
            raise ImportError(
                f"vLLM cannot read the files of the row: {cause}. Install it where the workers run"
            ) from error
        return prompt

    async def _adapter(self, folder: str) -> Any:
        """Load an adapter before its first request, which would end the engine if that failed."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._loading:
            if folder not in self._adapters:  # a folder never changes
                lora = LoRARequest(folder, next(self._numbers) + 1, folder)
                try:
                    await self._engine.add_lora(lora)
                except EngineDeadError:
                    raise
                except Exception as error:
                    raise ValueError(f"the adapter {folder} is not loaded: {error}") from error
                self._adapters[folder] = lora
        return self._adapters[folder]

    def _empty_adapter(self) -> str:
        """Write an adapter that changes nothing, for requests without one on a CPU.

        vLLM's kernels for CPUs give such requests the adapter in the last slot: in
        `lora/ops/torch_ops`, the index -1, which means none, is an array index. It must have a
        tensor; the name of a "base_layer" is not looked for in the model.
        """
        import torch

        folder = self._folder / "empty"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": []}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        names = (f"base_model.model.none.base_layer.lora_{part}.weight" for part in "AB")
        torch.save({name: torch.zeros(1, 1) for name in names}, folder / "adapter_model.bin")
        return str(folder)

    def _parsing(self) -> tuple[Any, Any]:
        """Return the parser of an answer with reasoning, and the request that it reads."""
        if self._parser is None:
            return None, None
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        kwargs = self._chat.chat_template_kwargs
        config = self._engine.model_config
        parser = self._parser(self._tokenizer, chat_template_kwargs=kwargs, model_config=config)
        return parser, parser.adjust_request(ChatCompletionRequest(messages=[]))

    def _sampling_params(self, request: Request, chat: Any) -> Any:
        """Return vLLM's parameters for a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        given = {_SAME.get(name, name): value for name, value in request.sampling.items()}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {int(token): value for token, value in bias.items()}
        held: dict[str, Any] = {}
        if request.choices:
            held["choice"] = list(request.choices)
        elif request.schema is not None:
            held["json"] = dict(request.schema)
        shown = {name: getattr(chat, name) for name in _SHOWN if chat is not None}
        try:
            return SamplingParams(
                **{"max_tokens": None, **self._defaults, **shown, **given},
                n=1,  # a row has one whole answer
                detokenize=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # nothing else references them
                structured_outputs=(StructuredOutputsParams(**held) if held else None),
            )
        except Exception as error:  # vLLM's own error, or a type error
            raise ValueError(f"sampling_params are refused by vLLM: {error}") from error


def _check_audio() -> None:
    """Raise ImportError if vLLM would decode audio with PyAV, which does not scale integers."""
    if importlib.util.find_spec("soundfile") is None:
        raise ImportError(
            "'soundfile' is not installed where the workers run: pip install soundfile. Without "
            "it, vLLM gives models WAV and FLAC files at 32,768 times their amplitude"
        )
