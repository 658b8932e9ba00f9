"""User functions and classes: validation, and how each is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.local_file import LocalFile, found_in, local_files_in, servers_in
from vane_dagster.fingerprint.modules import Finder
from vane_dagster.fingerprint.values import model_class
from vane_dagster.pipeline.contracts import CALL, CallStyle, Contract
from vane_dagster.pipeline.decorators import Callee
from vane_dagster.pipeline.lazy_instances import lazy_in
from vane_dagster.pipeline.servers import ModelServer, servers_by_key
from vane_dagster.types.callables import qualname, signature_of, unwrapped


@dataclass(frozen=True)
class Udf:
    """A user's function or class with its arguments, from which a worker creates the callable.

    Attributes:
        target: The function, or the class or factory that a worker calls once to construct the
            callable.
        stateful: Whether it is constructed, by a class or a factory.
        style: How a call produces its result: returned, yielded, awaited or both.
        method: The method of the constructed object that is called.
        is_factory: Whether the target is a function that returns the callable.
        args: Passed to each call after the batch.
        kwargs: Passed to each call.
        constructor_args: Passed to the class or factory.
        constructor_kwargs: Passed to the class or factory.
        version: Replaces the code identity, if the user sets it.
        label: Display name. Default: the target's name.
    """

    target: Callable[..., Any]
    stateful: bool
    style: CallStyle
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    constructor_args: tuple[Any, ...] = field(default=(), repr=False)
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    version: str | None = None
    label: str = ""
    method: str = CALL
    is_factory: bool = False

    @property
    def name(self) -> str:
        """The label, or the target's qualified name."""
        if self.label:
            return self.label
        target = self.target.func if isinstance(self.target, functools.partial) else self.target
        return str(getattr(target, "__qualname__", repr(target)))

    @property
    def call(self) -> Any:
        """What is called with rows: the function, or the class's method; None for a factory."""
        if not self.stateful:
            return self.target
        return None if self.is_factory else getattr(unwrapped(self.target), self.method)

    @property
    def local_files(self) -> Sequence[LocalFile]:
        """The local files among the arguments."""
        return list(local_files_in(self._references))

    @property
    def servers(self) -> Mapping[str, ModelServer]:
        """The servers among the arguments, by their key.

        Raises:
            DefinitionError: If two that differ have the same key.
        """
        return servers_by_key(handle.server for handle in servers_in(self._references))

    @property
    def lost_servers(self) -> Sequence[ModelServer]:
        """Servers that a worker would get without an address, as in a closure or a record."""
        return list(found_in(self._references, ModelServer))

    @property
    def _references(self) -> tuple[Any, ...]:
        return (self.kwargs, self.constructor_args, self.constructor_kwargs, self.target)

    @property
    def is_async(self) -> bool:
        """Whether several calls can be in flight in one actor."""
        return self.style in ("async", "async_generator")


def make_udf(where: str, callee: Callee, version: str | None, contract: Contract) -> Udf:
    """Validate a user's function or class and its arguments.

    Args:
        where: The stage, for messages.
        callee: The code and its arguments.
        version: Replaces the identity of the code.
        contract: How it is called.

    Raises:
        DefinitionError: If the code cannot be called so, or an argument is invalid.
    """
    target, method, stateful = callee.target, callee.method, inspect.isclass(callee.target)
    given, named = _handles(callee.constructor_args), _handles(callee.constructor_kwargs)
    kwargs = _handles(callee.kwargs)
    keep_arguments((), kwargs, given, named)
    check_callable(where, target, method)
    if not stateful and (given or named):
        raise DefinitionError(
            f"{where}: {qualname(target)} is a function, so fn_constructor_args and "
            "fn_constructor_kwargs mean nothing; pass fn_kwargs, or make it a class"
        )
    udf = Udf(
        target=target,
        stateful=stateful,
        style=_style(getattr(target, method) if stateful else target),
        kwargs=kwargs,
        constructor_args=given,
        constructor_kwargs=named,
        version=None if version is None else str(version),
        method=method,
    )
    _check_arguments(where, udf, contract)
    _check_servers(where, udf)
    _refuse_lazy_arguments(where, udf)
    return udf


