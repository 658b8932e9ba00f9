"""`cls`, `method` and `func`: options of a class or function, declared where it is defined.

Names and arguments are those of Daft, so that its classes and functions run unchanged. A class
under `cls` is constructed by workers alone: where a pipeline is declared, ``Model(path="m")`` keeps
the arguments and constructs nothing, and ``Model(path="m").classify`` names the method that a stage
calls.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from vane_dagster._arguments import mapping, positional
from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.decorators import OPTIONS
from vane_dagster.pipeline.known_arguments import known_arguments
from vane_dagster.pipeline.lazy_instances import (
    Construction,
    ConstructorSignature,
    LazyInstance,
    LazyMethod,
)

if TYPE_CHECKING:
    from vane_dagster.pipeline.options import OnError

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_ON_ERROR: Mapping[str | None, OnError | None] = {
    None: None, "raise": "raise", "log": "null", "ignore": "null",
}  # fmt: skip
_ROW_ARGUMENTS = ("return_dtype", "unnest", "max_retries", "on_error")
_WORKER_ARGUMENTS = (
    "cpus", "gpus", "use_process", "max_concurrency", "name_override", "ray_options",
)  # fmt: skip
_OURS = {"cpus": "num_cpus", "name_override": "label"}
_OF_METHODS = {
    **dict.fromkeys(("return_dtype", "unnest"), "the decorator of its method, @vd.method"),
    "batch_size": "the decorator of its method, @vd.method.batch",
}
_OF_CLASSES = dict.fromkeys(_WORKER_ARGUMENTS, "the decorator of its class, @vd.cls")
_MORE = ". All others are arguments of the stage"


@dataclass(frozen=True)
class CallOptions:
    """Options that a function, a method or a class declares for the stages that call it.

    A stage's own arguments override them.

    Attributes:
        return_dtype: The type of the result, as the user wrote it; None if annotated.
        is_batch: Whether it takes columns in place of the values of one row.
        unnest: Whether the fields of a struct become columns.
        batch_size: Rows per call.
        gpus: GPUs that a worker reserves.
        num_cpus: CPUs that a worker reserves.
        max_concurrency: Calls that run at the same time.
        max_retries: Retries of a call after a transient error.
        on_error: The stage's `on_error`: "raise" or "null".
        label: The name shown for it.
    """

    return_dtype: Any = None
    is_batch: bool = False
    unnest: bool = False
    batch_size: int | None = None
    gpus: float | None = None
    num_cpus: float | None = None
    max_concurrency: int | None = None
    max_retries: int | None = None
    on_error: OnError | None = None
    label: str | None = None


NO_OPTIONS: Final = CallOptions()


def _call_options(
    where: str,
    *,
    use_process: bool | None = None,
    ray_options: Mapping[str, Any] | None = None,
    on_error: str | None = None,
    **given: Any,
) -> CallOptions:
    """Translate the arguments of a decorator.

    Raises:
        DefinitionError: If an argument has no meaning here, or a wrong value.
    """
    if use_process is not None and use_process is not True:
        raise DefinitionError(
            f"{where}: use_process is {use_process!r}, but a worker is always a process of its "
            "own, so that a crash or a leak ends nothing else; leave it out"
        )
    if ray_options:
        raise DefinitionError(
            f"{where}: ray_options are not taken here; give the stage what its workers reserve: "
            'concurrency=vd.Workers(resources={"name": 1}), and likewise accelerator_type or memory'
        )
    if on_error not in _ON_ERROR:
        raise DefinitionError(
            f"{where}: on_error is {on_error!r}; expected 'raise', 'log' or 'ignore'. To store "
            'failed rows beside the output, give the stage on_error="quarantine"'
        )
    for name, least in (("batch_size", 1), ("max_concurrency", 1), ("max_retries", 0)):
        value = given.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise DefinitionError(
                f"{where}: {name} is {value!r}; expected a whole number from {least} up"
            )
    return CallOptions(on_error=_ON_ERROR[on_error], **given)


# Classes


@overload
def cls(class_: C) -> C: ...
@overload
def cls(
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    use_process: bool | None = None,
    max_concurrency: int | None = None,
    max_retries: int | None = None,
    on_error: str | None = None,
    name_override: str | None = None,
    ray_options: Mapping[str, Any] | None = None,
) -> Callable[[C], C]: ...
@known_arguments("@vd.cls", elsewhere=_OF_METHODS, more=_MORE)
def cls(
    class_: Any = None,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    use_process: bool | None = None,
    max_concurrency: int | None = None,
    max_retries: int | None = None,
    on_error: str | None = None,
    name_override: str | None = None,
    ray_options: Mapping[str, Any] | None = None,
) -> Any:
    """Let a class be called in a pipeline without constructing it, as ``Model("m").classify``.

    Calling the class keeps its arguments in a `LazyInstance`, and checks that the constructor takes
    them. Workers construct it, once each. A method of a lazy instance is the `fn` of a stage. If it
    is called with values, as in a test, it constructs the class in this process, once, and returns
    the result. The class object stays the same: it can be inherited from, pickled and tested for
    by `isinstance`. A subclass is lazy if it is decorated itself.

    A class that is constructed while a worker runs the user's code, such as a tokenizer in a
    model's ``__init__``, is constructed at once.

    The arguments have the names of `daft.cls`. Each is the default of the stages that use the
    class. None of them counts in fragment keys.

    Args:
        class_: The class, if the decorator has no arguments.
        cpus: CPUs that a worker reserves: the stage's `num_cpus`.
        gpus: GPUs that a worker reserves: the stage's `gpus`.
        use_process: None or True, which is always so: each worker is a process. False is refused.
        max_concurrency: Calls that run at the same time: workers for methods that are not async, as
            the stage's `concurrency`; calls in flight in one worker for async methods.
        max_retries: Retries of a call after a transient error: the stage's `max_retries`.
        on_error: "raise"; or "log" or "ignore", which make a failed row a row of nulls with its
            error in a column "error", as the stage's ``on_error="null"``.
        name_override: The name shown for the class.
        ray_options: Refused; the message names the stage's arguments for it.

    Raises:
        DefinitionError: If an argument is refused, or it decorates something other than a class.
    """

    def decorate(target: Any) -> Any:
        name = getattr(target, "__qualname__", repr(target))
        if not inspect.isclass(target):
            raise DefinitionError(
                f"@vd.cls on {name}, which is no class; use @vd.func for a function, @vd.method "
                "for a method"
            )
        options = _call_options(
            f"@vd.cls on class {name}",
            use_process=use_process,
            ray_options=ray_options,
            on_error=on_error,
            gpus=gpus,
            num_cpus=cpus,
            max_concurrency=max_concurrency,
            max_retries=max_retries,
            label=name_override,
        )
        if "__new__" in vars(target) and not isinstance(vars(target)["__new__"], Construction):
            raise DefinitionError(
                f"@vd.cls on class {name}, which defines __new__; the decorator needs it to delay "
                "the construction. Move what it does to __init__"
            )
        setattr(target, OPTIONS, options)
        setattr(target, "__new__", Construction())  # noqa: B010  # mypy knows another type
        setattr(target, "__signature__", ConstructorSignature())  # noqa: B010  # mypy knows no such attribute
        return target

    return decorate if class_ is None else decorate(class_)


# Methods and functions


def _mark(function: Any, decorator: str, **given: Any) -> Any:
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function):
        raise DefinitionError(
            f"@vd.{decorator} on {name}, which is no function; put it next to the def, and other "
            "decorators above it"
        )
    setattr(function, OPTIONS, _call_options(f"@vd.{decorator} on {name}", **given))
    return function


class _MethodDecorator:
    """The decorator `vd.method`, and `vd.method.batch`."""

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(
        self,
        *,
        return_dtype: Any = None,
        unnest: bool = False,
        max_retries: int | None = None,
        on_error: str | None = None,
    ) -> Callable[[F], F]: ...
    @known_arguments(
        "@vd.method",
        elsewhere={**_OF_CLASSES, "batch_size": "the decorator @vd.method.batch"},
        more=_MORE,
    )
    def __call__(
        self,
        function: Any = None,
        *,
        return_dtype: Any = None,
        unnest: bool = False,
        max_retries: int | None = None,
        on_error: str | None = None,
    ) -> Any:
        """Declare the result of a method that takes the values of one row.

        A method needs it only to state what its annotations do not. The arguments have the names
        of `daft.method`; a stage's own arguments override them.

        Args:
            function: The method, if the decorator has no arguments.
            return_dtype: The type of the result: SQL ("FLOAT[384]"), a `pyarrow.DataType`, a Python
                annotation, an object with `to_arrow_dtype` such as a `daft.DataType`, or a mapping
                of columns to types. Default: the return annotation.
            unnest: Whether the fields of a struct become columns.
            max_retries: Retries of a call after a transient error.
            on_error: See `cls`.

        Raises:
            DefinitionError: If an argument has a wrong value.
        """

        def decorate(target: Any) -> Any:
            return _mark(
                target,
                "method",
                return_dtype=return_dtype,
                unnest=unnest,
                max_retries=max_retries,
                on_error=on_error,
            )

        return decorate if function is None else decorate(function)

    @known_arguments("@vd.method.batch", elsewhere=_OF_CLASSES, more=_MORE)
    def batch(
        self,
        *,
        return_dtype: Any,
        unnest: bool = False,
        batch_size: int | None = None,
        max_retries: int | None = None,
        on_error: str | None = None,
    ) -> Callable[[F], F]:
        """Declare the result of a method that takes columns, one array each, and returns a column.

        Args:
            return_dtype: See `vd.method`.
            unnest: Whether the fields of a struct become columns.
            batch_size: Rows per call.
            max_retries: Retries of a call after a transient error.
            on_error: See `cls`.

        Raises:
            DefinitionError: If an argument has a wrong value.
        """

        def decorate(target: Any) -> Any:
            return _mark(
                target,
                "method.batch",
                return_dtype=return_dtype,
                unnest=unnest,
                is_batch=True,
                batch_size=batch_size,
                max_retries=max_retries,
                on_error=on_error,
            )

        return decorate


class _FuncDecorator:
    """The decorator `vd.func`, and `vd.func.batch`."""

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, **options: Any) -> Callable[[F], F]: ...
    @known_arguments(
        "@vd.func",
        (*_ROW_ARGUMENTS, *_WORKER_ARGUMENTS),
        {"batch_size": "the decorator @vd.func.batch"},
        _MORE,
    )
    def __call__(self, function: Any = None, **options: Any) -> Any:
        """Declare the result and the options of a function that takes the values of one row.

        The function stays what it is, and can be called with values. The arguments are those of
        `vd.method`, and of `vd.cls` for the workers: `cpus`, `gpus`, `use_process`,
        `max_concurrency`, `name_override` and `ray_options`.

        Args:
            function: The function, if the decorator has no arguments.
            **options: The arguments.

        Raises:
            DefinitionError: If an argument is unknown, refused, or has a wrong value.
        """
        found = {_OURS.get(name, name): value for name, value in options.items()}

        def decorate(target: Any) -> Any:
            return _mark(target, "func", **found)

        return decorate if function is None else decorate(function)

    @known_arguments(
        "@vd.func.batch", (*_ROW_ARGUMENTS, "batch_size", *_WORKER_ARGUMENTS), more=_MORE
    )
    def batch(self, *, return_dtype: Any, **options: Any) -> Callable[[F], F]:
        """Declare the result and the options of a function that takes columns.

        Args:
            return_dtype: See `vd.method`.
            **options: `batch_size`, and the arguments of `vd.func`.

        Raises:
            DefinitionError: If an argument is unknown, refused, or has a wrong value.
        """
        found = {_OURS.get(name, name): value for name, value in options.items()}

        def decorate(target: Any) -> Any:
            return _mark(target, "func.batch", is_batch=True, return_dtype=return_dtype, **found)

        return decorate


method = _MethodDecorator()
func = _FuncDecorator()


# What a stage is given


@dataclass(frozen=True)
class Callee:
    """The code that a stage calls, with its arguments.

    Attributes:
        target: The class or function.
        method: The method that is called, for a class.
        kwargs: The keyword arguments of each call.
        constructor_args: The positional arguments of the constructor.
        constructor_kwargs: The keyword arguments of the constructor.
        options: What its decorators declare.
    """

    target: Any
    method: str = "__call__"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    constructor_args: tuple[Any, ...] = ()
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: CallOptions = NO_OPTIONS

    @property
    def name(self) -> str:
        """The name for users."""
        name = str(getattr(self.target, "__qualname__", repr(self.target)))
        return f"{name}.{self.method}" if inspect.isclass(self.target) else name


def resolve(
    location: str,
    fn: Any,
    constructor_args: Sequence[Any],
    constructor_kwargs: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any] | None = None,
) -> Callee:
    """Find the class or function, and the method, that `fn` stands for.

    Args:
        location: The stage, for messages.
        fn: A function or class; a `functools.partial` of one; an unbound method of a class; or, of
            a class under `vd.cls`, an instance that is not constructed, or a method of it.
        constructor_args: The constructor's positional arguments, given beside `fn`.
        constructor_kwargs: The constructor's keyword arguments, given beside `fn`.
        kwargs: The keyword arguments of each call.

    Raises:
        DefinitionError: If the constructor's arguments are given twice, a method's class is not
            found, or several classes inherit it.
    """
    name, given = "__call__", functools.partial(object)
    if isinstance(fn, LazyMethod):
        fn, name = fn.instance, fn.name
    if isinstance(fn, LazyInstance):
        given = functools.partial(fn._lazy_target, *fn._lazy_args, **fn._lazy_kwargs)
    elif isinstance(fn, functools.partial) and inspect.isclass(fn.func):
        given = fn
    if given.func is not object:
        if constructor_args or constructor_kwargs:
            raise DefinitionError(
                f"{location}: {given.func.__qualname__}(...) has its constructor's arguments "
                "already; leave out fn_constructor_args and fn_constructor_kwargs"
            )
        fn, constructor_args, constructor_kwargs = given.func, given.args, given.keywords
    if isinstance(fn, functools.partial) and isinstance(fn.func, (LazyInstance, LazyMethod)):
        raise DefinitionError(
            f"{location}: functools.partial of {fn.func!r}; pass the method itself, and the other "
            "arguments as fn_kwargs"
        )
    has_arguments = bool(constructor_args or constructor_kwargs)
    if inspect.isfunction(fn) and (owner := _class_of(location, fn, has_arguments)):
        fn, name = owner, getattr(fn, "__name__", name)
    return Callee(
        fn,
        name,
        mapping(location, "fn_kwargs", kwargs),
        positional(location, "fn_constructor_args", constructor_args),
        mapping(location, "fn_constructor_kwargs", constructor_kwargs),
        _options(fn, name) if inspect.isclass(fn) else _own_options(fn),
    )


def _own_options(function: Any) -> CallOptions:
    found = getattr(function, OPTIONS, None)
    return found if isinstance(found, CallOptions) else NO_OPTIONS


def _options(target: type, name: str) -> CallOptions:
    """Return the options of a method, completed by those of its class."""
    of_class = vars(target).get(OPTIONS, NO_OPTIONS)
    own = _own_options(inspect.getattr_static(target, name, None))
    either = {
        each: getattr(of_class, each) if getattr(own, each) is None else getattr(own, each)
        for each in CallOptions.__dataclass_fields__
    }
    return CallOptions(**either)


def _class_of(location: str, function: Any, with_arguments: bool) -> type | None:
    """Return the class of a method that was taken from it; None for other functions."""
    path, _, name = function.__qualname__.rpartition(".")
    parameters = list(inspect.signature(function).parameters)
    is_method = with_arguments or hasattr(function, OPTIONS) or parameters[:1] == ["self"]
    if not path or path.endswith("<locals>") or not is_method:
        return None
    owner: Any = sys.modules.get(function.__module__)
    for part in path.split("."):
        owner = None if owner is None else vars(owner).get(part)
    if isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod):
        return None
    if not isinstance(owner, type) or vars(owner).get(name) != function:
        raise DefinitionError(
            f"{location}: {function.__qualname__} is a method, but {function.__module__} has no "
            f"class {path!r} with it. Define the class at the top level of a module, or decorate "
            f"it with @vd.cls and pass a method of its instance, as in Model(...).{name}"
        )
    if inheriting := _inheriting(owner, function):
        decorate = "Say" if OPTIONS in vars(owner) else "Decorate the class with @vd.cls, and say"
        raise DefinitionError(
            f"{location}: {function.__qualname__} may be the method of {path} or of "
            f"{', '.join(inheriting)}, which inherit it. {decorate} "
            f"which: fn={inheriting[0]}(...).{name}"
        )
    return owner


def _inheriting(owner: type, function: Any) -> list[str]:
    """Return the names of the subclasses that inherit a method."""
    found: list[str] = []
    subclasses: list[type] = type.__subclasses__(owner)
    for each in subclasses:
        if inspect.getattr_static(each, function.__name__, None) is function:
            found += [each.__qualname__, *_inheriting(each, function)]
    return sorted(found)
