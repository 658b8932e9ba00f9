"""Source files as units: the statements that bind or change each module-level name."""

from __future__ import annotations

import ast
import bisect
import inspect
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.acts import Act, acts, is_hook
from vane_dagster.fingerprint.ast_digest import Scan
from vane_dagster.fingerprint.code_strings import Definition, Imported, bound_by, paths, top_nodes
from vane_dagster.fingerprint.hashing import FileCache, combine

_MAIN_GUARD = ast_digest.dump([ast.parse("__name__ == '__main__'", mode="eval").body])


_MUTATORS = {
    *("add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"),
}


class SymbolSource:
    """Statements of a file, most often one."""

    def __init__(self, path: str, nodes: Sequence[ast.stmt], position: int = 0) -> None:
        self.path = path
        self.nodes = nodes
        self.position = position

    @cached_property
    def digest(self) -> str:
        """The hash of the statements' content."""
        return combine("tree", ast_digest.dump(self.nodes))

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
        names = {name for node in top_nodes(self.nodes[-1:]) for name in bound_by(node)}
        for kind, _, target in self.acts:
            root = ast_digest.root(target)
            # The changes of a plain function are covered by its effects.
            is_change = kind == "store" or (kind == "bare call" and root is not target)
            if is_change and isinstance(root, ast.Name):
                names.add(root.id)
        return frozenset(names)

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """What the last statement does when it is executed."""
        return tuple(acts(self.nodes[-1]))

    @cached_property
    def imported(self) -> frozenset[str]:
        """The paths that the statements import."""
        refs = self.scan.imports
        return frozenset(
            f"{'.' * ref.level}{ref.module}.{ref.name or ''}".rstrip(".") for ref in refs
        )

    @cached_property
    def uses(self) -> frozenset[str]:
        """The paths that the statements name; the modules alone whose attributes they set."""
        nodes = [node for each in self.nodes for node in ast.walk(each)]
        changed = (node for node in nodes if isinstance(node, ast.Attribute))
        stored = [node for node in changed if not isinstance(node.ctx, ast.Load)]
        imported = (path for node in stored for path in paths(node) if isinstance(path, Imported))
        return self.scan.paths.union(path.partition(".")[0] or path for path in imported)

    @cached_property
    def has_code(self) -> bool:
        """Whether the statements hold a definition or a lambda."""
        kinds = (*Definition, ast.Lambda)
        return any(isinstance(node, kinds) for each in self.nodes for node in ast.walk(each))

    @cached_property
    def is_hooked(self) -> bool:
        """Whether the statements name a hook of classes."""
        return any(is_hook(node) for each in self.nodes for node in ast.walk(each))

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that the statements bind, not those that they only change in place."""
        return bound_names(self.nodes)

    @property
    def is_import(self) -> bool:
        """Whether it only imports."""
        return isinstance(self.nodes[-1], (ast.Import, ast.ImportFrom))

    @property
    def is_main_guard(self) -> bool:
        """Whether it is ``if __name__ == "__main__":`` without an ``else``."""
        node = self.nodes[-1]
        if not isinstance(node, ast.If) or node.orelse:
            return False
        return ast_digest.dump([node.test]) == _MAIN_GUARD

    @property
    def is_definition(self) -> bool:
        """Whether it imports a module or is a plain function: its position is irrelevant."""
        node = self.nodes[-1]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return not any(ast_digest.evaluated(node))
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
            touched = unit.touched
            if unit.is_main_guard:  # it does nothing to a module, such as `torch`, that it calls
                touched = touched - (self._imports - unit.bound)
            else:
                self.statements.append(unit)
            for name in sorted(touched):
                self.units.setdefault(name, []).append(unit)
        self.stars = self.units.pop("*", [])  # statements with `from module import *`
        if ast.get_docstring(self.tree, clean=False) is not None:
            self.units.setdefault("__doc__", []).insert(0, SymbolSource(path, self.tree.body[:1]))

    @cached_property
    def _imports(self) -> frozenset[str]:
        imports = (ast.Import, ast.ImportFrom)
        return bound_names(node for node in self.tree.body if isinstance(node, imports))

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that the file binds, not those that it only changes in place."""
        return bound_names([self.tree])

    @cached_property
    def rebound(self) -> frozenset[str]:
        """The names that the file binds more than once, or in a loop, outside of functions.

        Either the body of an ``if`` or ``try`` binds a name, or what stands in for it.
        """
        nodes = top_nodes(self.tree.body)
        loops = [node for node in nodes if isinstance(node, (ast.For, ast.While))]
        counts = _bindings(self.tree.body) + _bindings(loops)
        for node in self.tree.body:
            if isinstance(node, (ast.If, ast.Try)):
                counts -= _bindings(node.body) & _bindings(getattr(node, "handlers", node.orelse))
        return frozenset(name for name, count in counts.items() if count > 1)

    @cached_property
    def set_by_functions(self) -> frozenset[str]:
        """The names that functions declare as global."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Global)]
        return frozenset(name for node in nodes for name in node.names)

    @cached_property
    def changed_later(self) -> frozenset[str]:
        """The names that functions change, and those that code under ``__main__`` reads or binds.

        The latter include what functions and classes read that it names. A local variable of the
        same name counts too.
        """
        changed: set[str] = set()
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        later = [node for node in ast.walk(self.tree) if isinstance(node, functions)]
        guards = [n for n in self.tree.body if SymbolSource(self.path, [n]).is_main_guard]
        made = [node for node in self.tree.body if isinstance(node, Definition)]
        for node in (inner for each in later for inner in ast.walk(each)):
            targets: list[ast.AST] = []
            if isinstance(node, (ast.Attribute, ast.Subscript)):
                targets = [] if isinstance(node.ctx, ast.Load) else [node]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                targets = [node.func] if node.func.attr in _MUTATORS else []
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                targets = [*node.args[:1]]
            roots = map(ast_digest.root, targets)
            changed.update(each.id for each in roots if isinstance(each, ast.Name))
        reached: list[ast.AST] = [*guards]
        for node in reached:  # which grows
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            changed |= named
            for each in made:
                around = (part for every in each.decorator_list for part in ast.walk(every))
                names = {each.name, *(getattr(part, "id", "") for part in around)}
                if each not in reached and not names.isdisjoint(named - self._imports):
                    reached.append(each)
        return self.set_by_functions.union(changed, bound_names(guards))

    def binding(self, name: str) -> list[SymbolSource]:
        """Return the statements that may bind a name, in order; star imports may bind any."""
        return sorted((*self.units.get(name, ()), *self.stars), key=lambda unit: unit.position)

    def place(self, code: types.CodeType) -> tuple[SymbolSource, int] | None:
        """Return the top-level statement that holds code, and the place of the code in it.

        The place is that among the functions of this name. Statements on one line are one. A lambda
        that is an argument, as in ``docs.map("n", lambda text: ...)``, stands for itself. None if
        the file no longer holds the code.
        """
        at = self._statement_at(code.co_firstlineno)
        alike = self._compiled.get((at, code.co_name), [])
        if code_digest(code) not in alike:
            return None
        nodes = [each for each in self.tree.body[at:] if each.lineno <= code.co_firstlineno]
        nodes, place = nodes or self.tree.body[at : at + 1], alike.index(code_digest(code))
        given = _lambda_arguments(nodes) if code.co_name == "<lambda>" else []
        if len(given) == len(alike):
            nodes, place = [ast_digest.as_statement(given[place])], 0
        return SymbolSource(self.path, nodes), place

    def _statement_at(self, line: int) -> int:
        ends = [each.end_lineno or 0 for each in self.tree.body]
        return bisect.bisect_left(ends, line)

    @cached_property
    def _compiled(self) -> dict[tuple[int, str], list[str]]:
        """The digests of functions, by the statement and name."""
        digests: dict[tuple[int, str], list[str]] = {}
        try:
            waiting = [compile(self.text, self.path, "exec", dont_inherit=True)]
        except SyntaxError as error:
            raise syntax_problem(self.path, error) from error
        for code in waiting:  # which grows
            key = (self._statement_at(code.co_firstlineno), code.co_name)
            digests.setdefault(key, []).append(code_digest(code))
            waiting += [item for item in code.co_consts if isinstance(item, types.CodeType)]
        return digests


def _lambda_arguments(statements: Sequence[ast.stmt]) -> list[ast.AST]:
    """Return the lambdas among the arguments of a chain of calls, in the order of evaluation.

    Empty if the statements hold other lambdas too.
    """
    chained: ast.AST | None = getattr(statements[0], "value", None)
    lambdas: list[ast.AST] = []
    while isinstance(chained, (ast.Call, ast.Attribute)):
        if isinstance(chained, ast.Call):
            given = [*chained.args, *(keyword.value for keyword in chained.keywords)]
            lambdas[:0] = [each for each in given if isinstance(each, ast.Lambda)]
            chained = chained.func
        else:
            chained = chained.value
    nodes = (node for each in statements for node in ast.walk(each))
    return lambdas if len(lambdas) == sum(isinstance(n, ast.Lambda) for n in nodes) else []


def _bindings(nodes: Iterable[ast.AST]) -> Counter[str]:
    return Counter(name for node in top_nodes(nodes) for name in bound_by(node))


def bound_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names that nodes bind, in any scope."""
    return frozenset(name for each in nodes for node in ast.walk(each) for name in bound_by(node))


def code_digest(code: types.CodeType) -> str:
    """Hash compiled code without file name and line numbers."""
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest)
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
