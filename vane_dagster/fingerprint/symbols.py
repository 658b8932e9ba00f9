"""Source files as units: the statements that bind or change each module-level name."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.ast_digest import Scan
from vane_dagster.fingerprint.decorators import first_line
from vane_dagster.fingerprint.hashing import FileCache, combine


class SymbolSource:
    """Statements of a file, most often one."""

    def __init__(self, path: str, nodes: Sequence[ast.stmt], position: int = 0) -> None:
        self.path = path
        self.nodes = nodes
        self.position = position

    @cached_property
    def digest(self) -> str:
        """The hash of the statements' content."""
        return ast_digest.tree_digest(self.nodes)

    @cached_property
    def scan(self) -> Scan:
        """The imports of the statements, including those inside functions."""
        return ast_digest.scan(self.nodes)

    @cached_property
    def names(self) -> frozenset[str]:
        """The module-level names that the statements read."""
        return ast_digest.names_of(self.nodes, self.path)

    @cached_property
    def touched(self) -> frozenset[str]:
        """The module-level names that the last statement binds, deletes or changes in place."""
        return frozenset(_touched(self.nodes[-1]))

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that the last statement binds, not those that it only changes in place."""
        return bound_names(self.nodes[-1:])

    @property
    def is_import(self) -> bool:
        """Whether it only imports."""
        return isinstance(self.nodes[-1], (ast.Import, ast.ImportFrom))

    @property
    def is_definition(self) -> bool:
        """Whether it imports a module or is a plain function: its position is irrelevant."""
        node = self.nodes[-1]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return not (node.decorator_list or node.args.defaults or node.args.kw_defaults)
        return isinstance(node, ast.Import)


def _parts_of(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement; of an import, one for each of its names."""
    if isinstance(statement, ast.Import):
        yield from (ast.copy_location(ast.Import([each]), statement) for each in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        for each in statement.names:
            single = ast.ImportFrom(statement.module, [each], statement.level)
            yield ast.copy_location(single, statement)
    else:
        yield statement


class SourceFile:
    """A parsed file; everything derived from it is computed once, on demand."""

    def __init__(self, path: str, text: bytes) -> None:
        self.path = path
        self.text = text
        try:
            self.tree = ast_digest.parse(text)
        except (SyntaxError, ValueError) as error:
            raise syntax_problem(path, error) from error
        self.whole = SymbolSource(path, self.tree.body)
        self.units: dict[str, list[SymbolSource]] = {}
        self.statements: list[SymbolSource] = []  # those executed by an import
        parts = [part for statement in self.tree.body for part in _parts_of(statement)]
        for position, part in enumerate(parts):
            unit = SymbolSource(path, [part], position)
            if not _is_main_guard(part):
                self.statements.append(unit)
            for name in sorted(unit.touched):
                self.units.setdefault(name, []).append(unit)
        self.stars = self.units.pop("*", [])  # statements with `from module import *`
        if ast.get_docstring(self.tree, clean=False) is not None:
            self.units.setdefault("__doc__", []).insert(0, SymbolSource(path, self.tree.body[:1]))

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that the file binds, not those that it only changes in place."""
        return bound_names([self.tree])

    @property
    def has_postponed_hints(self) -> bool:
        """Whether type hints are kept as text, by ``from __future__ import annotations``."""
        units = self.units.get("annotations", ())
        return any(getattr(unit.nodes[0], "module", "") == "__future__" for unit in units)

    def binding(self, name: str) -> list[SymbolSource]:
        """Return the statements that may bind a name, in order; star imports may bind any."""
        return sorted((*self.units.get(name, ()), *self.stars), key=lambda unit: unit.position)

    @cached_property
    def _by_start(self) -> dict[tuple[int, str], list[ast.AST]]:
        found: dict[tuple[int, str], list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast_digest.Definition):
                found.setdefault((first_line(node), node.name), []).append(node)
            elif isinstance(node, ast.Lambda):
                found.setdefault((node.lineno, "<lambda>"), []).append(node)
        return found

    def function_node(self, code: types.CodeType) -> ast.AST | None:
        """Return the node that code was compiled from, if this file still contains it unchanged."""
        if code_digest(code) not in self._compiled:
            return None
        nodes = self._by_start.get((code.co_firstlineno, code.co_name), [])
        if len(nodes) > 1 and sys.version_info >= (3, 11):
            nodes = [node for node in nodes if _contains(node, code)]
            # Outer lambdas contain the positions of nested ones too.
            nodes = sorted(nodes, key=_extent)[:1]
        return nodes[0] if len(nodes) == 1 else None

    def holds(self, code: types.CodeType) -> bool:
        """Return whether the file still compiles to this code, ignoring line numbers."""
        return code_digest(code) in self._compiled

    @cached_property
    def _compiled(self) -> frozenset[str]:
        found: set[str] = set()
        try:
            stack = [compile(self.text, self.path, "exec", dont_inherit=True)]
        except SyntaxError as error:
            raise syntax_problem(self.path, error) from error
        while stack:
            code = stack.pop()
            found.add(code_digest(code))
            stack += [item for item in code.co_consts if isinstance(item, types.CodeType)]
        return frozenset(found)

    def definition(self, qualname: str) -> ast.stmt | None:
        """Return the only class or function with a qualified name, or None."""
        parents: list[ast.AST] = [self.tree]
        found: list[ast.stmt] = []
        for part in qualname.split("."):
            if part != "<locals>":
                found = [node for parent in parents for node in _definitions(parent, part)]
                parents = list(found)
        return found[0] if len(found) == 1 else None


def bound_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names that nodes bind, in any scope."""
    found: set[str] = set()
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update(ref.bound for ref in ast_digest.import_refs(node, False))
            names = (getattr(node, "name", None), getattr(node, "rest", None))
            found.update(name for name in names if isinstance(name, str))
    return frozenset(found)


def _definitions(parent: ast.AST, name: str) -> Iterator[ast.stmt]:
    stack = list(ast_digest.inner_statements(parent))
    while stack:
        node = stack.pop()
        if not isinstance(node, ast_digest.Definition):
            stack += ast_digest.inner_statements(node)
        elif node.name == name:
            yield node


def _touched(statement: ast.stmt) -> set[str]:
    """Return the module-level names that a statement binds, deletes or changes."""
    found: set[str] = set()
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        if isinstance(node, ast_digest.Definition):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(ref.bound for ref in ast_digest.import_refs(node, False))
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
            names = (getattr(node, "name", None), getattr(node, "rest", None))
            found.update(name for name in names if isinstance(name, str))
            found |= _changes(node)
            stack += ast.iter_child_nodes(node)
    return found


def _changes(node: ast.AST) -> set[str]:
    """Return the names that a node changes in place: ``X[..] =``, ``X.a =``, ``X.append(..)``."""
    root: str | None = None
    if isinstance(node, ast.Global):
        return set(node.names)
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        root = ast_digest.root_name(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        # The changes of a plain function are covered by its effects.
        is_method = isinstance(call, ast.Call) and not isinstance(call.func, ast.Name)
        root = ast_digest.root_name(call) if is_method else None
    return {root} if root else set()


def _is_main_guard(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and {"__name__", "__main__"}
        == {
            getattr(item, "id", getattr(item, "value", None))
            for item in (test.left, *test.comparators)
        }
    )


def _extent(node: ast.AST) -> int:
    body = node.body if isinstance(node, ast.Lambda) else node
    return len(ast.dump(body)) if isinstance(body, ast.AST) else 0


def _contains(node: ast.AST, code: types.CodeType) -> bool:
    body = node.body if isinstance(node, ast.Lambda) else node
    if not isinstance(body, (ast.expr, ast.stmt)):
        return False
    start = (body.lineno, body.col_offset)
    end = (body.end_lineno or 0, body.end_col_offset or 0)
    if sys.version_info >= (3, 11):
        for line, end_line, column, end_column in code.co_positions():
            if line is None or end_line is None or column is None or end_column is None:
                continue
            if end_column and ((line, column) < start or (end_line, end_column) > end):
                return False
    return True


def code_digest(code: types.CodeType) -> str:
    """Hash compiled code without file name and line numbers."""
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    head: list[str | bytes] = [code.co_name, code.co_code, repr(shape)]
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        head.append(combine("names", *names))
    return combine("code", *head, *map(_constant_digest, code.co_consts))


def _constant_digest(value: object) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant_digest(item) for item in value]
        ordered = parts if isinstance(value, tuple) else sorted(parts)
        return combine(type(value).__name__, *ordered)
    if isinstance(value, slice):
        return _constant_digest(("slice", value.start, value.stop, value.step))
    return combine(type(value).__name__, ast_digest.constant_text(value))


def syntax_problem(path: str, error: Exception) -> CodeIdentityError:
    """Build the error for a file that is not valid Python."""
    line = getattr(error, "lineno", None) or 1
    reason = getattr(error, "msg", None) or str(error)
    return CodeIdentityError(
        f"{path}, line {line}: {reason}. The file must be valid Python before the identity of "
        f"its code can be determined: correct it."
    )


def _read(path: str) -> SourceFile:
    return SourceFile(path, Path(path).read_bytes())


_sources = FileCache(_read)


def load_source(path: str) -> SourceFile:
    """Return the units of a file's current content, cached if it was parsed before."""
    try:
        return _sources.get(path)
    except OSError as error:
        raise CodeIdentityError(
            f"{path} cannot be read ({error}), so the identity of its code cannot be "
            f"determined. Restore the file, or give the stage `vd.Reuse(version=...)`."
        ) from error
