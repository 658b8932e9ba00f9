"""Strings that name code: module names passed to importers, and evaluated expressions."""

from __future__ import annotations

import ast
import contextlib
import keyword
import re
from collections.abc import Iterable, Iterator
from itertools import filterfalse

_PARSE_RETRIES = 3

_IMPORTERS = ("import_module", "__import__")
"""Functions that import the module that a text names."""
_LOADERS = frozenset({
    "importlib.machinery.SourceFileLoader", "imp.load_source", "runpy.run_module", "runpy.run_path",
    "pkgutil.resolve_name", "pydoc.locate", "pydoc.safeimport",
})  # fmt: skip
"""Functions that import in other ways; also those of any module that are named as follows."""
_LOADER_NAMES = ("import_string", "module_from_spec", "spec_from_file_location")
_OWN_NAMES = ("__name__", "__package__")
_EVALUATORS = frozenset({"eval", "exec", "compile"})
_NAMESPACES = frozenset({"globals", "locals", "vars"})
_NAMESPACE_ATTRIBUTES = frozenset({"__globals__", "f_globals"})
_LOOKUPS = frozenset({"sys.modules", "inspect.getmodule"})


Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Imported(str):
    """The dotted import path that a name stands for; relative paths start with dots."""

    __slots__ = ()


def mark_texts(tree: ast.Module) -> None:
    """Annotate a tree with import paths, imports by string, and names that strings read.

    Nodes get the attributes `stands_for` (for names bound by imports), `imports` (the path that a
    call imports, or None if it is known only at run time), `reads` (module-level names that are
    read at run time) and `lookups` (imports of the modules that the file takes names from).
    """
    nodes = list(ast.walk(tree))
    bindings = _bindings(nodes)
    imports = (ast.Import, ast.ImportFrom)
    made = [node for node in top_nodes(tree.body) if not isinstance(node, imports)]
    shadowed = frozenset(name for node in made for name in bound_by(node))
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
        if isinstance(node.ctx, ast.Load) and _imports(node) is not None:
            # The function is passed on, and imports a name that is not known here.
            node.__dict__["imports"] = None
    imported = [
        node
        for statement in tree.body
        if not isinstance(statement, Definition)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom)
    ]
    for node in nodes:
        if "reads" in node.__dict__:
            node.__dict__["lookups"] = imported


def _bindings(nodes: list[ast.AST]) -> dict[str, set[str]]:
    bindings: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                path = alias.name if alias.asname else bound
                bindings.setdefault(bound, set()).add(Imported(path))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                path = f"{base}.{alias.name}" if node.module else base + alias.name
                bindings.setdefault(alias.asname or alias.name, set()).add(Imported(path))
    return bindings


def top_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and what is in them, but not what is in definitions and lambdas."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*Definition, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds or deletes."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Import):
        yield from (each.asname or each.name.partition(".")[0] for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)
    elif not isinstance(node, ast.alias):
        names = (getattr(node, "name", None), getattr(node, "rest", None))
        yield from (name for name in names if isinstance(name, str))


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


def _imports(node: ast.AST) -> bool | None:
    """Return whether a function imports what a text names; None if it imports nothing."""
    if isinstance(node, ast.Call) and paths(node.func) == {"getattr"} and len(node.args) == 2:
        name = getattr(node.args[1], "value", "?")
        called = {f"{path}.{name}" for path in paths(node.args[0])}
    else:
        called = set(paths(node))
    names = {path.rpartition(".")[2] for path in called}
    if not names.isdisjoint(_IMPORTERS):
        return True
    return None if called.isdisjoint(_LOADERS) and names.isdisjoint(_LOADER_NAMES) else False


def _text(node: ast.AST | None) -> str | None:
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def _mark_call(node: ast.Call, names: frozenset[str]) -> None:
    by_name = _imports(node.func)
    if by_name is not None:
        named = {item.arg: item.value for item in node.keywords}
        given = node.args[0] if node.args else named.get("name")
        text = _text(given) or _modules_of(given) if by_name else None
        if text is not None and text.startswith("."):
            package = node.args[1] if len(node.args) > 1 else named.get("package")
            is_own = package is None or getattr(package, "id", "") in _OWN_NAMES
            base = "" if is_own else _text(package)
            text = None if base is None else base + text
        node.__dict__["imports"] = _path(text)
        return
    called = {path.removeprefix("builtins.") for path in paths(node.func)}
    if called & _EVALUATORS or (called & _NAMESPACES and not node.args):
        node.__dict__["reads"] = names
    if called & {"exec", "compile"} or (
        called == {"eval"} and "import" in (_text(next(iter(node.args), None)) or "")
    ):
        node.__dict__["imports"] = None  # statements may import any module


def mark_hints(tree: ast.Module) -> None:
    """Mark strings in type hints with the words in them: libraries read the names."""
    for holder in ast.walk(tree):
        hint = getattr(holder, "annotation", None) or getattr(holder, "returns", None)
        for node in () if hint is None else ast.walk(hint):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"[^\W\d]\w*", node.value)
                node.__dict__["reads"] = frozenset(filterfalse(keyword.iskeyword, words))


def _path(text: str | None) -> str | None:
    parts = (text or "").lstrip(".").split(".")
    return text if all(part.isidentifier() or part == "*" for part in parts) else None


def _modules_of(node: ast.AST | None) -> str | None:
    """Return the path of all modules of the package that a computed name begins with."""
    beginning = ""
    for part in _joined(node):
        text = "@" if getattr(part, "id", "") in _OWN_NAMES else _text(part)
        if text is None:
            break
        beginning += text
    package, dot, _ = beginning.rpartition(".")
    return f"{package}.*".replace("@.", ".") if dot else None


def _joined(node: ast.AST | None) -> Iterator[ast.AST | None]:
    """Yield the parts of a text that is put together."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _joined(node.left)
        yield from _joined(node.right)
    elif isinstance(node, ast.JoinedStr):
        yield from (
            getattr(each, "value", None) if isinstance(each, ast.FormattedValue) else each
            for each in node.values
        )
    else:
        yield node


def _mark_item(node: ast.Subscript, names: frozenset[str]) -> None:
    """Mark ``sys.modules[...]``: a literal is an import, ``__name__`` is this module."""
    if not isinstance(node.ctx, ast.Load) or paths(node.value) != {"sys.modules"}:
        return
    if isinstance(node.slice, ast.Name) and node.slice.id == "__name__":
        node.__dict__["reads"] = names
    else:
        node.__dict__["imports"] = _path(_text(node.slice))


def syntax_tree(source: bytes | str) -> ast.Module:
    """Parse source, again where CPython's parser fails.

    It fails at times beside a thread that parses too: python/cpython#106905.
    """
    for _ in range(_PARSE_RETRIES):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def read_names(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield statements that read the names that strings in the nodes read."""
    for statement in nodes:
        for node in ast.walk(statement):
            for name in sorted(node.__dict__.get("reads", ())):
                yield ast.Expr(ast.Name(name, ast.Load()))
