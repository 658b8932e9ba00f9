"""The user's code of a prompt: the function that makes it, and the model of its answers."""

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
from vane_dagster.providers.format import Format
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
    def _modules(self) -> tuple[str, ...]:
        return _modules_of(self.call)

    @property
    def _payload(self) -> bytes | None:  # anew, since a cell of a notebook may edit what it calls
        return portable_payload(self._modules, self.call)

    def __reduce__(self) -> tuple[Any, ...]:
        payload = self._payload
        return PromptFunction, (self.call if payload is None else _Packed(payload),)


@dataclass(frozen=True)
class DeclaredFormat(Format):
    """A format as a pipeline declares it. Workers get its model by value if it is portable."""

    @property
    def is_preloaded(self) -> bool:
        """False without a model, and if it travels by value."""
        return self.model is not None and self._payload is None

    @functools.cached_property
    def _modules(self) -> tuple[str, ...]:
        return _modules_of(self.model)

    @property
    def _payload(self) -> bytes | None:
        return None if self.model is None else portable_payload(self._modules, self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        payload = self._payload
        model = self.model if payload is None else _Packed(payload)
        return Format, (self.type, self.schema, self.choices, model)


@dataclass(frozen=True)
class _Packed:
    """Code pickled by value, which unpickles as the code."""

    payload: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (self.payload,)


def _modules_of(code: Callable[..., Any]) -> tuple[str, ...]:
    return code_identity(code, files=LocalFiles(read=False)).modules


def prompt_function(where: str, function: Callable[..., Any]) -> PromptFunction:
    """Validate the function that makes the prompts of a stage."""
    plain = unwrapped(function)
    is_later = is_async_function(plain) or inspect.isgeneratorfunction(plain)
    if is_later or not is_function(plain):
        raise DefinitionError(
            f"{where}: messages is {function!r}; expected a plain function of a row that returns "
            "its prompt. For a class with state, or requests to other services, add a stage before "
            "this one"
        )
    check_call(where, function, ({},), {}, "messages(row)")
    return DeclaredFunction(function)
