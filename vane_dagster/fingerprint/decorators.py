"""Our own decorators in a user's code: `vd.cls`, `vd.method` and `vd.func`.

They add options to a class or function and do not change what it computes, so they are not part of
its identity. The options that change results, such as the type of a result, count in the stage.
"""

from __future__ import annotations

import ast

from vane_dagster.fingerprint.code_strings import Definition, paths

OPTIONS = "__vane_options__"
"""The attribute with the options of a function, method or class."""

_NAMES = ("cls", "method", "method.batch", "func", "func.batch")
_OURS = frozenset(f"vane_dagster.{name}" for name in _NAMES)


def detach_decorators(tree: ast.Module) -> None:
    """Remove our decorators from a tree in which names are marked with their imports.

    A class keeps the mark that calling it runs no code of it.
    """
    for node in ast.walk(tree):
        if not isinstance(node, Definition):
            continue
        ours = [each for each in node.decorator_list if _is_ours(each)]
        if ours:
            node.__dict__["is_lazy"] = isinstance(node, ast.ClassDef)
            node.decorator_list = [each for each in node.decorator_list if each not in ours]


def is_lazy(node: ast.AST) -> bool:
    """Return whether a node is a class under `vd.cls`, which is not constructed on import."""
    return bool(node.__dict__.get("is_lazy"))


def _is_ours(decorator: ast.expr) -> bool:
    called = paths(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return bool(called) and called <= _OURS
