"""A Hugging Face model in the worker itself: it needs no setup, and suits a laptop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.errors import names
from vane_dagster.providers.base import Answer, PromptTooLong, Request, SamplingRefused
from vane_dagster.providers.registry import needs

_DEFAULT_TOKENS = 256


class TransformersProvider:
    """Generates with a causal language model, in batches, on a GPU if one is available.

    Requests that wait at the same time and have the same sampling form one batch, padded on the
    left. The tokenizer's chat template renders the messages; without one, their contents are joined
    by blank lines. Answers are not constrained to a schema: set `explain_errors`, or use an engine
    that supports constraints.
    """

    PACKAGES = ("torch", "transformers")
    OPERATIONAL = frozenset({"batch_size", "device"})

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        batch_size: int = 16,
        dtype: str = "auto",
        device: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        library = needs("transformers", "transformers")
        self._torch = needs("torch", "transformers")
        self._tokenizer = library.AutoTokenizer.from_pretrained(
            model, revision=revision, padding_side="left"
        )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        loaded = library.AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=dtype)
        default = "cuda" if self._torch.cuda.is_available() else "cpu"
        self._model = loaded.to(device or default).eval()
        self._known = set(library.GenerationConfig().to_dict())
        self._longest = getattr(self._model.config, "max_position_embeddings", None)
        self._batch_size = batch_size
        self._template = dict(chat_template_kwargs or {})
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._working: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answered))
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        return await answered

    async def _work(self) -> None:
        await asyncio.sleep(0)  # requests that are submitted together form one batch
        while self._waiting:
            sampling = self._waiting[0][0].sampling
            alike = [entry for entry in self._waiting if entry[0].sampling == sampling]
            taken = alike[: self._batch_size]
            self._waiting = [entry for entry in self._waiting if entry not in taken]
            requests = [request for request, _ in taken]
            answers: Sequence[Answer | BaseException]
            try:
                answers = await asyncio.to_thread(self._generate, requests)
            except Exception as error:  # an error of the batch fails each of its rows
                answers = [error] * len(taken)
            for (_, answered), answer in zip(taken, answers):
                if answered.cancelled():
                    continue
                if isinstance(answer, BaseException):
                    answered.set_exception(answer)
                else:
                    answered.set_result(answer)

    def _generate(self, requests: Sequence[Request]) -> Sequence[Answer | BaseException]:
        texts = [self._text(request) for request in requests]
        wanted = _generation(requests[0].sampling)
        if unknown := sorted(set(wanted) - self._known):
            raise SamplingRefused(
                f"sampling_params has {names(unknown)}, which provider 'transformers' does not "
                "take; it takes OpenAI's names, and those of transformers.GenerationConfig"
            )
        # A chat template includes the special tokens.
        adds = {"add_special_tokens": self._tokenizer.chat_template is None}
        lengths = [len(ids) for ids in self._tokenizer(texts, **adds)["input_ids"]]
        most = None if self._longest is None else self._longest - wanted["max_new_tokens"]
        short = [i for i, length in enumerate(lengths) if most is None or length <= most]
        found: list[Answer | BaseException] = [
            PromptTooLong(
                f"the prompt has {length} tokens; the model takes {self._longest}, of which "
                f"{wanted['max_new_tokens']} are for the answer (max_tokens)"
            )
            for length in lengths
        ]
        if not short:
            return found
        seed = requests[0].sampling.get("seed")
        if seed is not None:
            self._torch.manual_seed(seed)
        padded = {"return_tensors": "pt", "padding": True, **adds}
        given = self._tokenizer([texts[i] for i in short], **padded)
        given = given.to(self._model.device)
        with self._torch.inference_mode():
            out = self._model.generate(**given, **wanted, pad_token_id=self._tokenizer.pad_token_id)
        for place, row in zip(short, out[:, given["input_ids"].shape[1] :]):
            found[place] = self._answer(row, lengths[place], requests[place])
        return found

    def _text(self, request: Request) -> str:
        messages = [dict(message) for message in request.messages]
        if self._tokenizer.chat_template is None:
            return "\n\n".join(message["content"] for message in messages)
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template
        )
        return text

    def _answer(self, row: Any, prompt: int, request: Request) -> Answer:
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends]) | {self._tokenizer.eos_token_id}
        tokens = row.tolist()
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        kept = tokens if stop is None else tokens[:stop]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        reason = "length" if stop is None else "stop"
        for mark in _marks(request.sampling):
            if mark in text:
                text, reason = text.partition(mark)[0], "stop"
        return Answer(text, prompt, len(kept), 0, reason)


def _marks(sampling: Mapping[str, Any]) -> list[str]:
    stop = sampling.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def _generation(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sampling under OpenAI's names for ``generate``; temperature 0 is greedy."""
    left = {k: v for k, v in sampling.items() if k not in ("seed", "stop")}
    tokens = left.pop("max_tokens", None) or left.pop("max_completion_tokens", None)
    temperature = left.pop("temperature", 1.0)
    warm = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return {"max_new_tokens": tokens or _DEFAULT_TOKENS, **warm, **left}
