"""User functions and classes: validation, and how each is called."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vane_dagster._arguments import mapping, positional
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.local_file import LocalFile, found_in
from vane_dagster.pipeline.contracts import CALL, DeclaredCall
from vane_dagster.pipeline.decorators import CallOptions, options_of
from vane_dagster.pipeline.lazy_instances import LazyInstance
from vane_dagster.pipeline.records import Workers
from vane_dagster.pipeline.servers import ModelServer, servers_by_key
from vane_dagster.types.callables import check_call, is_function, qualname, signature_of, unwrapped


@dataclass(frozen=True)
class Udf:
    """A user's function or class with its arguments, from which a worker creates the callable.

    Attributes:
        target: The function, or the class or factory that a worker calls once to construct the
            callable.
        stateful: Whether it is constructed, by a class or a factory.
        is_async: Whether several calls can be in flight in one actor.
        kwargs: Passed to each call.
        constructor_args: Passed to the class or factory.
        constructor_kwargs: Passed to the class or factory.
        version: Replaces the code identity, if the user sets it.
        method: The method of the constructed object that is called.
        is_factory: Whether the target is a function that returns the callable.
        options: What its decorators declare.
    """

    target: Callable[..., Any]
    stateful: bool
    is_async: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    constructor_args: tuple[Any, ...] = field(default=(), repr=False)
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    version: str | None = None
    method: str = CALL
    is_factory: bool = False
    options: CallOptions = field(default_factory=CallOptions)

    @property
    def name(self) -> str:
        """The label, or the target's qualified name."""
        own = str(getattr(self.target, "__qualname__", repr(self.target)))
        return self.options.get("name_override") or own

    def redefined(self) -> Any:
        """Return what a notebook now has under the target's name; None if it is the target."""
        target, main = unwrapped(self.target), sys.modules["__main__"]
        if getattr(target, "__module__", "") != "__main__" or hasattr(main, "__file__"):
            return None
        latest = unwrapped(getattr(main, target.__qualname__, target))
        return latest if type(latest) is type(target) and latest is not target else None

    @property
    def call(self) -> Any:
        """What is called with rows: the function, or the class's method; None for a factory."""
        if not self.stateful:
            return self.target
        return None if self.is_factory else getattr(unwrapped(self.target), self.method)

    @property
    def local_files(self) -> Sequence[LocalFile]:
        """The local files among the arguments."""
        return list(found_in(self._references, LocalFile))

    @property
    def servers(self) -> Mapping[str, ModelServer]:
        """The servers among the arguments, by their key."""
        return servers_by_key(found_in(self._references, ModelServer))

    @property
    def _references(self) -> tuple[Any, ...]:
        return (self.kwargs, self.constructor_args, self.constructor_kwargs, self.target)

    def workers(self, location: str, gpus: float, given: Workers, in_flight: int) -> Workers:
        """Return workers, completed by what the decorators declare, and by defaults."""
        given._bundle(location, gpus)
        most = given.max_concurrency or self.options.get("max_concurrency")
        default = (1, 1) if self.stateful else None
        count = given.count or (None if self.is_async else most) or default
        cpus = self.options.get("cpus") if given.num_cpus is None else given.num_cpus
        return replace(given, count=count, num_cpus=cpus, max_concurrency=most or in_flight)


def make_udf(
    where: str,
    fn: Any,
    constructor_args: Sequence[Any] = (),
    constructor_kwargs: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    is_factory: bool = False,
) -> Udf:
    """Find the class or function, and the method, that `fn` stands for."""
    method, called_with = CALL, mapping(where, "fn_kwargs", kwargs)
    placed = positional(
        where, "fn_constructor_args", constructor_args, "a list of arguments, such as [...]"
    )
    named = mapping(where, "fn_constructor_kwargs", constructor_kwargs)
    while isinstance(fn, functools.partial) and not (inspect.isclass(fn.func) or is_factory):
        if fn.args:
            raise DefinitionError(
                f"{where}: functools.partial of {fn.func!r} has arguments by position; pass them "
                "by name"
            )
        fn, called_with = fn.func, {**fn.keywords, **called_with}
    if isinstance(fn, LazyInstance):
        method = fn._lazy_method
        fn = functools.partial(fn._lazy_target, *fn._lazy_args, **fn._lazy_kwargs)
    if isinstance(fn, functools.partial):
        if placed or named:
            raise DefinitionError(
                f"{where}: {qualname(fn.func)}(...) has its constructor's arguments already; leave "
                "out fn_constructor_args and fn_constructor_kwargs"
            )
        fn, placed, named = fn.func, fn.args, fn.keywords
    _check_callable(where, fn, method, is_factory)
    stateful = is_factory or inspect.isclass(fn)
    if not stateful and (placed or named):
        raise DefinitionError(
            f"{where}: {qualname(fn)} is a function, so fn_constructor_args and "
            "fn_constructor_kwargs do not apply; pass fn_kwargs, or write a class"
        )
    udf = Udf(
        target=fn,
        stateful=stateful,
        is_async=not is_factory and is_async_function(getattr(fn, method) if stateful else fn),
        # In the order of their names, which is not part of the identity.
        kwargs=dict(sorted(called_with.items())),
        constructor_args=placed,
        constructor_kwargs=dict(sorted(named.items())),
        method=method,
        is_factory=is_factory,
        options=options_of(fn, method),
    )
    keep_arguments(udf.constructor_args, udf.kwargs, udf.constructor_kwargs)
    return udf


