"""Users' functions and classes as Python objects: what is inside, the signature, the name."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def unwrapped(obj: Any) -> Any:
    """Return the function or class wrapped by partials and method descriptors."""
    while isinstance(obj, (functools.partial, staticmethod, classmethod)):
        obj = obj.func if isinstance(obj, functools.partial) else obj.__func__
    return obj


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function or class; None if it declares none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins and extension types may have no signature
        return None


def qualname(target: object) -> str:
    """Return the qualified name of a function, method or class, else the name of its class."""
    return str(getattr(target, "__qualname__", type(target).__name__))
