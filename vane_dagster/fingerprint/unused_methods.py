"""Methods of a class that no call of another method reaches, and so do not count in its key.

Stages may call different methods of one class. The methods that other stages call are marked by our
decorators; an edit of one of them recomputes the other stages only if their code may reach it.
"""

from __future__ import annotations

import abc
import ast
import copy
import typing
from collections.abc import Collection, Iterable

from vane_dagster.fingerprint.decorators import is_marked
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SymbolSource

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_PLAIN_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
_FINDS_METHODS = frozenset({
    "getattr", "__getattribute__", "attrgetter", "methodcaller", "vars", "dir", "__dict__",
    "getmembers", "getmembers_static", "eval", "exec", "compile", "globals", "locals",
})  # fmt: skip


def unused_methods(finder: Finder, cls: type, method: str) -> frozenset[str]:
    """Return the marked methods of a class that calls of one method use only if they name them.

    There are none if the class may be used without naming its methods: by a base class, or by code
    that gets the object.

    Args:
        finder: Locates the class's file.
        cls: The class.
        method: The method that is called.
    """
    node = _node(finder, finder.find(cls.__module__), cls.__qualname__)
    if node is None or any(base not in _PLAIN_BASES for base in cls.__mro__[1:]):
        return frozenset()
    functions = [each for each in node.body if isinstance(each, _FUNCTIONS)]
    marked = {each.name for each in functions if is_marked(each) and each.name != method}
    kept = [each for each in functions if each.name not in marked]
    if node.decorator_list or any(_passes_itself(each) for each in kept):
        return frozenset()
    named = _named_in_body(node)
    return frozenset(n for n in marked if not n.startswith("__") and n not in named)


def without_methods(unit: SymbolSource, methods: Collection[str]) -> SymbolSource:
    """Return the source of a class without some of its methods.

    Args:
        unit: The source; its last statement is the class.
        methods: The names of the methods.
    """
    node = unit.nodes[-1]
    assert isinstance(node, ast.ClassDef)
    # The copy keeps the hints and the docstring that `ast_digest.parse` has detached.
    reduced = copy.copy(node)
    kept = [e for e in node.body if not isinstance(e, _FUNCTIONS) or e.name not in methods]
    reduced.body = kept or [ast.copy_location(ast.Pass(), node)]
    return SymbolSource(unit.path, [*unit.nodes[:-1], reduced], unit.position)


def named_methods(units: Iterable[SymbolSource], methods: Collection[str]) -> frozenset[str]:
    """Return those of some methods that code may call.

    Args:
        units: The code.
        methods: The names of the methods.
    """
    found: set[str] = set()
    for unit in units:
        read = unit.reads
        if read.every or _FINDS_METHODS & (read.names | read.attributes):
            return frozenset(methods)
        found |= read.attributes & set(methods)
    return frozenset(found)


def _node(finder: Finder, module: Module | None, name: str) -> ast.ClassDef | None:
    """Return a class at the top level of a file, if it is defined once."""
    if module is None or module.kind != "own" or not module.is_source:
        return None
    units = finder.source(str(module.path)).units.get(name, [])
    node = units[0].nodes[-1] if len(units) == 1 else None
    return node if isinstance(node, ast.ClassDef) else None


def _named_in_body(node: ast.ClassDef) -> set[str]:
    """Return the names that a class's body reads when it is executed, as in ``alias = method``."""
    run: list[ast.AST] = [each for each in node.body if not isinstance(each, _FUNCTIONS)]
    for each in node.body:
        if isinstance(each, _FUNCTIONS):
            defaults = [*each.args.defaults, *filter(None, each.args.kw_defaults)]
            run += [*each.decorator_list, *defaults]
    return {n.id for each in run for n in ast.walk(each) if isinstance(n, ast.Name)}


def _passes_itself(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method uses its object other than by an attribute, as in ``f(self)``."""
    first = [*function.args.posonlyargs, *function.args.args][:1]
    own = {each.arg for each in first}
    bases = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return any(
        isinstance(node, ast.Name) and node.id in own and id(node) not in bases
        for node in ast.walk(function)
    )