def check_callable(where: str, target: Any, method: str = CALL) -> None:
    """Check that a target is a function, or a class with the method that is called.

    Args:
        where: The stage, for messages.
        target: The function or class.
        method: The class's method that is called.

    Raises:
        DefinitionError: If it is neither, such as an instance.
    """
    if not inspect.isclass(target):
        _refuse_other_than_function(where, target)
    elif not callable(_members(target).get(method)):
        raise DefinitionError(
            f"{where}: class {qualname(target)} has no {method}; define it, as __call__(self, "
            "batch), which a worker calls"
        )


def make_factory(where: str, callee: Callee, version: str | None, contract: Contract) -> Udf:
    """Validate a function that loads a model and returns the function to call with rows.

    Args:
        where: The stage, for messages.
        callee: The function, with its arguments as those of a constructor.
        version: Replaces the identity of the code.
        contract: How the function that it returns is called.

    Raises:
        DefinitionError: If it is no function, or does not take its arguments.
    """
    target = callee.target
    if inspect.isclass(target):
        raise DefinitionError(
            f"{where}: class {qualname(target)} was given; expected a function that loads the "
            "model and returns the function to call. For a class use map or map_batches"
        )
    _refuse_other_than_function(where, target)
    given, named = callee.constructor_args, callee.constructor_kwargs
    if isinstance(target, functools.partial):  # its arguments count as such, also with a version
        given, named, target = (*target.args, *given), {**target.keywords, **named}, target.func
    given, named = _handles(given), _handles(named)
    keep_arguments(given, named)
    udf = Udf(
        target=target,
        stateful=True,
        style="plain",
        constructor_args=given,
        constructor_kwargs=named,
        version=None if version is None else str(version),
        is_factory=True,
    )
    _bind(where, target, given, named, "(*fn_constructor_args, **fn_constructor_kwargs)")
    _check_servers(where, udf)
    _refuse_lazy_arguments(where, udf)
    return udf


def called_function(target: Any, method: str = CALL) -> tuple[Any, bool]:
    """Return the function that is called with rows, and whether its first parameter is `self`.

    Args:
        target: The function or class.
        method: The class's method.
    """
    if not inspect.isclass(target):
        return target, False
    is_static = isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod))
    return getattr(target, method), not is_static


def _refuse_other_than_function(where: str, target: Any) -> None:
    if isinstance(target, functools.partial):
        return _refuse_other_than_function(where, target.func)
    if inspect.isfunction(target) or inspect.isbuiltin(target):
        return None
    if inspect.ismethod(target) and inspect.isclass(target.__self__):
        return None
    raise DefinitionError(f"{where}: {_refusal(target)}")


def _refusal(target: Any) -> str:
    """Say what to pass in place of an object that is neither a function nor a class."""
    kind, is_method = type(target), inspect.ismethod(target)
    if is_method:
        kind = type(target.__self__)
    name = qualname(kind)
    if model_class(target.__self__ if is_method else target):
        return (
            f"a loaded model, a {name}, was given. Write a class that loads it in __init__, once "
            "in each worker, and calls it in __call__(self, batch), and pass the class"
        )
    if kind.__module__ in ("builtins", "operator", "functools", "numpy"):
        if not callable(target):
            return f"{target!r} cannot be called; pass a function or a class"
        return f"an object of {name} was given. Call it in a function of your own, and pass that"
    if (module := Finder().find(kind.__module__)) is not None and module.kind != "own":
        return (
            f"an object of {name}, from an installed package, was given. Write a class that makes "
            "it in __init__, once in each worker, and calls it in __call__(self, batch), and pass "
            "the class"
        )
    given, passed = f"an instance of {name}", f"the class, {_with_constructor(kind)}"
    if is_method:
        method = target.__name__
        given = f"method {method!r} of {given}"
        passed = f"the method of the class, {_with_constructor(kind, method=method)}"
    elif not callable(target):
        given += ", which has no __call__,"
    return (
        f"{given} was given. A worker must construct the object itself, once, so that a model is "
        "loaded where it runs and stays warm there, and is never pickled: pass "
        f"{passed}; or decorate the class with @vd.cls, so that {name}(...) constructs nothing here"
    )


