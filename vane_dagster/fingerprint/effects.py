"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, applies a decorator of the user's,
or derives a class from one whose code runs then. Imports, definitions and constants do nothing, nor
do declarations of dagster and vane_dagster, logging and warnings. A statement that does something
counts if it names, directly or through others, what the stage uses, or a library. A call whose
result is assigned may name some libraries without counting: those whose calls only make values.
Nothing is run, and nothing is known of what a call does.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from weakref import WeakKeyDictionary

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.code_strings import Imported, paths
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SymbolSource

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
_PURE = frozenset({"dataclasses", "functools", "itertools", "typing", "typing_extensions"})
"""Libraries that the user's code that an assigned call runs does not change."""
_READS = ("os.environ.get", "os.getenv", "os.path.", "os.getcwd", "os.cpu_count", "os.fspath")
"""Functions of other libraries that only return something."""
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The same, except for their decorators, which register."""
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
            for each in names:
                run(each, "perhaps" if when == "always" and not unit.is_import else when)
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


@dataclass(frozen=True)
class Reach:
    """What statements name, directly or through others.

    Attributes:
        names: The names in the user's files, except those that only stand for others.
        libraries: The modules of libraries.
        units: The code, with the statements themselves.
    """

    names: frozenset[Name]
    libraries: frozenset[str]
    units: Sequence[SymbolSource]

    @cached_property
    def traits(self) -> frozenset[str]:
        """The traits of the code."""
        return frozenset[str]().union(*map(_traits_of, self.units))

    @cached_property
    def harmless(self) -> frozenset[str]:
        """The libraries of which the code only calls functions; `os` if these only read."""
        units = (unit for unit in self.units[1:] if unit.bound)  # others count by themselves
        chains = {".".join(chain) for unit in units for chain in unit.scan.chains}
        texts = (text for text in chains if text.startswith("os.") and text != "os.environ")
        reads = {"os"} if all(text.startswith(_READS) for text in texts) else set[str]()
        return (_PURE - self.traits) | reads

    def is_made(self, names: Set[str]) -> bool:
        """Return whether one of some names stands for what a call made, and no class."""
        kinds = (*ast_digest.Definition, ast.Import, ast.ImportFrom)
        units = (unit for unit in self.units if unit.nodes)
        return any(
            not (isinstance(unit.nodes[-1], kinds) or names.isdisjoint(unit.bound))
            for unit in units
        )


_CODE, _HOOK = "code", "hook"
_traits: WeakKeyDictionary[SymbolSource, frozenset[str]] = WeakKeyDictionary()


def _traits_of(unit: SymbolSource) -> frozenset[str]:
    """Return whether statements hold code and hooks of classes, and the modules that they give on.

    It is found once for each unit of a file.
    """
    if unit not in _traits:
        nodes = [node for each in unit.nodes for node in ast.walk(each)]
        read = {id(each.value) for each in nodes if type(each) is ast.Attribute and _is_read(each)}
        given = (each for each in nodes if isinstance(each, ast.Name) and id(each) not in read)
        found = set[str]().union(*map(paths, given)) & _PURE
        if any(isinstance(node, (*_FUNCTIONS, ast.ClassDef)) for node in nodes):
            found.add(_CODE)
        if any(map(_is_hooked, nodes)):
            found.add(_HOOK)
        _traits[unit] = frozenset(found)
    return _traits[unit]


def _is_read(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_hooked(node: ast.AST) -> bool:
    """Return whether a node names a hook, or is a class with a metaclass."""
    if any(getattr(node, key, None) in _CLASS_HOOKS for key in ("name", "id", "attr", "value")):
        return True
    of_class = (None, "metaclass") if isinstance(node, ast.ClassDef) else ("metaclass",)
    kinds = [each.value for each in getattr(node, "keywords", ()) if each.arg in of_class]
    ends = [
        path.rpartition(".")[2].lower()
        for each in getattr(node, "bases", ())
        for path in paths(each)
    ]
    is_meta = any(end == "type" or end.endswith(_METACLASSES) for end in ends)
    return is_meta or any(paths(kind) != {"abc.ABCMeta"} for kind in kinds)


class Effects:
    """Tells which statements count.

    Attributes:
        lists_subclasses: Whether each class that is derived may be found by its base.
    """

    def __init__(
        self,
        finder: Finder,
        is_used: Callable[[Name], bool],
        reach: Callable[[Module, Sequence[ast.stmt]], Reach],
    ) -> None:
        self._finder, self._is_used, self._find_reach = finder, is_used, reach
        self.lists_subclasses = False
        self._made: dict[Name, frozenset[str]] = {}
        self._reached: dict[tuple[int, bool], Reach] = finder.reached

    def counting(self, statement: Executed) -> Sequence[ast.stmt]:
        """Return what of a statement does something to what is used, or to a library."""
        module, unit = statement.module, statement.unit
        effects = {act: self._effect(module, act) for act in _acts_of(unit)}
        acts = [act for act, effect in effects.items() if effect != "nothing"]
        if not acts:
            return ()
        nodes = self._acting(module, unit, acts)
        if "library" in effects.values():
            return nodes
        run = self._reach(module, unit, [each for node in nodes for each in _run(node)], False)
        bases = [act for act in acts if act.kind == "base"]
        ends = {path.rpartition(".")[2] for act in bases for path in paths(act.target)}
        if len(bases) == len(acts) and not (
            self.lists_subclasses
            or _HOOK in run.traits
            or _is_hooked(unit.nodes[-1])
            or run.is_made(ends)
        ):
            return ()
        if any(act.is_bare for act in acts):
            known = _INERT
        elif _CODE in run.traits:
            known = _INERT | (_PURE & run.harmless)
        elif any(act.kind == "decorating call" for act in acts):
            known = _INERT | _VALUES | (run.harmless & {"os"})
        else:
            known = _INERT | _VALUES | _TABLES | (run.harmless & {"os"})
        names = run.names
        if any(act.kind == "decorator" for act in acts):  # it may call what it gets
            names |= self._reach(module, unit, nodes, True).names
        return nodes if not run.libraries <= known or any(map(self._is_used, names)) else ()

    def _reach(
        self, module: Module, unit: SymbolSource, nodes: Sequence[ast.stmt], is_whole: bool
    ) -> Reach:
        key = (id(unit), is_whole)
        if key not in self._reached:
            self._reached[key] = self._find_reach(module, nodes)
        return self._reached[key]

    def _acting(
        self, module: Module, unit: SymbolSource, acts: Sequence[_Act]
    ) -> Sequence[ast.stmt]:
        """Return a statement; of a declaration of dagster or vane_dagster, arguments that act."""
        call = getattr(unit.nodes[-1], "value", None)
        targets = getattr(unit.nodes[-1], "targets", ())
        tops = self._origins_of(module.name, call) if isinstance(call, ast.Call) else frozenset()
        is_plain = all(isinstance(target, ast.Name) for target in targets)
        if not (isinstance(call, ast.Call) and is_plain and tops and tops <= _INERT):
            return unit.nodes
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        inner = {id(act.node) for act in acts}
        parts = [part for part in given if any(id(node) in inner for node in ast.walk(part))]
        return [*map(ast_digest.as_statement, parts)] if parts else unit.nodes

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
            quiet = {"call": _VALUES | _TABLES, "decorating call": _VALUES}
            return "own" if tops <= quiet.get(act.kind, frozenset()) else "library"
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
                targets = [
                    each
                    for ref in unit.scan.imports
                    for each in self._finder.targets(module, ref)
                    if each.attribute
                ]
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

    def _units(self, module: Module, name: str) -> list[SymbolSource]:
        if module.kind != "own" or not module.is_source:
            return []
        return self._finder.source(str(module.path)).binding(name)


def _run(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield what a statement executes: of a definition the decorators, bases and defaults."""
    if not isinstance(node, ast_digest.Definition):
        yield ast_digest.as_statement(node)
        return
    yield from map(ast_digest.as_statement, node.decorator_list)
    if isinstance(node, ast.ClassDef):
        given = [*node.bases, *(each.value for each in node.keywords)]
        yield from itertools.chain.from_iterable(map(_run, node.body))
    else:
        given = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each]
    yield from map(ast_digest.as_statement, given)


