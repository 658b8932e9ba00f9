"""Strings that name code: module names passed to importers, and evaluated expressions."""

from __future__ import annotations

import ast
import contextlib
import keyword
import re
from collections.abc import Iterable, Iterator
from itertools import filterfalse
from typing import Any

_PARSE_RETRIES = 3

# Functions that import the module named by a string, and the form of the string. Of others than
# those in `_BY_LAST_NAME`, only the ones of the listed modules count.
_IMPORTERS = {
    "importlib.machinery.SourceFileLoader": "file",
    "imp.load_source": "file",
    "runpy.run_module": "module",
    "runpy.run_path": "file",
    "pkgutil.resolve_name": "object",
    "pydoc.locate": "object",
    "pydoc.safeimport": "module",
    "zope.dottedname.resolve.resolve": "object",
    "tornado.util.import_object": "object",
    "traitlets.import_item": "object",
    "hydra.utils.get_class": "object",
    "hydra.utils.get_method": "object",
    "hydra.utils.get_object": "object",
    "kombu.utils.imports.symbol_by_name": "object",
    "scrapy.utils.misc.load_object": "object",
}
_BY_LAST_NAME = {
    "import_module": "module",
    "__import__": "module",
    "module_from_spec": "file",
    "spec_from_file_location": "file",
    "import_string": "object",
}
_EVALUATORS = frozenset({"eval", "exec", "compile"})
_NAMESPACES = frozenset({"globals", "locals", "vars"})
_NAMESPACE_ATTRIBUTES = frozenset({"__globals__", "f_globals"})
_LOOKUPS = frozenset({"sys.modules", "inspect.getmodule"})
_TARGET_KEY = "_target_"


class Imported(str):
    """The dotted import path that a name stands for; relative paths start with dots."""

    __slots__ = ()


def mark_texts(tree: ast.Module) -> None:
    """Annotate a tree with import paths, imports by string, and names that strings read.

    Nodes get the attributes `stands_for` (for names bound by imports), `imports` (a call's import
    statements, or None if they are known only at run time), `reads` (module-level names that are
    read at run time) and `lookups` (imports of the modules that the file takes names from).
    """
    nodes = list(ast.walk(tree))
    bindings = _bindings(nodes)
    shadowed = _bound_at_top(tree)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in bindings:
            also = {node.id} if node.id in shadowed else set()
            node.__dict__["stands_for"] = frozenset(bindings[node.id] | also)
    names = shadowed | bindings.keys()
    called: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            called.update((id(node.func), id(getattr(node.func, "func", None))))
            _mark_call(node, names)
        elif isinstance(node, ast.Dict):
            _mark_targets(node)
        elif isinstance(node, ast.Subscript):
            _mark_item(node, names)
    items = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and (
            getattr(node, "attr", "") in _NAMESPACE_ATTRIBUTES
            or getattr(node, "id", "") == "__annotations__"
            or (id(node) not in items and paths(node) and paths(node) <= _LOOKUPS)
        ):
            node.__dict__["reads"] = names
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in called:
            continue
        if isinstance(node.ctx, ast.Load) and _style(node):
            # The function is passed on, and imports a name that is not known here.
            node.__dict__["imports"] = None
    imported = [
        _at(node, ast.ImportFrom(node.module, [ast.alias("*")], node.level))
        for statement in tree.body
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom)
    ]
    for node in nodes:
        if "reads" in node.__dict__:
            node.__dict__["lookups"] = imported


