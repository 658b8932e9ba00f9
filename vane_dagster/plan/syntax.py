"""What code says, apart from its layout: syntax trees without docstrings, positions and types."""

from __future__ import annotations

import ast
import dis
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vane_dagster.plan.hashing import combine

Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_CATCHES_IMPORT = frozenset(
    {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"},
)
_GLOBAL_READS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"},
)


def parse(source: bytes | str) -> ast.Module:
    """Parses source and drops what cannot change a result.

    Docstrings and other bare constants go, and so do the bodies of ``if TYPE_CHECKING``.

    Raises:
        SyntaxError: The source is not valid for this Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not body:
                continue
            kept = list(_effective(body))
            if not kept and field != "orelse" and not isinstance(node, ast.Module):
                kept = [ast.copy_location(ast.Pass(), body[0])]
            setattr(node, field, kept)
        stack += inner_statements(node)
    return tree


def inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements, handlers and cases directly inside of a node."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, field, ())


def _effective(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.If):
            test = statement.test
            if _is_type_checking(test):
                yield from _effective(statement.orelse)
                continue
            if (
                isinstance(test, ast.UnaryOp)
                and isinstance(test.op, ast.Not)
                and _is_type_checking(test.operand)
            ):
                yield from _effective(statement.body)
                continue
        yield statement


def _is_type_checking(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == "TYPE_CHECKING"


class _End:
    """Closes a node or a list in `dump`."""


def dump(nodes: Sequence[ast.AST]) -> str:
    """Writes nodes as text without positions; empty and absent fields are left out.

    It walks with its own stack, so long chains of operators don't pass the recursion limit, and
    a field that a later Python adds changes nothing as long as it is empty.
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
            # Some Pythons put empty texts between the parts of an f-string.
            value = [item for item in node.values if getattr(item, "value", None) != ""]
        if isinstance(node, ast.Constant) or not (value is None or value == []):
            yield name, value


def constant_text(value: object) -> str:
    """Writes a constant so that it reads the same on every Python."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    # repr() of an int beyond 4300 digits raises.
    return hex(value) if type(value) is int else repr(value)


def tree_digest(nodes: Sequence[ast.AST]) -> str:
    """Hashes nodes by what they say."""
    return combine("tree", dump(nodes))


def compile_nodes(nodes: Sequence[ast.stmt], filename: str) -> types.CodeType:
    """Compiles statements that stand at module level, without running them."""
    module = ast.Module(body=list(nodes), type_ignores=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: types.CodeType = compile(
            module, filename, "exec", flags=flags, dont_inherit=True, optimize=0
        )
    return code


def global_names(code: types.CodeType) -> set[str]:
    """Returns the module-level names that code reads or rebinds, by the compiler's own scoping."""
    found: set[str] = set()
    stored: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            stored.add(step.argval)
        elif step.opname in _GLOBAL_READS and step.argval not in stored:
            found.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return found


@dataclass(frozen=True)
class ImportRef:
    """One imported name: ``from <module> import <name> as <bound>``, or ``import <module>``.

    ``refers`` is the module that the bound name would stand for: ``a`` for ``import a.b``, ``a.b``
    for ``import a.b as c``; for ``from a import b`` it is ``b``, below the module.
    """

    module: str
    level: int
    name: str | None
    bound: str
    refers: str
    guarded: bool
    line: int


@dataclass(frozen=True)
class Scan:
    """What nodes import, the dotted names they use, and the lines of imports by variable."""

    imports: tuple[ImportRef, ...]
    chains: frozenset[tuple[str, ...]]
    dynamic: tuple[int, ...]


def scan(nodes: Iterable[ast.AST]) -> Scan:
    """Collects the imports and the dotted names in nodes, functions' bodies included."""
    imports: list[ImportRef] = []
    chains: set[tuple[str, ...]] = set()
    dynamic: list[int] = []
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in nodes]
    while stack:
        node, guarded = stack.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports += import_refs(node, guarded)
            continue
        if isinstance(node, (ast.Attribute, ast.Name)):
            chain = _chain(node)
            if chain:
                chains.add(chain)
                continue
        if isinstance(node, ast.Call):
            found = _import_call(node, guarded)
            if isinstance(found, ImportRef):
                imports.append(found)
            elif found:
                dynamic.append(node.lineno)
        guards = _guarded_children(node)
        stack += [(child, guarded or child in guards) for child in ast.iter_child_nodes(node)]
    return Scan(tuple(imports), frozenset(chains), tuple(sorted(dynamic)))


def import_refs(node: ast.Import | ast.ImportFrom, guarded: bool) -> Iterator[ImportRef]:
    """Yields one reference for each name that an import statement binds."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            refers = alias.name if alias.asname else alias.name.partition(".")[0]
            bound = alias.asname or refers
            yield ImportRef(alias.name, 0, None, bound, refers, guarded, node.lineno)
        else:
            bound = alias.asname or alias.name
            where = (node.module or "", node.level, alias.name)
            yield ImportRef(*where, bound, alias.name, guarded, node.lineno)


def _chain(node: ast.expr) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def root_name(node: ast.AST) -> str | None:
    """Returns the name that an expression starts from: ``X`` for ``X.a[0].b(1)``."""
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.Await)):
            node = node.value
        else:
            return None


def _import_call(node: ast.Call, guarded: bool) -> ImportRef | bool:
    chain = _chain(node.func)
    if not chain or chain[-1] not in {"import_module", "__import__", "spec_from_file_location"}:
        return False
    first = getattr(node.args[0], "value", None) if node.args else None
    if not isinstance(first, str) or chain[-1] == "spec_from_file_location":
        return True
    module = first.lstrip(".")
    return ImportRef(module, len(first) - len(module), None, "", module, guarded, node.lineno)


def _guarded_children(node: ast.AST) -> Sequence[ast.AST]:
    if isinstance(node, ast.Try):
        caught = [handler.type for handler in node.handlers]
        return node.body if any(kind is None or _names_import(kind) for kind in caught) else ()
    if isinstance(node, (ast.With, ast.AsyncWith)):
        calls = [item.context_expr for item in node.items]
        for call in calls:
            if isinstance(call, ast.Call) and (_chain(call.func) or ("",))[-1] == "suppress":
                return node.body if any(map(_names_import, call.args)) else ()
    return ()


def _names_import(node: ast.expr) -> bool:
    options = node.elts if isinstance(node, ast.Tuple) else [node]
    return any((_chain(option) or ("",))[-1] in _CATCHES_IMPORT for option in options)