ActKind = Literal["call", "bare call", "store", "decorator", "decorating call", "base"]


@dataclass(frozen=True)
class _Act:
    """A call, a store, a decorator or a base of a class.

    Attributes:
        kind: What it is. A bare call is one whose result is not used.
        node: The node that it consists of.
        target: The called or changed expression.
    """

    kind: ActKind
    node: ast.AST
    target: ast.AST

    @property
    def is_bare(self) -> bool:
        """Whether it may change what it gets: its result is not used, or a builtin calls."""
        return self.kind in ("bare call", "store") or any(
            root in _CALLING or root == "getattr" for root, _ in self.roots
        )

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


_found: WeakKeyDictionary[SymbolSource, tuple[_Act, ...]] = WeakKeyDictionary()


def _acts_of(unit: SymbolSource) -> tuple[_Act, ...]:
    """Return what a statement does, see `_acts`; found once for each unit of a file."""
    if unit not in _found:
        _found[unit] = tuple(_acts(unit.nodes[-1]))
    return _found[unit]


def _acts(statement: ast.stmt) -> Iterator[_Act]:
    """Yield what a statement does when it is executed."""
    kinds: dict[int, ActKind] = {}
    waiting: list[ast.AST] = [statement]
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
                yield _Act("bare call", node, node.context_expr)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield _Act("store", node, node.target)
        elif isinstance(node, ast.Call):
            yield _Act(kinds.get(id(node), "call"), node, node.func)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
            node.ctx, ast.Load
        ):
            yield _Act("store", node, node)
        if isinstance(node, ast_digest.Definition):
            for decorator in node.decorator_list:
                kinds[id(decorator)] = "decorating call"
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                yield _Act("decorator", node, function)
        if isinstance(node, ast.ClassDef):
            for base in (*node.bases, *(item.value for item in node.keywords)):
                yield _Act("base", node, base)
        if isinstance(node, _FUNCTIONS):
            waiting += node.args.defaults
            waiting += [each for each in node.args.kw_defaults if each is not None]
            waiting += getattr(node, "decorator_list", ())
        else:
            waiting += ast.iter_child_nodes(node)
