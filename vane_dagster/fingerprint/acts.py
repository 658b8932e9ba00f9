"""What top-level statements do when an import executes them: calls, stores, decorators, bases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.code_strings import Definition, paths

_CLASS_HOOKS = re.compile(
    r"__\w*init_subclass__|__get_pydantic_core_schema__|__mro_entries__|with_metaclass"
    r"|(?!ABCMeta)[A-Z]?\w*(?:Enum|EnumType|Flag|Meta|Metaclass)"
)
"""Names in a class whose code may run when another class is derived from it."""

ActKind = Literal["call", "bare call", "store", "decorator", "base"]


class Act(NamedTuple):
    """A call, a store, a decorator or a base of a class.

    Attributes:
        kind: What it is. A bare call is one whose result is not used.
        node: The node that it consists of.
        target: The called or changed expression.
    """

    kind: ActKind
    node: ast.AST
    target: ast.AST


def acts(statement: ast.stmt) -> Iterator[Act]:
    """Yield what a statement does when it is executed."""
    kinds: dict[int, ActKind] = {}
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) or (
            isinstance(node, ast.Assign)
            and all(getattr(each, "id", "") == "_" for each in node.targets)
        ):
            kinds[id(node.value)] = "bare call"
        elif isinstance(node, ast.withitem):
            kinds[id(node.context_expr)] = "bare call"
            if not isinstance(node.context_expr, ast.Call):
                yield Act("bare call", node.context_expr, node.context_expr)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield Act("store", node, node.target)
        elif isinstance(node, ast.Call):
            yield Act(kinds.get(id(node), "call"), node, node.func)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
            node.ctx, ast.Load
        ):
            yield Act("store", node, node)
        if isinstance(node, Definition):
            for decorator in node.decorator_list:
                kinds[id(decorator)] = "decorator"
                if not isinstance(decorator, ast.Call):
                    yield Act("decorator", decorator, decorator)
        if isinstance(node, ast.ClassDef):
            for base in (*node.bases, *(item.value for item in node.keywords)):
                yield Act("base", base, base)
        waiting += ast_digest.evaluated(node)


def is_hook(node: ast.AST) -> bool:
    """Return whether a node names a hook of classes, or gives a class a metaclass."""
    if isinstance(node, ast.keyword) and node.arg == "metaclass":
        return paths(node.value) != {"abc.ABCMeta"}
    if isinstance(node, ast.ClassDef):
        bases = [path for each in node.bases for path in paths(each)]
        if not {"type", "abc.ABCMeta"}.isdisjoint(bases):
            return True
    named = (getattr(node, key, None) for key in ("name", "id", "attr", "value"))
    return any(isinstance(each, str) and _CLASS_HOOKS.fullmatch(each) for each in named)
