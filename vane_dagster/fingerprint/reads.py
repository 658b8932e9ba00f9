"""Names that statements read, except objects that they only write into.

``REGISTRY[name] = f`` and the statement ``REGISTRY.append(f)`` do not depend on the registry's
other content. Effects of other statements on it therefore do not count for code that only
registers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from vane_dagster.fingerprint import ast_digest

# Methods of containers that change them independently of their content.
ITEM_SETTERS = frozenset(
    {"add", "append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update"}
)


@dataclass(frozen=True)
class Reads:
    """The reads of some statements.

    Attributes:
        names: Names in any scope.
        attributes: Attributes, and strings that may name one.
        texts: Module-level names that ``eval``, ``exec`` or ``globals`` access by a literal string.
        decorators: Names with methods used as decorators, such as ``app`` in ``@app.route(path)``.
        every: Whether any name of the module may be read, as by ``eval`` of a computed string.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    texts: frozenset[str]
    decorators: frozenset[str]
    every: bool


def reads(nodes: Iterable[ast.AST]) -> Reads:
    """Collect the reads of a module's top-level statements, including those in functions."""
    visitor = _Visitor()
    for node in nodes:
        visitor.visit(node)
    names, attributes = frozenset(visitor.names), frozenset(visitor.attributes)
    texts, decorators = frozenset(visitor.texts), frozenset(visitor.decorators)
    return Reads(names, attributes, texts, decorators, visitor.every)


class _Visitor:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: set[str] = set()
        self.decorators: set[str] = set()
        self.every = False

    def visit(self, start: ast.AST) -> None:
        stack: list[tuple[ast.AST, bool]] = [(start, False)]
        while stack:
            node, in_function = stack.pop()
            inner = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            stack += [(child, inner) for child in self._children(node, in_function)]

    def _children(self, node: ast.AST, in_function: bool) -> Iterable[ast.AST]:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.names.add(node.id)
            return ()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.isidentifier():
                self.attributes.add(node.value)
            return ()
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return _chain_without_root(node)
        if isinstance(node, ast.Attribute):
            self.attributes.add(node.attr)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute) and call.func.attr in ITEM_SETTERS:
                return [*_chain_without_root(call.func), *call.args, *call.keywords]
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.If) and not node.orelse and isinstance(node.body[0], ast.Raise)
        ):
            rest = [child for child in ast.iter_child_nodes(node) if child is not node.test]
            return [*rest, *_without_membership(node.test)]
        if isinstance(node, ast_digest.Definition):
            rest = [c for c in ast.iter_child_nodes(node) if c not in node.decorator_list]
            return [*rest, *(part for d in node.decorator_list for part in self._decorator(d))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self._call(node, node.func.id, in_function)
        if isinstance(node, ast.Subscript):
            if _is_call_of_globals(node.value) and isinstance(node.slice, ast.Constant):
                self.texts.add(str(node.slice.value))
                return ()
            is_name = isinstance(node.slice, ast.Name) and node.slice.id == "__name__"
            if is_name and isinstance(node.value, ast.Attribute) and node.value.attr == "modules":
                self.every = True
        return ast.iter_child_nodes(node)

    def _decorator(self, node: ast.expr) -> list[ast.AST]:
        """Return the parts of a decorator that are read: for ``@app.route(path)`` only the path."""
        function = node.func if isinstance(node, ast.Call) else node
        root = ast_digest.root_name(function)
        if not isinstance(function, ast.Attribute) or root is None:
            return [node]
        self.decorators.add(root)
        self.attributes.add(function.attr)
        given = [*node.args, *node.keywords] if isinstance(node, ast.Call) else []
        return [*_chain_without_root(function), *given]

    def _call(self, node: ast.Call, name: str, in_function: bool) -> None:
        if name in ("eval", "exec"):
            text = (
                node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            )
            try:
                tree = ast_digest.parse(text) if isinstance(text, str) else None
            except (SyntaxError, ValueError):
                tree = None
            if tree is None:
                self.every = True
            else:
                found = (item.id for item in ast.walk(tree) if isinstance(item, ast.Name))
                self.texts.update(found)
        elif name == "globals" or (
            name in ("vars", "locals") and not node.args and not in_function
        ):
            self.every = True


def _is_call_of_globals(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals"
    )


def _chain_without_root(node: ast.expr) -> list[ast.AST]:
    """Return the parts of ``X.a[i]`` that a store into it reads: `i`, but not `X`."""
    parts: list[ast.AST] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript):
            parts.append(node.slice)
        node = node.value
    return parts if isinstance(node, ast.Name) else [*parts, node]


def _without_membership(node: ast.expr) -> list[ast.AST]:
    """Return the parts of a test that are read, except the container searched by ``key in X``."""
    if isinstance(node, ast.Compare) and all(
        isinstance(item, (ast.In, ast.NotIn)) for item in node.ops
    ):
        parts = [part for item in node.comparators for part in _chain_without_root(item)]
        return [node.left, *parts]
    return [node]
