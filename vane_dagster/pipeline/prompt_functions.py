"""The user's functions before and after the model of a prompt stage."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, SchemaError
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.providers.row_functions import RowFunctions, unpacked
from vane_dagster.types.annotations import field_types, hints
from vane_dagster.types.callables import unwrapped
from vane_dagster.types.schema import parse_schema


@dataclass(frozen=True)
class DeclaredFunctions(RowFunctions):
    """Functions as a pipeline declares them. Workers get them by value if they are portable."""

    @property
    def preloaded(self) -> tuple[Callable[..., Any], ...]:
        """None if they travel by value, else all."""
        return self.given if self._payload is None else ()

    @functools.cached_property
    def _payload(self) -> bytes | None:
        unread = LocalFiles(read=False)
        found = [code_identity(each, files=unread).modules for each in self.given]
        modules = dict.fromkeys(module for one in found for module in one)
        return portable_payload(modules, (self.preprocess, self.postprocess))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._payload is None:
            return RowFunctions, (self.preprocess, self.postprocess)
        return unpacked, (self._payload,)


def parse_functions(where: str, preprocess: Any, postprocess: Any) -> RowFunctions:
    """Validate the functions of a prompt stage; None for no function.

    Args:
        where: The stage, for messages.
        preprocess: The argument of `prompt`.
        postprocess: The argument of `prompt`.

    Raises:
        DefinitionError: If one is no plain function of a row.
    """
    for name, function in (("preprocess", preprocess), ("postprocess", postprocess)):
        if function is not None:
            _check(f"{where}: {name}", function)
    if preprocess is None and postprocess is None:
        return RowFunctions()
    return DeclaredFunctions(preprocess, postprocess)


def made_columns(where: str, postprocess: Callable[..., Any], schema: Any) -> pa.Schema:
    """Return the columns that `postprocess` makes.

    Args:
        where: The stage, for messages.
        postprocess: The function.
        schema: The argument of `prompt`; None for the fields of its return annotation.

    Raises:
        DefinitionError: If neither declares them.
        SchemaError: If a type is unknown.
    """
    if schema is not None:
        return parse_schema(schema, where)
    returned = hints(unwrapped(postprocess)).get("return")
    try:
        fields = None if returned is None else field_types(returned)
    except SchemaError as error:
        raise SchemaError(f"{where}: postprocess returns {error}") from None
    if not fields:
        raise DefinitionError(
            f"{where}: the columns that postprocess makes are unknown; declare them, as in "
            "schema={'score': 'DOUBLE'}, or annotate that it returns a dataclass or TypedDict"
        )
    return parse_schema(pa.schema(fields), where)


def _check(where: str, function: Any) -> None:
    plain = unwrapped(function)
    kinds = (inspect.isfunction(plain), inspect.isbuiltin(plain), inspect.ismethod(plain))
    if not any(kinds) or (inspect.ismethod(plain) and not inspect.isclass(plain.__self__)):
        raise DefinitionError(
            f"{where} is {function!r}; expected a function of a row. A class that holds state is a "
            "stage of its own, before or after this one"
        )
    called = (
        inspect.iscoroutinefunction(plain),
        inspect.isasyncgenfunction(plain),
        inspect.isgeneratorfunction(plain),
    )
    if any(called):
        raise DefinitionError(
            f"{where} {plain.__name__!r} is asynchronous or a generator; expected a plain "
            "function, which returns its result. Requests to other services belong into a stage of "
            "their own"
        )
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        raise DefinitionError(
            f"{where} {plain.__name__!r} cannot be called with a row: {error}"
        ) from None
    except ValueError:  # builtins may have no signature
        return