def _bindings(nodes: list[ast.AST]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                path = alias.name if alias.asname else bound
                found.setdefault(bound, set()).add(Imported(path))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                path = f"{base}.{alias.name}" if node.module else base + alias.name
                found.setdefault(alias.asname or alias.name, set()).add(Imported(path))
    return found


def _bound_at_top(tree: ast.Module) -> frozenset[str]:
    found: set[str] = set()
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            stack += ast.iter_child_nodes(node)
    return frozenset(found)


def chain(node: ast.AST) -> tuple[ast.AST, list[str]]:
    """Split a dotted name into what it begins with and the attributes."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return node, names


def paths(node: ast.AST) -> frozenset[str]:
    """Return the paths that a dotted name may stand for: `Imported` ones, else the name itself."""
    node, names = chain(node)
    if not isinstance(node, ast.Name):
        return frozenset({".".join(["?", *names])} if names else ())
    rest = "".join(f".{name}" for name in names)
    roots = node.__dict__.get("stands_for", {node.id})
    return frozenset(type(root)(root + rest) for root in roots)


def _style(node: ast.AST) -> str | None:
    """Return the form of string that an importing function takes; None for other functions."""
    if isinstance(node, ast.Call) and paths(node.func) == {"getattr"} and len(node.args) == 2:
        name = node.args[1]
        found = {f"{path}.{getattr(name, 'value', '?')}" for path in paths(node.args[0])}
    else:
        found = set(paths(node))
    for path in found:
        style = _IMPORTERS.get(path) or _BY_LAST_NAME.get(path.rpartition(".")[2])
        if style:
            return style
    return None


def _text(node: ast.AST | None) -> str | None:
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def _mark_call(node: ast.Call, names: frozenset[str]) -> None:
    style = _style(node.func)
    if style is not None:
        text = _text(node.args[0] if node.args else _keyword(node))
        if text is not None and text.startswith("."):
            named = [item.value for item in node.keywords if item.arg == "package"]
            text = "".join(_text(item) or "" for item in (*node.args[1:2], *named)) + text
        node.__dict__["imports"] = None if text is None else _statements(node, text, style)
        return
    called = {path.removeprefix("builtins.") for path in paths(node.func)}
    if called & _EVALUATORS or (called & _NAMESPACES and not node.args):
        node.__dict__["reads"] = names
    if called & {"exec", "compile"} or (
        called == {"eval"} and "import" in (_text(next(iter(node.args), None)) or "")
    ):
        node.__dict__["imports"] = None  # statements may import any module


def hints(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Yield the type hints in nodes, including those inside functions and classes."""
    for statement in nodes:
        for node in ast.walk(statement):
            if isinstance(node, (ast.arg, ast.AnnAssign)):
                found = node.annotation
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = node.returns
            else:
                continue
            if found is not None:
                yield found


def mark_hints(tree: ast.Module) -> None:
    """Mark strings in type hints with the words in them: libraries read the names."""
    for hint in hints([tree]):
        for node in ast.walk(hint):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"[^\W\d]\w*", node.value)
                node.__dict__["reads"] = frozenset(filterfalse(keyword.iskeyword, words))


def _keyword(node: ast.Call) -> ast.expr | None:
    known = ("name", "mod_name", "path", "dotted_path", "import_name")
    return next((item.value for item in node.keywords if item.arg in known), None)


def _statements(node: ast.AST, text: str, style: str) -> list[ast.stmt] | None:
    level = len(text) - len(text.lstrip("."))
    parts = text[level:].replace(":", ".").split(".")
    if style == "file" or not all(part.isidentifier() for part in parts):
        return None
    if len(parts) == 1 and not level:
        return [_at(node, ast.Import([ast.alias(text)]))]
    # `a.b.C.method`: names after a class are its attributes.
    classes = [index for index, part in enumerate(parts) if index and part[:1].isupper()]
    parts = parts[: classes[0] + 1] if classes else parts
    return [_at(node, ast.ImportFrom(".".join(parts[:-1]), [ast.alias(parts[-1])], level))]


def _at(place: ast.AST, statement: ast.stmt) -> ast.stmt:
    return ast.copy_location(statement, place)


def _mark_targets(node: ast.Dict) -> None:
    """Mark ``{"_target_": "a.b.C"}``, as used by Hydra's `instantiate`."""
    for key, value in zip(node.keys, node.values, strict=True):
        if getattr(key, "value", None) == _TARGET_KEY:
            text = getattr(value, "value", None)
            found = _statements(node, text, "object") if isinstance(text, str) else None
            node.__dict__["imports"] = found


def _mark_item(node: ast.Subscript, names: frozenset[str]) -> None:
    """Mark ``sys.modules[...]``: a literal is an import, ``__name__`` is this module."""
    if not isinstance(node.ctx, ast.Load) or paths(node.value) != {"sys.modules"}:
        return
    if isinstance(node.slice, ast.Name) and node.slice.id == "__name__":
        node.__dict__["reads"] = names
    else:
        text = _text(node.slice)
        node.__dict__["imports"] = None if text is None else _statements(node, text, "module")


def syntax_tree(source: bytes | str, mode: str = "exec") -> Any:
    """Parse source, again where CPython's parser fails.

    It fails at times beside a thread that parses too: python/cpython#106905.
    """
    for _ in range(_PARSE_RETRIES):
        with contextlib.suppress(SystemError):
            return ast.parse(source, mode=mode)
    return ast.parse(source, mode=mode)


def read_names(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield statements that read the names that strings in the nodes read."""
    for statement in nodes:
        for node in ast.walk(statement):
            for name in sorted(node.__dict__.get("reads", ())):
                yield ast.Expr(ast.Name(name, ast.Load()))
