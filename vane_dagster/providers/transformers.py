"""A Hugging Face model in the worker itself: it needs no setup, and suits a laptop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import StageError, first_line, names
from vane_dagster.providers.base import Answer, Media, PromptTooLong, Request
from vane_dagster.providers.registry import needs
from vane_dagster.types.image_files import converted, opened

_DEFAULT_TOKENS = 256


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its batch.

    Attributes:
        request: The request.
        images: Its images, decoded.
        answered: The future of its answer.
    """

    request: Request
    images: list[Any]
    answered: asyncio.Future[Answer]


class TransformersProvider:
    """Generates with a causal language model, in batches, on a GPU if one is available.

    Requests that wait at the same time and have the same sampling form one batch, padded on the
    left; those with images form batches of their own. The chat template renders the messages;
    without one, their contents are joined by blank lines. A model of images and text is loaded with
    its processor, which needs Pillow. Answers are not constrained to a schema: set
    `explain_errors`, or use an engine that supports constraints.
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
        config = library.AutoConfig.from_pretrained(model, revision=revision)
        self._sees = type(config) in library.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        processor = library.AutoProcessor if self._sees else library.AutoTokenizer
        self._processor = processor.from_pretrained(model, revision=revision)
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        kind = library.AutoModelForImageTextToText if self._sees else library.AutoModelForCausalLM
        loaded = kind.from_pretrained(model, revision=revision, dtype=dtype)
        default = "cuda" if self._torch.cuda.is_available() else "cpu"
        self._model = loaded.to(device or default).eval()
        self._known = set(library.GenerationConfig().to_dict())
        self._longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self._batch_size = batch_size
        self._template = dict(chat_template_kwargs or {})
        self._waiting: list[_Waiting] = []
        self._working: asyncio.Task[None] | None = None

    @classmethod
    def features(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Provider`."""
        return frozenset({"image"})

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        media = [part for message in request.messages for part in _media(message["content"])]
        if media and not self._sees:
            raise StageError("the prompt has images, but the model takes only text")
        images = await asyncio.to_thread(lambda: [*map(_decoded, media)]) if media else []
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, images, answered))
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        return await answered

    async def _work(self) -> None:
        await asyncio.sleep(0)  # requests that are submitted together form one batch
        while True:
            self._waiting = [each for each in self._waiting if not each.answered.done()]
            if not self._waiting:
                return
            first = self._waiting[0]
            alike = [
                each
                for each in self._waiting
                if each.request.sampling == first.request.sampling
                and bool(each.images) == bool(first.images)
            ]
            taken = alike[: self._batch_size]
            self._waiting = [each for each in self._waiting if each not in taken]
            answers: Sequence[Answer | BaseException]
            try:
                answers = await asyncio.to_thread(self._generate, taken)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # also of extensions in Rust; it fails all these rows
                if isinstance(error, self._torch.OutOfMemoryError) and len(taken) > 1:
                    self._batch_size, self._waiting = len(taken) // 2, [*taken, *self._waiting]
                    continue
                answers = [error] * len(taken)
            for each, answer in zip(taken, answers):
                if each.answered.done():
                    continue
                if isinstance(answer, BaseException):
                    each.answered.set_exception(answer)
                else:
                    each.answered.set_result(answer)

    def _generate(self, batch: Sequence[_Waiting]) -> Sequence[Answer | BaseException]:
        if not batch:
            return []
        sampling = batch[0].request.sampling
        wanted = _generation(sampling)
        if unknown := sorted(set(wanted) - self._known):
            raise ValueError(
                f"sampling_params has {names(unknown)}, which provider 'transformers' does not "
                "take; it takes OpenAI's names, and those of transformers.GenerationConfig"
            )
        given = self._inputs(batch)
        lengths = given["attention_mask"].sum(1).tolist()
        most = math.inf if self._longest is None else self._longest - wanted["max_new_tokens"]
        if max(lengths) > most:
            fitting = [each for each, length in zip(batch, lengths) if length <= most]
            answers = iter(self._generate(fitting))
            why = f"of which {wanted['max_new_tokens']} are for the answer (max_tokens)"
            taken = f"tokens; the model takes {self._longest}, {why}"
            return [
                next(answers) if n <= most else PromptTooLong(f"the prompt has {n} {taken}")
                for n in lengths
            ]
        if (seed := sampling.get("seed")) is not None:
            self._torch.manual_seed(seed)
        with self._torch.inference_mode():
            out = self._model.generate(**given, **wanted, pad_token_id=self._tokenizer.pad_token_id)
        rows = out[:, given["input_ids"].shape[1] :]
        return [self._answer(*each) for each in zip(rows, lengths, batch)]

    def _inputs(self, batch: Sequence[_Waiting]) -> dict[str, Any]:
        """Return the model's inputs for some prompts, on its device."""
        images = {"images": [each.images for each in batch]} if batch[0].images else {}
        encoded = self._processor(
            text=[self._text(each.request) for each in batch],
            **images,
            return_tensors="pt",
            padding=True,
            # A chat template includes the special tokens.
            add_special_tokens=self._processor.chat_template is None,
        ).to(self._model.device)
        is_pixels = self._torch.is_floating_point
        kind = self._model.dtype
        return {n: v.to(kind) if is_pixels(v) else v for n, v in encoded.items()}

    def _text(self, request: Request) -> str:
        if self._processor.chat_template is None:
            if any(_media(message["content"]) for message in request.messages):
                raise StageError("the model has no chat template, which images need")
            return "\n\n".join(message["content"] for message in request.messages)
        messages = [dict(message) for message in request.messages]
        if self._sees:  # chat templates of these models read parts
            messages = [{**m, "content": _parts(m["content"])} for m in messages]
        text: str = self._processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template
        )
        return text

    def _answer(self, row: Any, prompt: int, asked: _Waiting) -> Answer:
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends]) | {self._tokenizer.eos_token_id}
        tokens = row.tolist()
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        kept = tokens if stop is None else tokens[:stop]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        reason = "length" if stop is None else "stop"
        for mark in _marks(asked.request.sampling):
            if mark in text:
                text, reason = text.partition(mark)[0], "stop"
        return Answer(text, prompt, len(kept), 0, reason)


def _media(content: Any) -> list[Media]:
    """Return the parts of a message's content that are not text."""
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, Media)]


def _parts(content: Any) -> list[Any]:
    """Return the content of a message as a chat template reads it."""
    parts = content if isinstance(content, list) else [content]
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"type": "image"} if isinstance(part, Media) else part for part in texts]


def _decoded(media: Media) -> Any:
    """Decode an image, upright and in RGB."""
    from PIL import ImageOps

    try:
        return converted(ImageOps.exif_transpose(opened(media.data)), "RGB")
    except Exception as error:  # decoders raise any class
        raise ValueError(f"an image of the prompt does not decode: {first_line(error)}") from error


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