def _with_constructor(cls: type, method: str = "") -> str:
    """Show how a class is passed with the arguments of its constructor."""
    signature = signature_of(cls)
    taken = [] if signature is None else list(signature.parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    placed = ["..." for each in taken if each.kind is each.POSITIONAL_ONLY]
    named = [f'"{each.name}": ...' for each in taken if each.kind in kinds]
    written = [f"{qualname(cls)}.{method}" if method else qualname(cls)]
    written += [f"fn_constructor_args=[{', '.join(placed)}]"] if placed else []
    written += [f"fn_constructor_kwargs={{{', '.join(named)}}}"] if named else []
    return ", ".join(written)


def _members(cls: type) -> dict[str, Any]:
    bases = [base for base in reversed(cls.__mro__) if base is not object]
    return {name: member for base in bases for name, member in vars(base).items()}


def _style(function: Any) -> CallStyle:
    function = unwrapped(function)
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "plain"


def _check_arguments(where: str, udf: Udf, contract: Contract) -> None:
    call, has_self = called_function(udf.target, udf.method)
    given, named = contract.arguments()
    placed = (*(None,) * has_self, *given)
    _bind(where, call, placed, {**named, **udf.kwargs}, contract.form)
    if inspect.isclass(udf.target):
        arguments = (udf.constructor_args, udf.constructor_kwargs)
        _bind(where, udf.target, *arguments, "(*fn_constructor_args, **fn_constructor_kwargs)")
        if callable(probe := _members(udf.target).get("check_health")):
            _bind(where, probe, (None,), {}, "check_health(self), by which a worker asks it")


def _check_servers(where: str, udf: Udf) -> None:
    """Raise DefinitionError for servers that workers could not tell apart, or would not find."""
    if lost := udf.lost_servers:
        raise DefinitionError(
            f"{where}: {udf.name} refers to {lost[0]!r} by a closure, a partial or an object; "
            "expected it in fn_kwargs or fn_constructor_kwargs, which pass it with its address"
        )
    try:
        udf.servers  # noqa: B018  # looking them up raises
    except DefinitionError as error:
        raise DefinitionError(f"{where}: {error}") from None


def _handles(arguments: Any) -> Any:
    """Return arguments with handles in place of declared servers, also in lists and dicts."""
    if isinstance(arguments, ModelServer):
        return arguments.handle
    if type(arguments) in (list, tuple):
        return type(arguments)(map(_handles, arguments))
    if type(arguments) is dict:
        return {name: _handles(each) for name, each in arguments.items()}
    return arguments


def _refuse_lazy_arguments(where: str, udf: Udf) -> None:
    """Raise DefinitionError for an instance of a class under `vd.cls`, unless `version=` is given.

    It has no identity of its own: its class may change what the stage computes.
    """
    if udf.version is not None:
        return
    arguments = [
        *((f"fn_constructor_args[{i}]", value) for i, value in enumerate(udf.constructor_args)),
        *((repr(name), value) for name, value in udf.constructor_kwargs.items()),
        *((repr(name), value) for name, value in udf.kwargs.items()),
    ]
    for name, value in arguments:
        if (found := lazy_in(value)) is not None:
            inner = qualname(found._lazy_target)
            raise DefinitionError(
                f"{where}: argument {name} of {udf.name} is {found!r}, because of @vd.cls; "
                f"expected plain values. Call {inner}(...) in the __init__ of the class that the "
                "stage calls: it constructs an instance there, once in each worker. Pass that "
                f"class what {inner} needs, such as a path"
            )


def _bind(where: str, call: Any, args: tuple[Any, ...], kwargs: Any, shape: str) -> None:
    if (signature := signature_of(call)) is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{where}: {qualname(call)}{signature} cannot be called as {shape}: {error}"
        ) from None
