"""Bodies of requests, checked by the types that OpenAI's and Anthropic's clients publish."""

from __future__ import annotations

import base64
import functools
import importlib
import io
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

_CHAT = "CompletionCreateParamsNonStreaming"
_MESSAGES = "MessageCreateParamsNonStreaming"


def check_chat(body: Mapping[str, Any]) -> None:
    """Raise ValidationError unless a body is of OpenAI's chat API."""
    _drain(_adapter("openai.types.chat.completion_create_params", _CHAT).validate_python(body))


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise ValidationError unless a body is of Anthropic's Messages API."""
    _drain(_adapter("anthropic.types.message_create_params", _MESSAGES).validate_python(body))


@functools.cache  # what it has validated refers to it
def _adapter(module: str, name: str) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(getattr(importlib.import_module(module), name))


def _drain(value: Any) -> None:
    """Validate all of a value: pydantic validates an iterable as it is read."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        _drain(each)


def said(content: Any) -> str:
    """Return the text of a message in the form of either API, and what its other parts are."""
    return content if isinstance(content, str) else "\n".join(map(_part, content))


def _part(part: Mapping[str, Any]) -> str:
    match part:
        case {"type": "text", "text": text}:
            return str(text)
        case {"type": "image_url", "image_url": {"url": url}}:
            return _file(*_split(url))
        case {"type": "input_audio", "input_audio": {"data": data, "format": name}}:
            return _file(f"audio/{name}", data)
        case {"type": "file", "file": {"file_data": url}}:
            return _file(*_split(url))
        case {"source": {"type": "url", "url": url}}:
            return f"[{url}]"
        case {"source": {"type": "base64", "media_type": media_type, "data": data}}:
            return _file(media_type, data)
    raise ValueError(f"a part of type {part.get('type')!r}")


def _split(url: str) -> tuple[str, str]:
    head, _, data = url.partition(";base64,")
    return (head.removeprefix("data:"), data) if data else (url, "")


def _file(name: str, data: str) -> str:
    content = base64.b64decode(data, validate=True)
    if not name.startswith("image/"):
        return f"[{name}, {len(content)} bytes]" if data else f"[{name}]"
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.load()
        return f"[{name} {image.width}x{image.height}]"
