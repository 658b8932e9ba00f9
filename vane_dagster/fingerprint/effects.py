"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, applies a decorator of the user's,
or derives a class from one whose code runs then. Imports, definitions and constants do nothing, nor
do declarations of dagster and vane_dagster, logging and warnings. It counts if what it names,
directly or through others, is what the stage uses, or changes a library by a bare call or a store.
Nothing is run, and nothing is known of what a call does.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from weakref import WeakKeyDictionary

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.ast_digest import Scan
from vane_dagster.fingerprint.bindings import binding_units
from vane_dagster.fingerprint.code_strings import Imported, paths
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, ImportTarget, Module, absolute
from vane_dagster.fingerprint.symbols import SymbolSource, bound_names

EVERY = "*"
"""Stands for all names of a module."""
_INERT = frozenset({"dagster", "vane_dagster", "logging", "warnings"})
_VALUES = frozenset({
    "__future__", "abc", "argparse", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "enum", "fractions", "functools", "hashlib", "itertools", "json", "math", "pathlib",
    "re", "string", "textwrap", "threading", "time", "types", "typing", "typing_extensions", "uuid",
    "zoneinfo",
})  # fmt: skip
"""Libraries whose results are all that a call leaves behind, if they are used."""
_READS = ("os.environ.get", "os.getenv", "os.path.", "os.getcwd", "os.cpu_count", "os.fspath")
"""Functions of other libraries that only return something."""
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The same, except for their decorators, which register."""
_CHANGING = frozenset({"delattr", "getattr", "map", "setattr"})
"""Builtins that may change a library that they get."""
_BUILTINS = frozenset(dir(builtins))
_CALLING = frozenset({
    "delattr", "filter", "iter", "map", "max", "min", "next", "setattr", "sorted", "sum", "type",
})  # fmt: skip
"""Builtins that call or change what they get."""
_DYNAMIC = frozenset({"__import__", "compile", "eval", "exec", "globals", "locals", "vars"})
_CLASS_HOOKS = frozenset({
    "__init_subclass__", "__pydantic_init_subclass__", "__attrs_init_subclass__",
    "__get_pydantic_core_schema__", "__mro_entries__",
})  # fmt: skip
"""Methods of a class that run when another class is derived from it."""
_METACLASSES = ("meta", "metaclass", "enumtype", "enum", "flag")
"""Ends of the names of libraries' metaclasses, and of classes that call methods of derived ones."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Effect = Literal["nothing", "own", "library"]
Name = tuple[str, str]
"""A module and one of its names."""


When = Literal["always", "perhaps", "later"]
"""When an import is executed: perhaps if it has a condition, later if only a function has it."""


@dataclass(frozen=True)
class Executed:
    """A top-level statement that an import executes.

    Attributes:
        module: The module.
        unit: The statement.
        runs: The own modules that it may be the first to import, directly or through others.
        when: When the module is imported.
    """

    module: Module
    unit: SymbolSource
    runs: frozenset[str]
    when: When


def executed(finder: Finder, roots: Iterable[str], others: Iterable[str] = ()) -> list[Executed]:
    """Return the top-level statements of the own modules that imports execute, in their order.

    A module whose first import has a condition is there again with the first that has none.
    """
    found: list[Executed] = []
    known: dict[str, When] = {}
    later: list[str] = []

    @functools.cache
    def imports(name: str) -> list[tuple[SymbolSource, list[str]]]:
        module = finder.find(name)
        if module is None or module.kind != "own" or not module.is_source:
            return []
        try:
            units = finder.source(str(module.path)).statements
        except CodeIdentityError:  # importing it fails
            return []
        inner: list[tuple[SymbolSource, list[str]]] = []
        for unit in units:
            targets = [each for ref in unit.scan.imports for each in finder.targets(module, ref)]
            names = [target.name for target in targets if target.module is not None]
            if isinstance(unit.nodes[-1], ast_digest.Definition):
                later.extend(names)
                names = []
            inner.append((unit, names))
        return inner

    def run(name: str, when: When) -> None:
        module = finder.find(name)
        is_known = name in known and (when != "always" or known[name] == "always")
        if module is None or is_known:
            return
        known[name] = when
        for unit, names in imports(name):
            runs, waiting = set[str](), list(names)
            while waiting:
                each = waiting.pop()
                if each not in runs and known.get(each) != "always":
                    runs.add(each)
                    waiting += [inner for _, below in imports(each) for inner in below]
            is_plain = unit.is_import and len(unit.nodes) == 1
            for each in names:
                run(each, "perhaps" if when == "always" and not is_plain else when)
            found.append(Executed(module, unit, frozenset(runs), when))

    for root in roots:
        for name, _ in finder.chain(root):
            run(name, "always")
    for other in itertools.chain(others, later):  # which grows
        for name, _ in finder.chain(other):
            run(name, "later")
    return found


