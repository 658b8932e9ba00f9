"""Users' functions and classes as Python objects: what is inside, the signature, the name."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any

from vane_dagster.errors import DefinitionError


def unwrapped(obj: Any) -> Any:
    """Return the function or class wrapped by partials and method descriptors."""
    while isinstance(obj, (functools.partial, staticmethod, classmethod)):
        obj = obj.func if isinstance(obj, functools.partial) else obj.__func__
    return obj


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of a function by parameter."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def captured_by(function: Any) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function captures, if they are set."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    values: dict[str, Any] = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def constructors(target: Any) -> list[str]:
    """Return the names of a class and its bases, and their constructors' source.

    Empty for anything but a class, and if the source of a constructor is not there.
    """
    texts = []
    for base in inspect.getmro(target) if inspect.isclass(target) else ():
        texts.append(base.__qualname__)  # a script's module has two names
        if inspect.isfunction(constructor := vars(base).get("__init__")):
            try:
                texts.append(inspect.getsource(constructor))
            except (OSError, TypeError):
                return []
    return texts


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function or class; None if it declares none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins and extension types may have no signature
        return None


def is_function(obj: Any) -> bool:
    """Return whether an object is a function, a builtin, or a method of a class itself."""
    of_class = inspect.ismethod(obj) and inspect.isclass(obj.__self__)
    return inspect.isfunction(obj) or inspect.isbuiltin(obj) or of_class


def check_call(where: str, call: Any, args: tuple[Any, ...], kwargs: Any, form: str) -> None:
    """Raise DefinitionError if arguments do not fit a signature, as far as there is one."""
    if (signature := signature_of(call)) is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{where}: {qualname(unwrapped(call))}{signature} cannot be called as {form}: {error}"
        ) from None


def qualname(target: object) -> str:
    """Return the qualified name of a function, method or class, else the name of its class."""
    return str(getattr(target, "__qualname__", type(target).__name__))
