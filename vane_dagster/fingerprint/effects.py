"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, is decorated, derives a class from
one whose code runs then, or imports under a condition. Imports, definitions and constants do
nothing, nor do declarations of dagster and vane_dagster, command lines, tests, logging and
warnings. A statement that does something counts if it names, directly or through others, what the
stage uses, or a library. A call whose result is assigned may name some libraries without counting:
those whose calls only make values. Nothing is run, and nothing is known of what a call does.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.code_strings import Imported, paths
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SymbolSource

EVERY = "*"
"""Stands for all names of a module."""
_INERT = frozenset({
    "click", "dagster", "logging", "pytest", "typer", "vane_dagster", "warnings",
})  # fmt: skip
"""Libraries whose declarations and settings change no result."""
_PURE = frozenset({"dataclasses", "functools", "itertools", "typing", "typing_extensions"})
"""Libraries that the user's code may use when an import runs it."""
_VALUES = _PURE | {
    "__future__", "abc", "argparse", "attr", "attrs", "collections", "contextlib", "copy",
    "datetime", "enum", "fractions", "hashlib", "json", "math", "pathlib", "pydantic",
    "re", "string", "textwrap", "threading", "time", "types", "uuid", "zoneinfo",
}  # fmt: skip
"""Libraries whose results are all that a call or decorator leaves behind, if they are used."""
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The same, except for their decorators, which register."""
_READS = (
    *("os.environ.get", "os.getenv", "os.getcwd", "os.cpu_count", "os.fspath"),
    *("jax.jit", "numba.jit", "numba.njit", "ray.remote", "tenacity.retry", "tensorflow.function"),
    *("torch.compile", "torch.device", "torch.inference_mode", "torch.no_grad", "triton.jit"),
)
"""Functions of other libraries that only return something, and decorators that only wrap."""
_BUILTINS = frozenset(dir(builtins))
_CALLING = frozenset({
    "delattr", "filter", "getattr", "iter", "map", "max", "min", "next", "setattr", "sorted", "sum",
    "type",
})  # fmt: skip
"""Builtins that call or change what they get."""
_DYNAMIC = frozenset({"__import__", "compile", "eval", "exec", "globals", "locals", "vars"})
_CLASS_HOOKS = re.compile(
    r"__\w*init_subclass__|__get_pydantic_core_schema__|__mro_entries__|with_metaclass"
    r"|(?!ABCMeta)[A-Z]?\w*(?:Enum|EnumType|Flag|Meta|Metaclass)"
)
"""Names in a class whose code may run when another class is derived from it."""

Effect = Literal["nothing", "own", "library"]
Name = tuple[str, str]
"""A module and one of its names."""


class Executed(NamedTuple):
    """A top-level statement that an import executes.

    Attributes:
        module: The module.
        unit: The statement.
        is_sure: Whether the import is executed; not if a function or compound statement has it.
    """

    module: Module
    unit: SymbolSource
    is_sure: bool


def executed(
    finder: Finder, roots: Iterable[str], later: Iterable[str] | None = None
) -> list[Executed]:
    """Return the top-level statements of the own modules that imports execute, in their order.

    A module whose first import may not be executed is there again with the first that is.

    Args:
        finder: Locates the modules.
        roots: The modules to import.
        later: Modules that functions import. They follow, with the imports inside functions; None
            leaves out both.
    """
    found: list[Executed] = []
    known: dict[str, bool] = {}
    inside = list(later or ())

    def run(name: str, is_sure: bool) -> None:
        module = finder.find(name)
        if module is None or known.get(name) or (name in known and not is_sure):
            return
        known[name] = is_sure
        if module.kind != "own" or not module.is_source:
            return
        try:
            units = finder.source(str(module.path)).statements
        except CodeIdentityError:  # importing it fails
            return
        for unit in units:
            names = finder.own_imports(module, unit)
            if isinstance(unit.nodes[-1], ast_digest.Definition):
                inside.extend(names)
                names = []
            for each in names:
                run(each, is_sure and unit.is_import)
            found.append(Executed(module, unit, is_sure))

    for root in roots:
        for name, _ in finder.chain(root):
            run(name, True)
    for root in inside if later is not None else ():  # which grows
        for name, _ in finder.chain(root):
            run(name, False)
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
        """The traits of the code, see `_traits_of`."""
        return frozenset[str]().union(*map(_traits_of, self.units))

    def names_other(self, known: Set[str]) -> bool:
        """Return whether it names a library that is not known, or gives on or changes one."""
        # Statements that only change a name count by themselves.
        units = [self.units[0], *(unit for unit in self.units if unit.bound)]
        uses = {use for unit in units for use in _traits_of(unit) if _top(use) in self.libraries}
        read = {_top(use) for use in uses} - {_top(use) for use in uses if not _only_returns(use)}
        given = {use for use in uses if "." not in use} - _INERT
        return bool(given) or not self.libraries <= known | read

    def is_made(self, names: Set[str]) -> bool:
        """Return whether one of some names stands for what a call made, and no class."""
        kinds = (*ast_digest.Definition, ast.Import, ast.ImportFrom)
        units = (unit for unit in self.units if unit.nodes)
        return any(
            not (isinstance(unit.nodes[-1], kinds) or names.isdisjoint(unit.bound))
            for unit in units
        )


_CODE, _HOOK = "<code>", "<hook>"
_traits: WeakKeyDictionary[SymbolSource, frozenset[str]] = WeakKeyDictionary()


def _traits_of(unit: SymbolSource) -> frozenset[str]:
    """Return whether statements hold code and hooks of classes, and the paths that they name.

    A module that is changed, or given on as an object, is there by its name alone. The traits are
    found once for each unit of a file.
    """
    if unit not in _traits:
        nodes = [node for each in unit.nodes for node in ast.walk(each)]
        changed = [each for each in nodes if isinstance(each, ast.Attribute) and not _is_read(each)]
        found = {_top(path) for each in changed for path in paths(each)} | unit.scan.paths
        if any(isinstance(node, (*ast_digest.Definition, ast.Lambda)) for node in nodes):
            found.add(_CODE)
        if any(map(_is_hook, nodes)):
            found.add(_HOOK)
        _traits[unit] = frozenset(found)
    return _traits[unit]


def _is_read(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_hook(node: ast.AST) -> bool:
    """Return whether a node names a hook of classes, or gives a class a metaclass."""
    if isinstance(node, ast.keyword) and node.arg == "metaclass":
        return paths(node.value) != {"abc.ABCMeta"}
    if isinstance(node, ast.ClassDef):
        bases = [path for each in node.bases for path in paths(each)]
        if not {"type", "abc.ABCMeta"}.isdisjoint(bases):
            return True
    named = (getattr(node, key, None) for key in ("name", "id", "attr", "value"))
    return any(isinstance(each, str) and _CLASS_HOOKS.fullmatch(each) for each in named)


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
        self._declared: dict[Name, bool] = {}
        self._reached: dict[tuple[int, ...], Reach] = finder.reached

    def counting(self, module: Module, unit: SymbolSource) -> Sequence[ast.stmt]:
        """Return what of a statement does something to what is used, or to a library."""
        is_plain = unit.is_import or isinstance(unit.nodes[-1], ast_digest.Definition)
        if not is_plain and self._finder.own_imports(module, unit):
            return unit.nodes
        effects = {act: self._effect(module, act) for act in _acts_of(unit)}
        acts = [act for act, effect in effects.items() if effect != "nothing"]
        if not acts:
            return ()
        nodes = self._acting(module, unit, acts)
        if "library" in effects.values():
            return nodes
        run = self._reach(module, unit, acts, [act.executed for act in acts], False)
        bases = [act for act in acts if act.kind == "base"]
        ends = {path.rpartition(".")[2] for act in bases for path in paths(act.target)}
        is_hooked = self.lists_subclasses or _HOOK in run.traits | _traits_of(unit)
        if len(bases) == len(acts) and not (is_hooked or run.is_made(ends)):
            return ()
        known = _INERT
        if not any(act.kind in ("bare call", "store") for act in acts):
            known |= _PURE if _CODE in run.traits else _VALUES | _TABLES
        names = run.names
        if any(act.kind == "decorator" for act in acts):  # it may call what it gets
            names |= self._reach(module, unit, acts, nodes, True).names
        return nodes if run.names_other(known) or any(map(self._is_used, names)) else ()

    def _reach(
        self,
        module: Module,
        unit: SymbolSource,
        acts: Iterable[_Act],
        nodes: Sequence[ast.stmt],
        is_whole: bool,
    ) -> Reach:
        key = (id(unit), is_whole, *map(id, acts))
        if key not in self._reached:
            self._reached[key] = self._find_reach(module, nodes)
        return self._reached[key]

    def _acting(
        self, module: Module, unit: SymbolSource, acts: Sequence[_Act]
    ) -> Sequence[ast.stmt]:
        """Return a statement; of a declaration of dagster or vane_dagster, arguments that act."""
        call = getattr(unit.nodes[-1], "value", None)
        targets = getattr(unit.nodes[-1], "targets", ())
        is_plain = all(isinstance(target, ast.Name) for target in targets)
        if not (isinstance(call, ast.Call) and is_plain and self._is_declared(module, call)):
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
        direct = {path for path in stands if isinstance(path, Imported)}
        if self._is_declared(module, act.target):
            is_changed = not direct and self._is_used((module.name, root))
            return "own" if is_changed else "nothing"
        if direct:
            if any(map(self._is_own, direct)):
                return "own"
            if paths(act.target) == {"functools.partial"}:
                return "nothing" if act.kind == "call" else "own"  # it calls nothing yet
            is_read = all(map(_only_returns, direct))
            if act.kind == "decorator":
                if not (is_read or {_top(path) for path in direct} <= _VALUES):
                    return "library"
                return "own" if self._gives_own(act.node) else "nothing"
            if act.kind != "call":
                return "library"
            return "nothing" if is_read else "own"
        source = self._finder.source(str(module.path))
        if root in source.bound:
            is_lazy_class = any(is_lazy(unit.nodes[-1]) for unit in source.binding(root))
            is_construction = isinstance(act.target, ast.Name) and act.kind == "call"
            return "nothing" if is_lazy_class and is_construction else "own"
        is_opened = root == "open" and act.kind != "call"
        if source.stars or is_opened or root in _DYNAMIC or root not in _BUILTINS:
            return "library"
        is_quiet = isinstance(act.target, ast.Name) and root not in _CALLING
        return "nothing" if is_quiet else "own"

    def _gives_own(self, decorator: ast.AST) -> bool:
        """Return whether a decorator gets a value of the user's, such as a function to call."""
        given = [*getattr(decorator, "args", ()), *getattr(decorator, "keywords", ())]
        for node in (node for each in given for node in ast.walk(each)):
            if isinstance(node, ast.Lambda):
                return True
            stands = paths(node) if isinstance(node, ast.Name) else ()
            if any(self._is_own(path) if isinstance(path, Imported) else True for path in stands):
                return True
        return False

    def _is_declared(self, module: Module, value: ast.AST) -> bool:
        """Return whether a value is made by libraries whose declarations change nothing."""
        if found := {_top(path) for path in _paths(value) if isinstance(path, Imported)}:
            return found <= _INERT
        name = ast_digest.root_name(value) or ""
        key = (module.name, name)
        if key not in self._declared:
            self._declared[key] = False  # in a circle
            units = self._finder.source(str(module.path)).binding(name)
            made = [self._values_of(unit) for unit in units if name in unit.bound]
            self._declared[key] = bool(made) and all(
                each and all(self._is_declared(module, item) for item in each) for each in made
            )
        return self._declared[key]

    @staticmethod
    def _values_of(unit: SymbolSource) -> list[ast.expr]:
        """Return the expressions that an assignment assigns, except constants."""
        node = unit.nodes[-1]
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            return []
        elements: list[ast.expr] = getattr(node.value, "elts", [node.value])
        return [each for each in elements if not isinstance(each, ast.Constant)]

    def _is_own(self, path: str) -> bool:
        if path.startswith("."):
            return True
        module = self._finder.find(path.partition(".")[0])
        return module is not None and module.kind == "own"


def _only_returns(path: str) -> bool:
    return path in _READS or path.startswith("os.path.")


def _top(path: str) -> str:
    return path.partition(".")[0] or path


ActKind = Literal["call", "bare call", "store", "decorator", "base"]


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
    def executed(self) -> ast.stmt:
        """What is executed, as a statement."""
        node = self.node
        if isinstance(node, (ast.Attribute, ast.Subscript)) and self.kind == "store":
            node = copy.copy(node)
            node.ctx = ast.Load()
        return ast_digest.as_statement(node)

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
                yield _Act("bare call", node.context_expr, node.context_expr)
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
                kinds[id(decorator)] = "decorator"
                if not isinstance(decorator, ast.Call):
                    yield _Act("decorator", decorator, decorator)
        if isinstance(node, ast.ClassDef):
            for base in (*node.bases, *(item.value for item in node.keywords)):
                yield _Act("base", base, base)
        waiting += ast_digest.evaluated(node)
