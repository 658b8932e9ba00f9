"""`cls`, `method` and `func`: options of a class or function, declared where it is defined.

Names and arguments are those of Daft, so that its classes and functions run unchanged. A class
under `cls` is constructed by workers alone: where a pipeline is declared, ``Model(path="m")`` keeps
the arguments and constructs nothing, and ``Model(path="m").classify`` names the method that a stage
calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, overload

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.decorators import OPTIONS
from vane_dagster.pipeline.lazy_instances import Construction, ConstructorSignature

if TYPE_CHECKING:
    from typing import Unpack

    from vane_dagster.pipeline.options import OnError

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

ON_ERROR: Mapping[str | None, OnError | None] = {
    None: None, "raise": "raise", "log": "null", "ignore": "null",
}  # fmt: skip
"""The `on_error` of a stage, by that of Daft."""
_METHOD = "@vd.func or @vd.method"
_ADVICE = {"batch_size": f"write it at {_METHOD.replace(' ', '.batch ', 1)}.batch"}
_MORE = ". All others are arguments of the stage"


class ClassArguments(TypedDict, total=False):
    """The arguments of `vd.cls`."""

    cpus: float | None
    gpus: float | None
    use_process: bool | None
    max_concurrency: int | None
    max_retries: int | None
    on_error: str | None
    name_override: str | None


class FunctionArguments(ClassArguments, total=False):
    """The arguments of `vd.func` and `vd.method`."""

    return_dtype: Any
    unnest: bool
    batch_size: int | None


class CallOptions(FunctionArguments, total=False):
    """What a function, a method or a class declares for the stages that call it.

    A stage's own arguments override them. With `is_batch` it takes columns in place of the values
    of one row.
    """

    is_batch: bool


def _checked(given: Mapping[str, Any]) -> CallOptions:
    """Return the arguments of a decorator without those that are None; stages validate them."""
    on_error = given.get("on_error")
    if on_error not in ON_ERROR:
        raise DefinitionError(
            f"a decorator of vd: on_error is {on_error!r}; expected 'raise', 'log' or 'ignore'. To "
            'store failed rows beside the output, give the stage on_error="quarantine"'
        )
    return cast(CallOptions, {name: each for name, each in given.items() if each is not None})


def options_of(target: Any, method: str) -> CallOptions:
    """Return the options of a function; or of a method, completed by those of its class."""
    if not inspect.isclass(target):
        return cast(CallOptions, getattr(target, OPTIONS, {}))
    own = options_of(inspect.getattr_static(target, method, None), method)
    return cast(CallOptions, {**vars(target).get(OPTIONS, {}), **own})


@overload
def cls(class_: C) -> C: ...
@overload
def cls(**options: Unpack[ClassArguments]) -> Callable[[C], C]: ...
@known_keywords(
    "@vd.cls",
    {**_ADVICE, **dict.fromkeys(("return_dtype", "unnest"), "write it at its method, @vd.method")},
    more=_MORE,
)
def cls(class_: Any = None, **options: Unpack[ClassArguments]) -> Any:
    """Let a class be called in a pipeline without constructing it: ``Model("m").classify``.

    Calling the class stores its arguments in a `LazyInstance`, and checks that the constructor
    accepts them. Each worker constructs the class once. Pass a method of the lazy instance as the
    `fn` of a stage. If the method is called with values, for example in a test, the class is
    constructed once in this process, and the result is returned. The class object stays the same:
    it can be inherited from, pickled and used with `isinstance`. A subclass is lazy only if it is
    decorated too.

    Stages that call methods of one lazy instance share its workers, so the model is loaded once.
    Calls of async methods are in flight at the same time, but not together with a call of a
    synchronous method. Each stage has separate keys: an edit of a method under `vd.method`
    recomputes the stages of other methods only if their code may call it.

    In user code that a worker runs, a class is constructed at once, such as a tokenizer in a
    model's ``__init__``.

    The arguments have the names of `daft.cls`. They are defaults for the stages that use the class,
    and are not part of fragment keys.

    Args:
        class_: The class, if the decorator has no arguments.
        cpus: CPUs that a worker reserves, like the stage's `num_cpus`.
        gpus: GPUs that a worker reserves, like the stage's `gpus`.
        use_process: Ignored: each worker is a process.
        max_concurrency: Calls that run at the same time. For synchronous methods, the number of
            workers, like the stage's `concurrency`; for async methods, calls in flight in one
            worker.
        max_retries: Retries of a call after a transient error, like the stage's `max_retries`.
        on_error: "raise"; or "log" or "ignore", which keep a failed row as a row of nulls with its
            error in a column "error", like the stage's ``on_error="null"``.
        name_override: The name shown for the class.

    Raises:
        DefinitionError: If an argument is refused, or it decorates something other than a class.
    """
    declared = _checked(options)

    def decorate(target: Any) -> Any:
        name = getattr(target, "__qualname__", repr(target))
        if not inspect.isclass(target):
            raise DefinitionError(
                f"@vd.cls on {name}, which is not a class; use @vd.func for a function, @vd.method "
                "for a method"
            )
        if target.__new__ is not object.__new__ and not isinstance(target.__new__, Construction):
            raise DefinitionError(
                f"@vd.cls on class {name}, which defines or inherits __new__; the decorator needs "
                "__new__ to delay the construction. Move its code to __init__, or write a class "
                "that constructs this one in __init__"
            )
        setattr(target, OPTIONS, declared)
        setattr(target, "__new__", Construction())  # noqa: B010  # mypy knows another type
        setattr(target, "__signature__", ConstructorSignature())  # noqa: B010  # mypy knows no such attribute
        return target

    return decorate if class_ is None else decorate(class_)


class _FunctionDecorator:
    """The decorators `vd.func` and `vd.method`, which are equal, and their `batch`."""

    batch: _FunctionDecorator

    def __init__(self, is_batch: bool) -> None:
        self._is_batch = is_batch

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, **options: Unpack[FunctionArguments]) -> Callable[[F], F]: ...
    @known_keywords(_METHOD, _ADVICE, more=_MORE)
    def __call__(self, function: Any = None, **options: Unpack[FunctionArguments]) -> Any:
        """Declare the result and the options of a function or method of the values of one row.

        The function is not changed, and can be called with values. It needs the decorator only for
        declarations that its annotations do not make. The arguments have the names of `daft.func`.
        Arguments of a method override those of its class, and a stage's arguments override both.

        With `.batch` the function receives an array for each column, and returns a column.
        """
        if self._is_batch and options.get("return_dtype") is None:
            raise DefinitionError(f"{_METHOD}: batch lacks its argument 'return_dtype'")
        if options.get("batch_size") is not None and not self._is_batch:
            raise DefinitionError(f"{_METHOD}: batch_size is an argument of {_METHOD}.batch")
        declared = _checked({**options, "is_batch": self._is_batch or None})
        mark = functools.partial(_mark, declared)
        return mark if function is None else mark(function)


def _mark(options: CallOptions, function: Any) -> Any:
    if not inspect.isfunction(function):
        name = getattr(function, "__qualname__", repr(function))
        raise DefinitionError(
            f"{_METHOD} on {name}, which is not a function; put the decorator directly above the "
            "def, and other decorators above it"
        )
    setattr(function, OPTIONS, options)
    return function


method = func = _FunctionDecorator(is_batch=False)
func.batch = _FunctionDecorator(is_batch=True)
