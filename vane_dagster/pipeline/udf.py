"""User functions and classes: validation, and how each is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vane_dagster._arguments import mapping, positional
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import DefinitionError

CallStyle = Literal["plain", "generator", "async", "async_generator"]


@dataclass(frozen=True)
class Udf:
    """A user's function or class with its arguments, from which a worker creates the callable.

    Attributes:
        target: The function, or the class that a worker constructs once.
        stateful: Whether it is a class.
        style: How a call produces its result: returned, yielded, awaited or both.
        args: Passed to each call after the batch.
        kwargs: Passed to each call.
        constructor_args: Passed to the class.
        constructor_kwargs: Passed to the class.
        version: Replaces the code identity, if the user sets it.
        label: Display name. Default: the target's name.
    """

    target: Callable[..., Any]
    stateful: bool
    style: CallStyle
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    constructor_args: tuple[Any, ...] = field(default=(), repr=False)
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    version: str | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the target's qualified name."""
        if self.label:
            return self.label
        target = self.target.func if isinstance(self.target, functools.partial) else self.target
        return str(getattr(target, "__qualname__", repr(target)))

    @property
    def is_async(self) -> bool:
        """Whether several calls can be in flight in one actor."""
        return self.style in ("async", "async_generator")


def make_udf(
    where: str,
    target: Any,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    constructor_args: Sequence[Any] = (),
    constructor_kwargs: Mapping[str, Any] | None = None,
    version: str | None = None,
) -> Udf:
    """Validate a user's function or class and its arguments.

    Args:
        where: The stage, for messages.
        target: The function or class.
        args: Passed to each call after the batch.
        kwargs: Passed to each call.
        constructor_args: Passed to the class.
        constructor_kwargs: Passed to the class.
        version: Replaces the code identity in fragment keys.

    Raises:
        DefinitionError: If the target is an instance, is not callable, or does not accept the
            arguments.
    """
    stateful = inspect.isclass(target)
    keep_arguments(args, kwargs, constructor_args, constructor_kwargs)
    if not stateful:
        _refuse_other_than_function(where, target)
        if constructor_args or constructor_kwargs:
            raise DefinitionError(
                f"{where}: {_name(target)} is a function, so fn_constructor_args and "
                "fn_constructor_kwargs mean nothing; pass fn_args or fn_kwargs, or make it a class"
            )
    elif not callable(_members(target).get("__call__")):
        raise DefinitionError(
            f"{where}: class {_name(target)} has no __call__; define __call__(self, batch), which "
            "a worker calls for each batch"
        )
    udf = Udf(
        target=target,
        stateful=stateful,
        style=_style(target.__call__ if stateful else target),
        args=positional(where, "fn_args", args),
        kwargs=mapping(where, "fn_kwargs", kwargs),
        constructor_args=positional(where, "fn_constructor_args", constructor_args),
        constructor_kwargs=mapping(where, "fn_constructor_kwargs", constructor_kwargs),
        version=None if version is None else str(version),
    )
    _check_arguments(where, udf)
    return udf


def _refuse_other_than_function(where: str, target: Any) -> None:
    if isinstance(target, functools.partial):
        if inspect.isclass(target.func):
            raise DefinitionError(
                f"{where}: functools.partial of class {_name(target.func)}; pass the class itself "
                "and its arguments as fn_constructor_kwargs"
            )
        return _refuse_other_than_function(where, target.func)
    if inspect.isfunction(target) or inspect.isbuiltin(target):
        return None
    if inspect.ismethod(target) and inspect.isclass(target.__self__):
        return None
    kind = type(target).__name__
    if callable(target):
        raise DefinitionError(
            f"{where}: an instance of {kind} was given. A worker must construct the object itself, "
            "once, so that a model is loaded where it runs and stays warm there, and is never "
            f"pickled: pass the class, map_batches(..., {kind}, fn_constructor_kwargs={{...}})"
        )
    raise DefinitionError(f"{where}: {target!r} cannot be called; pass a function or a class")


def _members(cls: type) -> dict[str, Any]:
    bases = [base for base in reversed(cls.__mro__) if base is not object]
    return {name: member for base in bases for name, member in vars(base).items()}


def _style(function: Any) -> CallStyle:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "plain"


def _check_arguments(where: str, udf: Udf) -> None:
    call: Any = udf.target
    if inspect.isclass(udf.target):
        call = _members(udf.target)["__call__"]
    given = (None, None) if udf.stateful else (None,)
    _bind(where, call, (*given, *udf.args), udf.kwargs, "(batch, *fn_args, **fn_kwargs)")
    if inspect.isclass(udf.target):
        arguments = (udf.constructor_args, udf.constructor_kwargs)
        _bind(where, udf.target, *arguments, "(*fn_constructor_args, **fn_constructor_kwargs)")
        if callable(probe := _members(udf.target).get("check_health")):
            _bind(where, probe, (None,), {}, "check_health(self), by which a worker asks it")


def _bind(where: str, call: Any, args: tuple[Any, ...], kwargs: Any, shape: str) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # builtins and extension types may have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{where}: {_name(call)}{signature} cannot be called as {shape}: {error}"
        ) from None


def _name(target: Any) -> str:
    return str(getattr(target, "__qualname__", type(target).__name__))
