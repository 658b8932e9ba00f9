"""Digests of syntax trees, without layout, positions and comments."""

from __future__ import annotations

import ast
import dis
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vane_dagster.fingerprint.code_strings import (
    Imported,
    chain,
    mark_hints,
    mark_texts,
    paths,
    read_names,
    syntax_tree,
)
from vane_dagster.fingerprint.decorators import detach_decorators

_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_GLOBAL_READS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"},
)


def parse(source: bytes | str) -> ast.Module:
    """Parse source, and drop what cannot change a result.

    Our own decorators and the bodies of ``if TYPE_CHECKING`` are dropped. The nodes are annotated
    with names bound by imports, imports by a string, and names that strings read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = syntax_tree(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            node.body = [ast.copy_location(ast.Pass(), node)]
    mark_texts(tree)
    mark_hints(tree)
    detach_decorators(tree)
    return tree


def _is_type_checking(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == "TYPE_CHECKING"


class _End:
    """Marks the end of a node or list in `dump`."""


def dump(nodes: Sequence[ast.AST]) -> str:
    """Write nodes as text without positions; empty and absent fields are omitted.

    The traversal uses its own stack, so long chains of operators do not exceed the recursion limit.
    A field added by a later Python version changes nothing as long as it is empty.
    """
    out: list[str] = []
    stack: list[object] = [list(nodes)]
    while stack:
        item = stack.pop()
        if isinstance(item, _End):
            out.append(")")
            continue
        if isinstance(item, tuple):
            out.append(f"{item[0]}=")
            item = item[1]
        if isinstance(item, ast.AST):
            out.append(f"{type(item).__name__}(")
            stack.append(_End())
            stack.extend(reversed(list(_fields(item))))
        elif isinstance(item, list):
            out.append("[")
            stack.append(_End())
            stack.extend(reversed(item))
        else:
            text = constant_text(item)
            out.append(f"{type(item).__name__}{len(text)}:{text}")
    return "".join(out)


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _IGNORED_FIELDS:
            continue
        if isinstance(node, ast.JoinedStr):
            # Some Python versions put empty strings between the parts of an f-string.
            value = [item for item in node.values if getattr(item, "value", None) != ""]
        if isinstance(node, ast.Constant) or not (value is None or value == []):
            yield name, value


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is evaluated with a node: of a function, its decorators and defaults."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        yield from getattr(node, "decorator_list", ())
        yield from filter(None, (*node.args.defaults, *node.args.kw_defaults))
    else:
        yield from ast.iter_child_nodes(node)


def as_statement(node: ast.AST) -> ast.stmt:
    """Return a statement, or an expression as one."""
    if isinstance(node, ast.stmt):
        return node
    value = node.value if isinstance(node, ast.Starred) else node
    return ast.copy_location(ast.Expr(value), node)  # type: ignore[arg-type]  # an expression


def constant_text(value: object) -> str:
    """Write a constant as text that is the same in every Python version."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    # repr() of an int of more than 4300 digits raises.
    return hex(value) if type(value) is int else repr(value)


def names_of(nodes: Sequence[ast.stmt], filename: str) -> frozenset[str]:
    """Return the module-level names that module-level statements read or rebind.

    Reads by strings in them, made at run time, are compiled at the end.
    """
    read = [ast.fix_missing_locations(item) for item in read_names(nodes)]
    module = ast.Module(body=[*nodes, *read], type_ignores=[])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return frozenset(global_names(compile(module, filename, "exec", dont_inherit=True)))
    except (RecursionError, SyntaxError, ValueError):
        # very many operators, `nonlocal` or `await` of a cell, or the target of a store alone
        return frozenset(
            name
            for node in ast.walk(module)
            for name in (getattr(node, "id", None), *getattr(node, "names", ()))
            if isinstance(name, str)
        )


def global_names(code: types.CodeType) -> set[str]:
    """Return the module-level names that code reads or rebinds, by the compiler's scoping."""
    names: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL_READS:  # also after a store, which may not be executed
            names.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


@dataclass(frozen=True)
class ImportRef:
    """One imported name: ``from <module> import <name>``, or ``import <module>``.

    Attributes:
        module: The module as written, without leading dots.
        level: The number of leading dots.
        name: The name taken from the module; None for ``import <module>``.
        guarded: Whether the statement is under `try` or `with`, so that it may fail.
        line: The line number.
    """

    module: str
    level: int
    name: str | None
    guarded: bool
    line: int


@dataclass(frozen=True)
class Scan:
    """The imports and dotted names of nodes.

    Attributes:
        imports: The imported names.
        chains: The dotted names, as tuples of their parts.
        paths: What they stand for, if it is imported: ``a.b.f`` for ``b.f`` after ``import a.b``.
        dynamic: The line numbers of imports by a computed name.
    """

    imports: tuple[ImportRef, ...]
    chains: frozenset[tuple[str, ...]]
    paths: frozenset[str]
    dynamic: tuple[int, ...]


def scan(nodes: Iterable[ast.AST]) -> Scan:
    """Collect the imports and dotted names in nodes, including function bodies."""
    imports: list[ImportRef] = []
    chains: set[tuple[str, ...]] = set()
    imported: set[str] = set()
    dynamic: list[int] = []
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in nodes]
    while stack:
        node, guarded = stack.pop()
        marks = node.__dict__
        if "imports" in marks:
            line: int = node.lineno  # type: ignore[attr-defined]  # an expression
            if (path := marks["imports"]) is None:
                dynamic.append(line)
            else:
                module, _, name = path.lstrip(".").rpartition(".")
                level = len(path) - len(path.lstrip("."))
                taken = ImportRef(module, level, name, guarded, line)
                whole = ImportRef(name, 0, None, guarded, line)
                imports.append(taken if module or level else whole)
        if "reads" in marks:
            _add_lookups(node, chains, imports)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports += import_refs(node, guarded)
            continue
        if isinstance(node, (ast.Attribute, ast.Name)):
            root, names = chain(node)
            if isinstance(root, ast.Name):
                chains.add((root.id, *names))
                imported.update(path for path in paths(node) if isinstance(path, Imported))
                for part in ast.walk(node):
                    _add_lookups(part, chains, imports)
                continue
        guards = _guarded_children(node)
        stack += [(child, guarded or child in guards) for child in ast.iter_child_nodes(node)]
    return Scan(tuple(imports), frozenset(chains), frozenset(imported), tuple(sorted(dynamic)))


def _add_lookups(node: ast.AST, chains: set[tuple[str, ...]], imports: list[ImportRef]) -> None:
    """Add the names that a node looks up at run time, and the modules that they may be in."""
    chains.update((name,) for name in node.__dict__.get("reads", ()))
    for item in node.__dict__.get("lookups", ()):
        imports.append(ImportRef(item.module or "", item.level, "*", True, item.lineno))


def import_refs(node: ast.Import | ast.ImportFrom, guarded: bool) -> Iterator[ImportRef]:
    """Yield one reference for each name that an import statement binds."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield ImportRef(alias.name, 0, None, guarded, node.lineno)
        else:
            yield ImportRef(node.module or "", node.level, alias.name, guarded, node.lineno)


def root(node: ast.AST) -> ast.AST:
    """Return what an expression begins with: ``X`` for ``X.a[0].b(1)``."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _guarded_children(node: ast.AST) -> Sequence[ast.AST]:
    is_guard = isinstance(node, (ast.With, ast.AsyncWith)) or hasattr(node, "handlers")
    return node.body if is_guard else ()  # type: ignore[attr-defined]  # `with` or `try`
