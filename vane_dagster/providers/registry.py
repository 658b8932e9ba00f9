"""Providers by name: ours, and those of installed packages."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import entry_points
from typing import Any

from vane_dagster.errors import DefinitionError, names

GROUP = "vane_dagster.providers"
"""The entry-point group under which a package registers its provider class."""
_OWN = {
    "openai": "vane_dagster.providers.openai:OpenAIProvider",
    "sentence_transformers": (
        "vane_dagster.providers.sentence_transformers:SentenceTransformersProvider"
    ),
    "transformers": "vane_dagster.providers.transformers:TransformersProvider",
    "vllm": "vane_dagster.providers.vllm:VllmProvider",
}


def provider_class(where: str, provider: str | type, method: str = "submit") -> type:
    """The class behind a name; a class itself is checked.

    No library of a provider's is imported by this.

    Args:
        where: The stage, for messages.
        provider: The name, or the class.
        method: What it must be able to do.

    Raises:
        DefinitionError: If there is none of this name, or the class is no provider.
    """
    asked = provider
    if isinstance(provider, str):
        provider = _named(where, provider)
    if not inspect.isclass(provider):
        raise DefinitionError(
            f"{where}: provider is {asked!r}; expected a name ({names(_known(), 20)}) or a class "
            f"with `async def {method}`"
        )
    if not inspect.iscoroutinefunction(getattr(provider, method, None)):
        raise DefinitionError(
            f"{where}: provider {asked!r} has no `async def {method}`, which this stage calls"
        )
    return provider


def _known() -> list[str]:
    return sorted({*_OWN, *(point.name for point in entry_points(group=GROUP))})


def _named(where: str, name: str) -> Any:
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    raise DefinitionError(
        f"{where}: unknown provider {name!r}; there are {names(_known(), 20)}. A package registers "
        f"its own under the entry points {GROUP!r}, and a class can be given itself"
    )


def needs(library: str, extra: str, provider: str) -> Any:
    """A provider's library, imported where it is used.

    Raises:
        ImportError: With the extra to install.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library.partition(".")[0]:
            raise
        raise ImportError(
            f"provider {provider!r} needs {library!r}, which is not installed where the workers "
            f"run: pip install 'vane-dagster[{extra}]'"
        ) from error
