"""Classes under `vd.cls` without an instance: what their constructor returns in a pipeline.

Workers import this module, and construct the classes for real.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vane_dagster._worker_process import is_worker
from vane_dagster.types.callables import check_call

_IMPORTS = "<frozen importlib._bootstrap>"


class Construction:
    """The ``__new__`` of a decorated class."""

    def __call__(self, target: type, /, *args: Any, **kwargs: Any) -> Any:
        is_decorated = isinstance(vars(target).get("__new__"), Construction)
        if is_decorated and not _constructs_now():
            return LazyInstance(target, args, kwargs)
        return object.__new__(target)


class ConstructorSignature:
    """The ``__signature__`` of a decorated class and its subclasses: that of the constructor."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(
            parameters=list(signature.parameters.values())[1:],
            return_annotation=inspect.Signature.empty,
        )


def construct(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Construct a class, or call an instance, with every decorated class constructed at once."""
    return call(*args, **kwargs)


def _constructs_now() -> bool:
    """Return whether a construction is part of the user's code that runs, and declares no stage.

    A worker imports modules that declare pipelines, too; what they construct remains lazy.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is construct.__code__:
            return True
        if frame.f_code.co_filename == _IMPORTS:
            return False
    return is_worker()


class LazyInstance:
    """A class and the arguments of its constructor, in place of an instance or a method of it."""

    __slots__ = ("_lazy_args", "_lazy_kwargs", "_lazy_made", "_lazy_method", "_lazy_target")

    def __init__(
        self,
        target: type,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        method: str = "__call__",
        made: list[Any] | None = None,
    ) -> None:
        check_call("@vd.cls", target, args, kwargs, f"{target.__name__}(...)")
        self._lazy_target, self._lazy_args, self._lazy_kwargs = target, args, dict(kwargs)
        self._lazy_method, self._lazy_made = method, [] if made is None else made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_lazy_") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        target = self._lazy_target
        member = inspect.getattr_static(target, name, None)
        if isinstance(member, (staticmethod, classmethod, type)):
            return getattr(target, name)
        if callable(member):
            made = self._lazy_made
            return LazyInstance(target, self._lazy_args, self._lazy_kwargs, name, made)
        raise AttributeError(
            f"{target.__qualname__} has no method {name!r}. Because of @vd.cls, the class is "
            f"constructed in workers, not here, so only its methods are available here: pass "
            f"{target.__qualname__}(...).<method> as the fn of a stage"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Construct the class in this process, once, and call the method."""
        if not self._lazy_made:
            made = construct(self._lazy_target, self._lazy_args, self._lazy_kwargs)
            self._lazy_made.append(made)
        return construct(getattr(self._lazy_made[0], self._lazy_method), args, kwargs)

    def __reduce__(self) -> Any:
        given = (self._lazy_target, self._lazy_args, self._lazy_kwargs, self._lazy_method)
        return LazyInstance, given

    def __repr__(self) -> str:
        method = "" if self._lazy_method == "__call__" else f".{self._lazy_method}"
        return f"<{self._lazy_target.__qualname__}{method}, not constructed here>"
