"""The built-in providers by name, and their libraries."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from vane_dagster.errors import DefinitionError, names

_BUILT_IN = {
    "anthropic": "vane_dagster.providers.anthropic:AnthropicProvider",
    "openai": "vane_dagster.providers.openai:OpenAIProvider",
    "sentence_transformers": (
        "vane_dagster.providers.sentence_transformers:SentenceTransformersProvider"
    ),
    "transformers": "vane_dagster.providers.transformers:TransformersProvider",
    "vllm": "vane_dagster.providers.vllm:VllmProvider",
}
_BY_METHOD = {("vllm", "embed"): "vane_dagster.providers.vllm_embedding:VllmEmbedder"}
"""Provider names with a class per method: a vLLM engine either generates or embeds."""
_FROZEN = {
    **{place: name for name, place in _BUILT_IN.items()},
    _BY_METHOD["vllm", "embed"]: "vllm_embedding",
}
"""Names of the built-in classes in keys. They survive moves and renames; never change one."""


def built_in_name(provider: type) -> str | None:
    """Return the name of a built-in class in keys; None for a user's own class.

    The class itself is compared, since a user's class may have any name.
    """
    for place, name in _FROZEN.items():
        module, _, attribute = place.partition(":")
        if getattr(sys.modules.get(module), attribute, None) is provider:
            return name
    return None


def provider_class(where: str, provider: str | type, method: str = "submit") -> type:
    """Return the class of a provider name, or validate a class.

    This does not import the library of any provider.
    """
    asked = provider
    provider = _provider(where, provider, method)
    if not (inspect.isclass(provider) and _has(provider, method)):
        raise DefinitionError(
            f"{where}: provider is {asked!r}; expected a name ({names(_BUILT_IN, 20)}) or a class, "
            f"with `async def {method}`, which this stage calls"
        )
    return provider


def _provider(where: str, provider: str | type, method: str) -> Any:
    if not isinstance(provider, str):
        return provider
    if provider not in _BUILT_IN:
        raise DefinitionError(
            f"{where}: unknown provider {provider!r}; there are {names(_BUILT_IN, 20)}, and a "
            "class of yours can be given itself"
        )
    place = _BY_METHOD.get((provider, method), _BUILT_IN[provider])
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _has(provider: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(provider, method, None))


def needs(library: str, extra: str) -> Any:
    """Import a provider's library on first use."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library.partition(".")[0]:
            raise
        raise ImportError(
            f"{library!r} is not installed where the workers run: "
            f"pip install 'vane-dagster[{extra}]'"
        ) from error
