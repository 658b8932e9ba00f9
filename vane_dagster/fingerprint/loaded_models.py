"""Models that a module loads when it is imported, and that a function reaches by name.

They work, but each process that imports the module loads them: the code location, each run, and
each worker, also of stages that never use them. A class that loads them in its constructor is
constructed once in each worker of its own pool.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vane_dagster.fingerprint.values import model_class
from vane_dagster.types.callables import unwrapped


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
    """Say why a loaded model should be constructed in a class, with the class to write."""
    code = unwrapped(target)
    name, is_class = code.__name__, isinstance(code, type)
    where = f"module {model.module} loads on import" if model.module else f"{name} holds"
    attribute = model.name.rpartition(".")[2]
    before = f"{name} uses {model.name}, a {model.kind} that {where}. Every process that imports "
    before += "the module loads it: the code location, each run, and workers of other stages. "
    if is_class:
        return f"{before}Load it in {name}.__init__, once in each worker: self.{attribute} = ..."
    if is_factory:
        return f"{before}Load it in {name}, once in each worker: {attribute} = ..."
    written = "".join(part.capitalize() for part in name.strip("<>_").split("_")) or "Model"
    return (
        f"{before}Load it in a class, once in each worker, where it stays warm between runs:\n"
        f"class {written}:\n"
        "    def __init__(self):\n"
        f"        self.{attribute} = ...  # load the {model.kind} here\n\n"
        f"    {_call(code, attribute)}:\n"
        f"        ...  # use self.{attribute}\n"
        f"and pass {written} in place of {name}."
    )


def _call(function: Any, model: str) -> str:
    """Return the first line of the method to write, with the parameters of a function."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # it has no source of its own
        node = ast.Pass()
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "def __call__(self, batch)"
    given = [*node.args.posonlyargs, *node.args.args]
    required = given[: len(given) - len(node.args.defaults)]
    kept = [ast.unparse(each) for each in required if each.arg != model]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    is_async = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{is_async}def __call__({', '.join(['self', *kept])}){returned}"


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
    for name, attribute in dict.fromkeys(_global_reads(code.__code__)):
        value = variables.get(name)
        yield name, module, value
        if isinstance(value, types.ModuleType) and attribute in vars(value):
            yield f"{name}.{attribute}", value.__name__, vars(value)[attribute]
    parameters = code.__code__.co_varnames[: code.__code__.co_argcount]
    defaults = code.__defaults__ or ()
    given = dict(zip(parameters[len(parameters) - len(defaults) :], defaults))
    cells = zip(code.__code__.co_freevars, code.__closure__ or ())
    for name, value in [*given.items(), *(code.__kwdefaults__ or {}).items()]:
        yield name, "", value
    for name, cell in cells:
        try:
            yield name, "", cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return unwrapped(member)


def _global_reads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yield the global names that code reads, each with the attribute read from it, if any."""
    name = ""
    for instruction in dis.get_instructions(code):
        if name:
            is_read = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield name, str(instruction.argval) if is_read else ""
        name = str(instruction.argval) if instruction.opname == "LOAD_GLOBAL" else ""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_reads(inner)