def lists_subclasses(finder: Finder, statements: Iterable[Executed]) -> bool:
    """Return whether a file of the statements reads `__subclasses__`."""
    paths = {str(each.module.path) for each in statements}
    return any(b"__subclasses__" in finder.source(path).text for path in paths)


class Effects:
    """Tells which statements count.

    Attributes:
        lists_subclasses: Whether each class that is derived may be found by its base.
    """

    def __init__(self, finder: Finder, is_used: Callable[[Name], bool]) -> None:
        self._finder, self._is_used = finder, is_used
        self.lists_subclasses = False
        self._hooked: dict[Name, bool] = {}
        self._made: dict[Name, frozenset[str]] = {}
        self._uses_library = functools.cache(self._find_uses)
        self._step = functools.cache(self._find_step)

    def counting(self, statement: Executed) -> Sequence[ast.AST]:
        """Return what of a statement does something to what is used, or to a library."""
        module, nodes = statement.module, statement.unit.nodes
        acts = [act for act in _acts_of(statement.unit) if self._effect(module, act) != "nothing"]
        if not any(self._matters(module, act) for act in acts):
            return ()
        call = getattr(nodes[-1], "value", None)
        if isinstance(call, ast.Call) and self._is_declaration(module, nodes[-1], call):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            inner = {id(act.node) for act in acts}
            parts = [part for part in given if any(id(node) in inner for node in ast.walk(part))]
            return [*nodes[:-1], *parts] if parts else nodes
        return nodes

    def _is_declaration(self, module: Module, statement: ast.stmt, call: ast.Call) -> bool:
        """Return whether a statement only binds what dagster or vane_dagster makes."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(not isinstance(target, ast.Name) for target in targets):
            return False
        tops = self._origins_of(module.name, call)
        return bool(tops) and tops <= _INERT

    def _matters(self, module: Module, act: _Act) -> bool:
        if act.kind == "base" and not self.lists_subclasses:
            assert isinstance(act.node, ast.ClassDef)
            if not self._has_hook(module, act.node):
                return False
        if self._effect(module, act) == "library" or self._changes(module, act):
            return True
        if any(map(self._is_used, self._reached(module, act.parts))):
            return True
        # What a decorator does is known by its own code, and not by the function that it gets.
        parts = act.parts[:1] if act.kind == "decorator" else act.parts
        is_bare = act.kind in ("bare call", "store")
        return any(self._uses_library(name, is_bare) for name in self._reached(module, parts))

    def _has_hook(self, module: Module, node: ast.ClassDef) -> bool:
        """Return whether a class statement may run code of the user's that its bases have."""
        kinds = [each.value for each in node.keywords if each.arg in (None, "metaclass")]
        return any(paths(kind) != {"abc.ABCMeta"} for kind in kinds) or any(
            self._is_hook(module, base) for base in node.bases
        )

    def _is_hook(self, module: Module, base: ast.AST) -> bool:
        """Return whether deriving a class from a base may run code of the user's."""
        while isinstance(base, ast.Subscript):
            base = base.value
        if not isinstance(base, (ast.Name, ast.Attribute)):
            return not self._is_of_libraries(module, base)
        return any(self._is_hooked(module, path) for path in paths(base))

    def _is_hooked(self, module: Module, path: str) -> bool:
        base, _, last = (absolute(module, path) or "").rpartition(".")
        name = (base, last) if isinstance(path, Imported) and base else (module.name, path)
        if name not in self._hooked:
            self._hooked[name] = False  # in a circle
            self._hooked[name] = self._find_hook(*name)
        return self._hooked[name]

    def _find_hook(self, module: str, name: str) -> bool:
        where = self._finder.find(module)
        units = self._units(where, name) if where is not None else []
        if where is None or not units:
            is_known = not self._is_own(module) or name in _BUILTINS
            return not is_known or name == "type" or name.lower().endswith(_METACLASSES)
        for unit in units:
            node = unit.nodes[-1]
            if unit.is_import:
                for ref in unit.scan.imports:
                    base = "." * ref.level + ref.module + "." * bool(ref.module)
                    taken = name if ref.name == "*" else ref.name
                    if taken is None or self._is_hooked(where, Imported(base + taken)):
                        return True
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if self._is_hook(where, node.value):
                    return True
            elif (
                not isinstance(node, ast.ClassDef)
                or not _CLASS_HOOKS.isdisjoint(bound_names([node]))
                or not all(self._is_of_libraries(where, each) for each in node.decorator_list)
                or self._has_hook(where, node)
            ):
                return True
        return False

    def _is_of_libraries(self, module: Module, node: ast.AST) -> bool:
        """Return whether all names in an expression stand for what libraries have or make."""
        for each in ast.walk(node):
            for path in paths(each) if isinstance(each, ast.Name) else ():
                is_imported = isinstance(path, Imported)
                found = {path} if is_imported else self._origins((module.name, path))
                if any(map(self._is_own, found)) or not (found or path in _BUILTINS):
                    return False
        return True

    def _changes(self, module: Module, act: _Act, is_inside: bool = False) -> bool:
        """Return whether an act may change a library that it names."""
        changing = any(root in _CHANGING for root, _ in act.roots)
        if not (changing or act.kind in ("bare call", "store", "decorating call")):
            return False
        is_inside |= act.kind == "decorating call"
        known = _INERT | _VALUES if is_inside and act.kind != "store" else _INERT
        parts = act.parts[:1] if is_inside and not changing else act.parts
        nodes = (node for part in parts for node in ast.walk(part))
        return any(not self._libraries(module, node) <= known for node in nodes)

    def _reached(self, module: Module, parts: Sequence[ast.AST]) -> Iterator[Name]:
        """Yield the names that code names, directly or through others."""
        nodes = [*_without_reads(parts)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names = names.union(*(node.__dict__.get("reads", ()) for node in nodes))
        return self._closure(self._named(module, names, ast_digest.scan(parts)))

    def _libraries(self, module: Module, node: ast.AST) -> frozenset[str]:
        """Return the libraries that a name stands for, directly or through own modules."""
        found: set[str] = set()
        for path in paths(node) if isinstance(node, (ast.Attribute, ast.Name)) else ():
            if isinstance(path, Imported) and self._is_own(path):
                base, _, name = (absolute(module, path) or "").rpartition(".")
                origins = self._origins((base, name)) if base else ()
                found.update(each for each in origins if not self._is_own(each))
            elif isinstance(path, Imported):
                found.add(path.partition(".")[0])
        return frozenset(found)

    def _find_uses(self, name: Name, is_bare: bool) -> bool:
        """Return whether the code of a name uses a library, which it may change."""
        module = self._finder.find(name[0])
        known = _INERT if is_bare else _INERT | _VALUES | _TABLES
        return module is not None and any(
            any(not self._libraries(module, node) <= known for node in _without_reads(unit.nodes))
            or any(self._changes(module, act, is_inside=True) for act in _acts_of(unit, deep=True))
            for unit in self._units(module, name[1])
            if not unit.is_import
        )

    def _effect(self, module: Module, act: _Act) -> Effect:
        """Return what an act may change."""
        if act.kind == "base" or (act.kind == "bare call" and not act.roots):
            return "own"  # a method of a literal, such as `[1, 2].sort(key=add)`
        found = {self._effect_on(module, act, *root) for root in act.roots}
        return "library" if "library" in found else "own" if "own" in found else "nothing"

    def _effect_on(self, module: Module, act: _Act, root: str, stands: frozenset[str]) -> Effect:
        if act.kind == "call" and paths(act.target) == {"functools.partial"}:
            return "nothing"  # it calls nothing yet
        direct = {path for path in stands if isinstance(path, Imported)}
        made = self._origins((module.name, root)) if not direct else frozenset()
        tops = {path.partition(".")[0] for path in direct} or made
        if tops and tops <= _INERT:
            return "nothing"
        if any(map(self._is_own, direct or made)):
            return "own"
        if tops:
            is_read = act.kind != "store" and all(path.startswith(_READS) for path in direct)
            if direct and (is_read or act.kind == "decorator"):
                return "nothing"
            known = _VALUES if act.kind == "decorating call" else _VALUES | _TABLES
            # `made`: an object, or another name of a library.
            is_quiet = bool(made) or act.kind in ("call", "decorating call")
            return "own" if is_quiet and tops <= known else "library"
        if module.is_source and root in self._finder.source(str(module.path)).bound:
            is_lazy_class = any(is_lazy(unit.nodes[-1]) for unit in self._units(module, root))
            is_construction = isinstance(act.target, ast.Name) and act.kind == "call"
            return "nothing" if is_lazy_class and is_construction else "own"
        has_stars = module.is_source and self._finder.source(str(module.path)).stars
        is_opened = root == "open" and act.kind != "call"
        if has_stars or is_opened or root in _DYNAMIC or root not in _BUILTINS:
            return "library"
        is_quiet = isinstance(act.target, ast.Name) and root not in _CALLING
        return "nothing" if is_quiet else "own"

    def _origins(self, name: Name) -> frozenset[str]:
        """Return the libraries whose calls have made what a name stands for; none if unknown."""
        if name not in self._made:
            self._made[name] = frozenset()  # in a circle
            self._made[name] = self._find_origins(name)
        return self._made[name]

    def _find_origins(self, name: Name) -> frozenset[str]:
        module = self._finder.find(name[0])
        found: set[str] = set()
        for unit in self._units(module, name[1]) if module is not None else ():
            assert module is not None
            node = unit.nodes[-1]
            if unit.is_import:
                targets = [each for each in self._imports(module, unit.scan) if each.attribute]
                inner = [self._origins((each.name, str(each.attribute))) for each in targets]
                tops = {ref.module.partition(".")[0] for ref in unit.scan.imports if not ref.level}
                inner += [frozenset({top}) for top in tops if not self._is_own(top)]
            elif name[1] not in unit.bound:  # changed in place
                continue
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                items = [node.value]
                if isinstance(node.value, (ast.Tuple, ast.List)):
                    items = [e for e in node.value.elts if not isinstance(e, ast.Constant)]
                inner = [self._origins_of(name[0], item) for item in items]
            else:
                return frozenset()
            if not inner or not all(inner):
                return frozenset()
            found.update(*inner)
        return frozenset(found)

    def _origins_of(self, module: str, value: ast.expr) -> frozenset[str]:
        found = [path for path in _paths(value) if isinstance(path, Imported)]
        direct = {path.partition(".")[0] or path for path in found}
        return frozenset(direct) or self._origins((module, ast_digest.root_name(value) or ""))

    def _is_own(self, path: str) -> bool:
        if path.startswith("."):
            return True
        module = self._finder.find(path.partition(".")[0])
        return module is not None and module.kind == "own"

    def _closure(self, start: Iterable[Name]) -> Iterator[Name]:
        """Yield names, and those that they name, directly or through others."""
        waiting, seen = list(start), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                is_import, names = self._step(name)
                if not is_import:
                    yield name
                waiting += names

    def _find_step(self, name: Name) -> tuple[bool, Sequence[Name]]:
        """Return whether a name only stands for others, and the names that its code names."""
        module = self._finder.find(name[0])
        if module is None or module.kind != "own":
            return True, ()
        if not module.is_source:
            return False, ()
        source = self._finder.source(str(module.path))
        if name[1] == EVERY:
            names = [(module.name, each) for each in source.units]
            return False, [*names, *self._named(module, (), source.whole.scan, True)]
        units = self._units(module, name[1])
        found: list[Name] = []
        for unit in units:
            is_run = isinstance(unit.nodes[-1], ast_digest.Definition)
            found += self._named(module, unit.names, unit.scan, is_run)
        is_known = bool(units) or name[1] in _BUILTINS
        return is_known and all(unit.is_import for unit in units), found

    def _named(
        self, module: Module, names: Iterable[str], scan: Scan, is_run: bool = False
    ) -> list[Name]:
        """Return the names of own modules that code names."""
        found = [(module.name, name) for name in names]
        refs = list(scan.imports)
        if module.is_source:
            source = self._finder.source(str(module.path))
            refs += [ref for name in sorted(names) for ref in source.import_refs(name)]
        targets = [*self._imports(module, scan, is_run)]
        targets += self._finder.attribute_targets(module, scan, refs)
        for target in targets:
            if target.module is None or target.role != "whole":
                continue
            if target.attribute is not None:
                found.append((target.name, target.attribute))
            if target.attribute is None or not self._units(target.module, target.attribute):
                found.append((target.name, EVERY))
        return found

    def _imports(self, module: Module, scan: Scan, is_run: bool = False) -> Iterator[ImportTarget]:
        for ref in scan.imports:
            if ref.name is None and ref.bound and not is_run:
                continue  # `import a.b`: the names that are used of it are dotted names
            yield from self._finder.targets(module, ref)

    def _units(self, module: Module, name: str) -> list[SymbolSource]:
        if module.kind != "own" or not module.is_source:
            return []
        return binding_units(self._finder, module, name)


ActKind = Literal["call", "bare call", "store", "decorator", "decorating call", "base"]


@dataclass(frozen=True)
class _Act:
    """A call, a store, a decorator or a base of a class.

    Attributes:
        kind: What it is. A bare call is one whose result is not used.
        node: The node that it consists of.
        target: The called or changed expression.
        parts: The expressions that it involves, `target` first.
    """

    kind: ActKind
    node: ast.AST
    target: ast.AST
    parts: tuple[ast.AST, ...]

    @cached_property
    def roots(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The names that the target begins with, and what they stand for, see `_paths`.

        It is ``a`` for ``a.b(c)``; all names of a target such as ``(a if b else c).d``.
        """
        if (root := ast_digest.root_name(self.target)) is not None:
            return ((root, _paths(self.target)),)
        names = [node for node in ast.walk(self.target) if isinstance(node, ast.Name)]
        return tuple((name.id, paths(name)) for name in names)


def _paths(node: ast.AST) -> frozenset[str]:
    while isinstance(node, (ast.Call, ast.Subscript, ast.Await, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    inner = node
    while isinstance(inner, ast.Attribute):
        if isinstance(inner.value, (ast.Call, ast.Subscript)):
            return _paths(inner.value)
        inner = inner.value
    return paths(node)


_found: WeakKeyDictionary[SymbolSource, dict[bool, tuple[_Act, ...]]] = WeakKeyDictionary()


def _acts_of(unit: SymbolSource, deep: bool = False) -> tuple[_Act, ...]:
    """Return what statements do, see `_acts`; found once for each unit of a file."""
    known = _found.setdefault(unit, {})
    if deep not in known:
        known[deep] = tuple(_acts(unit.nodes, deep))
    return known[deep]


def _acts(nodes: Iterable[ast.AST], deep: bool) -> Iterator[_Act]:
    """Yield what statements do when they are executed."""
    kinds: dict[int, ActKind] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            kinds[id(value)] = "bare call"
        elif isinstance(node, ast.Assign) and all(
            getattr(each, "id", "") == "_" for each in node.targets
        ):
            kinds[id(node.value)] = "bare call"
        elif isinstance(node, ast.withitem):
            kinds[id(node.context_expr)] = "bare call"
            if not isinstance(node.context_expr, ast.Call):
                yield _Act("bare call", node, node.context_expr, (node.context_expr,))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield _Act("store", node, node.target, (node.target, node.value))
        elif isinstance(node, ast.Call):
            parts = (node.func, *node.args, *(item.value for item in node.keywords))
            yield _Act(kinds.get(id(node), "call"), node, node.func, parts)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
            node.ctx, ast.Load
        ):
            yield _Act("store", node, node, (node,))
        if isinstance(node, ast_digest.Definition):
            for decorator in node.decorator_list:
                kinds[id(decorator)] = "decorating call"
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                yield _Act("decorator", node, function, (function, node))
        if isinstance(node, ast.ClassDef):
            for base in (*node.bases, *(item.value for item in node.keywords)):
                yield _Act("base", node, base, (base,))
        if isinstance(node, _FUNCTIONS) and not deep:
            waiting += node.args.defaults
            waiting += [each for each in node.args.kw_defaults if each is not None]
            waiting += getattr(node, "decorator_list", ())
        else:
            waiting += ast.iter_child_nodes(node)


def _without_reads(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes below some, without functions of libraries that only return something."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        is_loaded = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if is_loaded and any(path.startswith(_READS) for path in paths(node)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)
