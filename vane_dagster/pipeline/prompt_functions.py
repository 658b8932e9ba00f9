"""The user's function that makes the prompts of a stage."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.pipeline.udf import is_async_function
from vane_dagster.providers.prompt_function import PromptFunction, unpacked
from vane_dagster.types.callables import check_call, is_function, unwrapped


@dataclass(frozen=True)
class DeclaredFunction(PromptFunction):
    """A function as a pipeline declares it. Workers get it by value if it is portable."""

    @property
    def is_preloaded(self) -> bool:
        """False if it travels by value."""
        return self._payload is None

    @functools.cached_property
    def _payload(self) -> bytes | None:
        modules = code_identity(self.call, files=LocalFiles(read=False)).modules
        return portable_payload(modules, self.call)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._payload is None:
            return PromptFunction, (self.call,)
        return unpacked, (self._payload,)


def prompt_function(where: str, function: Callable[..., Any]) -> PromptFunction:
    """Validate the function that makes the prompts of a stage."""
    plain = unwrapped(function)
    is_later = is_async_function(plain) or inspect.isgeneratorfunction(plain)
    if is_later or not is_function(plain):
        raise DefinitionError(
            f"{where}: messages is {function!r}; expected a plain function of a row, which returns "
            "its prompt. A class that holds state, or requests to other services, are a stage "
            "before this one"
        )
    check_call(where, function, ({},), {}, "messages(row)")
    return DeclaredFunction(function)
