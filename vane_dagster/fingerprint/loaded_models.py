"""Models that a module loads when it is imported, and that a function reaches by name.

They work, but each process that imports the module loads them: the code location, each run, and
each worker, also of stages that never use them. A class that loads them in its constructor is
constructed once in each worker of its own pool.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vane_dagster.fingerprint.ast_digest import global_names
from vane_dagster.fingerprint.values import model_class
from vane_dagster.types.callables import captured_by, defaults_of, unwrapped


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model that code refers to.

    Attributes:
        name: The name by which the code refers to it.
        kind: The name of its class.
        module: The module with the model; empty if it is a default or in a closure.
    """

    name: str
    kind: str
    module: str


def loaded_models(target: Callable[..., Any]) -> list[LoadedModel]:
    """Return the loaded models that a function or class reaches through names of modules.

    Functions and classes of the same package are followed. Nothing is imported.
    """
    start = unwrapped(target)
    package = _package(start)
    found: dict[LoadedModel, None] = {}
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        code = waiting.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        for name, module, value in _reached(code):
            if kind := model_class(value):
                found[LoadedModel(name, kind, module)] = None
            elif isinstance(value, (type, types.FunctionType)) and _package(value) == package:
                waiting.append(value)
    return list(found)


def advice(target: Callable[..., Any], model: LoadedModel, is_factory: bool = False) -> str:
    """Say why a loaded model should be constructed in a class, and where to load it."""
    code = unwrapped(target)
    name, is_class = code.__name__, isinstance(code, type)
    where = f"module {model.module} loads on import" if model.module else f"{name} holds"
    before = (
        f"{name} uses {model.name}, a {model.kind} that {where}. Every process that imports the "
        "module loads it: the code location, each run, and workers of other stages. "
    )
    if is_class or is_factory:
        return f"{before}Load it in {name}{'.__init__' if is_class else ''}, once in each worker"
    return (
        f"{before}Load it in the __init__ of a class, once in each worker, where it stays warm "
        f"between runs; call it in the class's __call__, and pass the class in place of {name}"
    )


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "") or "").partition(".")[0]


def _reached(code: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what a function or class refers to: the name, the module that holds it, the value."""
    if isinstance(code, type):
        for base in code.__mro__[:-1]:
            for member in vars(base).values():
                yield from _reached(_function(member))
        return
    if not isinstance(code, types.FunctionType):
        return
    variables = code.__globals__
    module = str(variables.get("__name__", ""))
    attributes = set(_attributes(code.__code__))
    for name in sorted(global_names(code.__code__) & variables.keys()):
        value = variables[name]
        yield name, module, value
        if isinstance(value, types.ModuleType):
            for attribute in sorted(attributes & vars(value).keys()):
                yield f"{name}.{attribute}", value.__name__, vars(value)[attribute]
    for name, value in (defaults_of(code) | captured_by(code)).items():
        yield name, "", value


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return unwrapped(member)


def _attributes(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code reads, attributes among them."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _attributes(inner)
