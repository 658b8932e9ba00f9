"""Local variables of functions, which are identified in a digest by their order, not their name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WORD = re.compile(r"[^\W\d]\w*")
# Functions that access the caller's local variables, or a function's source, by name.
_FRAMES = frozenset(
    {"_getframe", "currentframe", "f_locals", "f_back", "getsource", "co_varnames", "__code__"}
)
_NAMESPACES = frozenset({"locals", "eval", "exec"})
# Methods that may read the caller's variables from a string: DuckDB, pandas, polars, numexpr.
_TEXT_READERS = frozenset(
    {"query", "eval", "sql", "execute", "evaluate", "re_evaluate", "from_query", "table", "view"}
)


@dataclass(eq=False)
class Variable:
    """A variable of a function or comprehension.

    Attributes:
        name: The name.
        owner: The function or comprehension.
        keeps_name: Whether a digest contains its name.
        is_definition: Whether a function or class definition binds it.
    """

    name: str
    owner: ast.AST
    keeps_name: bool = False
    is_definition: bool = False


@dataclass(frozen=True)
class _Reference:
    """A field of a node, or an item of a list field, that names a variable."""

    node: ast.AST
    name: str
    scope: _Scope
    at: str
    index: int | None


@dataclass(eq=False)
class _Scope:
    node: ast.AST
    parent: _Scope | None
    is_function: bool
    bound: dict[str, Variable] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)
    # Names in `global` statements; all module-level variables keep their names.
    module: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    is_readable: bool = False

    @property
    def root(self) -> _Scope:
        """The outermost function or comprehension around this scope."""
        scope, found = self, self
        while scope.parent is not None:
            scope = scope.parent
            if scope.is_function:
                found = scope
        return found

    def bind(self, name: str, *, keeps_name: bool = False) -> Variable:
        variable = self.bound.setdefault(name, Variable(name, self.node))
        variable.keeps_name |= keeps_name
        return variable

    def find(self, name: str) -> Variable | None:
        """Return the local variable that a name refers to; None for module and class names."""
        scope: _Scope | None = self
        while scope is not None and scope.parent is not None:
            if name in scope.module:
                return None
            if name in scope.bound and name not in scope.outer:
                return scope.bound[name] if scope.is_function else None
            scope = scope.parent
            while scope is not None and scope.parent is not None and not scope.is_function:
                scope = scope.parent
        return None


def mark_locals(tree: ast.Module) -> None:
    """Record, on each node that names a local variable, which variable it is.

    These keep their names: parameters (a caller may pass them by keyword), names bound by imports,
    classes, functions used as values, names that occur as a word in a string of the same function,
    and all locals of a function with locals that can be read by name (``locals()``, ``eval``,
    ``duckdb.sql(text)``).
    """
    _Marking(tree)


class _Marking:
    """One walk over a module: first the bindings of each scope, then the references."""

    def __init__(self, tree: ast.Module) -> None:
        self._references: list[_Reference] = []
        self._called: set[int] = set()
        self._reads_frames = False
        stack: list[tuple[ast.AST, _Scope]] = [(tree, _Scope(tree, None, False))]
        while stack:
            node, scope = stack.pop()
            inner = self._enter(node, scope)
            if inner is None:
                self._note(node, scope)
                inner = [(item, scope) for item in ast.iter_child_nodes(node)]
            stack += reversed(inner)
        self._mark()

    def _mark(self) -> None:
        for reference in self._references:
            variable = reference.scope.find(reference.name)
            if variable is None:
                continue
            root = reference.scope.root
            variable.keeps_name |= (
                self._reads_frames
                or root.is_readable
                or variable.name in root.words
                or variable.name.startswith("__")
                or (variable.is_definition and self._is_value(reference.node))
            )
            marks = reference.node.__dict__.setdefault("variables", {})
            marks[reference.at, reference.index] = variable

    def _is_value(self, node: ast.AST) -> bool:
        is_load = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        return is_load and id(node) not in self._called

    def _refer(self, node: ast.AST, name: str, scope: _Scope, at: str, index: int | None) -> None:
        self._references.append(_Reference(node, name, scope, at, index))

    def _enter(self, node: ast.AST, scope: _Scope) -> list[tuple[ast.AST, _Scope]] | None:
        """Open the scope of a node that has its own; return its children, each with its scope."""
        if isinstance(node, _FUNCTIONS):
            variable = scope.bind(node.name, keeps_name=bool(node.decorator_list))
            variable.is_definition = True
            self._refer(node, node.name, scope, "name", None)
            outside = _type_scope(node, scope)
            inner = _Scope(node, outside, True)
            _bind_arguments(node.args, inner)
            around = [*node.decorator_list, *_defaults(node.args)]
            return [(item, outside) for item in around] + [(item, inner) for item in node.body]
        if isinstance(node, ast.Lambda):
            inner = _Scope(node, scope, True)
            _bind_arguments(node.args, inner)
            return [*((item, scope) for item in _defaults(node.args)), (node.body, inner)]
        if isinstance(node, ast.ClassDef):
            scope.bind(node.name, keeps_name=True)
            outside = _type_scope(node, scope)
            inner = _Scope(node, outside, False)
            around = [*node.decorator_list, *node.bases, *node.keywords]
            return [(item, outside) for item in around] + [(item, inner) for item in node.body]
        if isinstance(node, _COMPREHENSIONS):
            inner = _Scope(node, scope, True)
            first = node.generators[0].iter
            parts = _comprehended(node)
            return [(item, scope if item is first else inner) for item in parts]
        return None

    def _note(self, node: ast.AST, scope: _Scope) -> None:
        """Record the bindings, the reads by name and the words of strings of one node."""
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                scope.bind(node.id)
            scope.root.is_readable |= node.id in _NAMESPACES
            self._reads_frames |= node.id in _FRAMES
            self._refer(node, node.id, scope, "id", None)
        elif isinstance(node, ast.Call):
            self._called.add(id(node.func))
            scope.root.is_readable |= _reads_locals(node)
        elif isinstance(node, ast.Attribute):
            self._reads_frames |= node.attr in _FRAMES
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                scope.root.words.update(_WORD.findall(node.value))
        elif isinstance(node, ast.alias):
            scope.bind(node.asname or node.name.partition(".")[0], keeps_name=True)
            self._reads_frames |= node.name in _FRAMES
        elif isinstance(node, ast.Global):
            scope.module.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.outer.update(node.names)
            for index, name in enumerate(node.names):
                self._refer(node, name, scope, "names", index)
        elif isinstance(node, ast.NamedExpr):
            holder = scope
            while isinstance(holder.node, _COMPREHENSIONS) and holder.parent is not None:
                holder.outer.add(node.target.id)
                holder = holder.parent
            holder.bind(node.target.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            if node.name:
                scope.bind(node.name)
                self._refer(node, node.name, scope, "name", None)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bind(node.rest)
            self._refer(node, node.rest, scope, "rest", None)


def _reads_locals(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if name in ("vars", "dir"):
        return not call.args
    given = [*call.args, *(item.value for item in call.keywords)][:1]
    return name in _TEXT_READERS and not all(isinstance(item, ast.Constant) for item in given)


def _type_scope(node: ast.AST, scope: _Scope) -> _Scope:
    """Return the scope of the type parameters in ``def f[T]()`` and ``class C[T]``."""
    parameters = getattr(node, "type_params", None)
    if not parameters:
        return scope
    inner = _Scope(node, scope, True)
    for parameter in parameters:
        inner.bind(parameter.name, keeps_name=True)
    return inner


def _bind_arguments(arguments: ast.arguments, scope: _Scope) -> None:
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    rest = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    for argument in [*plain, *rest]:
        scope.bind(argument.arg, keeps_name=True)


def _defaults(arguments: ast.arguments) -> Iterator[ast.AST]:
    yield from arguments.defaults
    yield from (item for item in arguments.kw_defaults if item is not None)


def _comprehended(node: ast.AST) -> Iterator[ast.AST]:
    assert isinstance(node, _COMPREHENSIONS)
    for generator in node.generators:
        yield generator.iter
        yield generator.target
        yield from generator.ifs
    if isinstance(node, ast.DictComp):
        yield node.key
        yield node.value
    else:
        yield node.elt


def free_variables(node: ast.AST) -> dict[str, Variable]:
    """Return the variables of enclosing functions that a function or class uses, by name."""
    owners: set[int] = set()
    found: list[Variable] = []
    for item in ast.walk(node):
        owners.add(id(item))
        found += item.__dict__.get("variables", {}).values()
    return {variable.name: variable for variable in found if id(variable.owner) not in owners}