def check_calls(where: str, udf: Udf, contract: DeclaredCall) -> None:
    """Check that the code takes its arguments, and that workers can have them."""
    if udf.stateful:
        of_class = (udf.constructor_args, udf.constructor_kwargs)
        check_call(where, udf.target, *of_class, "(*fn_constructor_args, **fn_constructor_kwargs)")
    if not udf.is_factory:
        call, has_self = called_function(udf.target, udf.method)
        given, named = contract.arguments()
        placed = (*(None,) * has_self, *given)
        check_call(where, call, placed, {**named, **udf.kwargs}, contract.form)
    if inspect.isclass(udf.target) and callable(probe := _members(udf.target).get("check_health")):
        check_call(where, probe, (None,), {}, "check_health(self), by which a worker asks it")
    try:
        udf.servers  # noqa: B018  # looking them up raises
    except DefinitionError as error:
        raise DefinitionError(f"{where}: {error}") from None
    arguments = (udf.constructor_args, udf.constructor_kwargs, udf.kwargs)
    lazy = next(found_in(arguments, LazyInstance), None)
    if lazy is not None and udf.version is None:  # its class may change what the stage computes
        inner = qualname(lazy._lazy_target)
        raise DefinitionError(
            f"{where}: an argument of {udf.name} is {lazy!r}, because of @vd.cls; expected plain "
            f"values. Call {inner}(...) in the __init__ of the class that the stage calls, which "
            "constructs an instance once in each worker. Pass the arguments of "
            f"{inner}, such as a path, to that class"
        )


def _check_callable(where: str, target: Any, method: str, is_factory: bool) -> None:
    """Check that a target is a function, or a class with the method that is called."""
    if inspect.isclass(target):
        if is_factory:
            raise DefinitionError(
                f"{where}: class {qualname(target)} was given; expected a function that loads the "
                "model and returns the function to call. For a class use map or map_batches"
            )
        if not callable(_members(target).get(method)):
            raise DefinitionError(
                f"{where}: class {qualname(target)} has no {method}; define it, for example "
                "__call__(self, batch): workers call it"
            )
        return
    if is_function(target):
        signature = signature_of(target)
        is_method = "." in qualname(target) and signature and "self" in signature.parameters
        if not is_method:
            return
    elif inspect.isfunction(function := inspect.unwrap(target)):
        raise DefinitionError(
            f"{where}: {qualname(function)} is wrapped in a {type(target).__name__}, whose state "
            "workers do not share; pass the function without its decorator. Equal rows of a "
            "fragment share a result without a cache"
        )
    raise DefinitionError(
        f"{where}: {qualname(target)} was given as a method or an instance; expected a function or "
        "a class. Each worker constructs the object once, so that a model is loaded where it runs, "
        "stays warm there, and is never pickled. Decorate the class with @vd.cls, so that calling "
        "it constructs nothing here, or pass functools.partial(<class>, ...). For a class of a "
        "library, write a class that constructs it in __init__ and calls it in __call__"
    )


def called_function(target: Any, method: str = CALL) -> tuple[Any, bool]:
    """Return the function that is called with rows, and whether its first parameter is `self`."""
    if not inspect.isclass(target):
        return target, False
    is_static = isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod))
    return getattr(target, method), not is_static


def _members(cls: type) -> dict[str, Any]:
    bases = [base for base in reversed(cls.__mro__) if base is not object]
    return {name: member for base in bases for name, member in vars(base).items()}


def is_async_function(function: Any) -> bool:
    """Return whether calls of a function are awaited, or iterated asynchronously."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
