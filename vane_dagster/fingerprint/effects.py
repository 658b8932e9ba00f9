"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, is decorated, derives a class from
one whose code runs then, or imports under a condition. Imports, definitions and constants do
nothing, nor do declarations of dagster and vane_dagster, calls of functions that make these and
otherwise only values, command lines, tests, logging and warnings. A statement that does something
counts if it names, directly or through others, what the stage uses, or a library. A call whose
result is assigned may name some libraries without counting: those whose calls only make values.
Nothing is run, and nothing is known of what other calls do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.acts import Act, acts
from vane_dagster.fingerprint.code_strings import (
    Definition,
    Imported,
    bound_by,
    chain,
    paths,
    top_nodes,
)
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, Module, absolute
from vane_dagster.fingerprint.symbols import SymbolSource

EVERY = "*"
"""Stands for all names of a module."""
_INERT = frozenset({
    "click", "dagster", "logging", "pathlib", "pytest", "typer", "vane_dagster", "warnings",
})  # fmt: skip
"""Libraries whose declarations and settings change no result."""
_PURE = _INERT | {
    "dataclasses", "functools", "itertools", "typing", "typing_extensions", "os.environ.get",
    "os.getenv", "os.getcwd", "os.cpu_count", "os.fspath", "os.path", "jax.jit", "numba.jit",
    "numba.njit", "ray.remote", "tenacity.retry", "tensorflow.function", "torch.compile",
    "torch.device", "torch.inference_mode", "torch.no_grad", "triton.jit",
}  # fmt: skip
"""Libraries and functions that the user's code may use when an import runs it."""
_VALUES = _PURE | {
    "__future__", "abc", "argparse", "attr", "attrs", "collections", "contextlib", "copy",
    "datetime", "enum", "fractions", "hashlib", "json", "math", "pydantic", "re", "string",
    "textwrap", "threading", "time", "tomllib", "types", "uuid", "yaml", "zoneinfo",
}  # fmt: skip
"""Libraries whose results are all that a call or decorator leaves behind."""
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The same, except for their decorators, which register."""
_QUIET = frozenset({
    "abs", "all", "any", "bool", "classmethod", "dict", "enumerate", "float", "frozenset",
    "hasattr", "int", "isinstance", "len", "list", "max", "min", "open", "print", "property",
    "range", "repr", "reversed", "round", "set", "sorted", "staticmethod", "str", "sum", "tuple",
    "zip",
    "functools.partial", "os.environ.get", "os.getenv", "os.makedirs", "os.mkdir",
    "os.path.abspath", "os.path.basename", "os.path.dirname", "os.path.exists",
    "os.path.expanduser", "os.path.join", "shutil.rmtree",
})  # fmt: skip
"""Functions that neither call nor change their arguments. Creating a folder changes no code."""

Name = tuple[str, str]
"""A module and one of its names."""

_TEXTS = (ast.Constant, ast.JoinedStr)
_DECLARING = frozenset({"dagster", "vane_dagster"})
_DECLARES: Name = ("vane_dagster", "")
"""Stands for all that these libraries declare."""
_MADE_BY = {"call": _VALUES | _TABLES, "base": _VALUES, "decorator": _PURE}
"""The libraries that only make values, by the kind of act."""


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
    statements: list[Executed] = []
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
            if isinstance(unit.nodes[-1], Definition):
                inside.extend(names)
                names = []
            for each in names:
                run(each, is_sure and unit.is_import)
            statements.append(Executed(module, unit, is_sure))

    for root in roots:
        for name, _ in finder.chain(root):
            run(name, True)
    for root in inside if later is not None else ():  # which grows
        for name, _ in finder.chain(root):
            run(name, False)
    return statements


def lists_subclasses(finder: Finder, statements: Iterable[Executed]) -> bool:
    """Return whether a file of the statements reads `__subclasses__`."""
    paths = {str(each.module.path) for each in statements}
    return any(b"__subclasses__" in finder.source(path).text for path in paths)


class Reach(NamedTuple):
    """What statements name, directly or through others, but not through declared objects.

    Attributes:
        names: The names in the user's files, except those that only stand for others.
        uses: The paths of what is named of libraries.
        has_code: Whether definitions are among it.
        is_hooked: Whether it names hooks of classes.
        is_dynamic: Whether it may import a module that no literal names.
    """

    names: frozenset[Name]
    uses: frozenset[str]
    has_code: bool
    is_hooked: bool
    is_dynamic: bool

    def uses_other(self, known: Set[str]) -> bool:
        """Return whether it uses a library that is not known, or gives on or changes one."""
        return any(
            use not in _INERT if "." not in use else not _is_among(use, known) for use in self.uses
        )


def _is_among(path: str, known: Set[str]) -> bool:
    """Return whether a path, or what it begins with, is known."""
    return path in known or ("." in path and _is_among(path.rpartition(".")[0], known))


class Effects:
    """Tells which statements count.

    Attributes:
        lists_subclasses: Whether each class that is derived may be found by its base.
    """

    def __init__(
        self,
        finder: Finder,
        is_used: Callable[[Name], bool],
        reach: Callable[[Module, Sequence[ast.stmt], Callable[[Module, str], bool]], Reach],
    ) -> None:
        self._finder, self._is_used, self._find_reach = finder, is_used, reach
        self.lists_subclasses = False
        self._declared: dict[Name, bool] = {}

    def counting(self, module: Module, unit: SymbolSource) -> Sequence[ast.stmt]:
        """Return what of a statement does something to what is used, or to a library."""
        is_plain = unit.is_import or isinstance(unit.nodes[-1], Definition)
        if not is_plain and self._finder.own_imports(module, unit):
            return unit.nodes
        acts = [act for act in unit.acts if not self._is_inert(module, act)]
        if not acts:
            return ()
        run = self._reach(module, unit, acts)
        kinds = {act.kind for act in acts}
        is_hooked = self.lists_subclasses or run.is_hooked or unit.is_hooked
        if kinds == {"base"} and not is_hooked:
            return ()
        known: Set[str] = _INERT
        if kinds.isdisjoint(("bare call", "store")):
            known = _VALUES if "decorator" in kinds else _VALUES | _TABLES
            known = _PURE if run.has_code else known
        nodes = self._acting(module, unit, acts)
        names = run.names
        decorators = [act for act in acts if act.kind == "decorator"]
        if decorators and self._reach(module, unit, decorators).names:
            names |= self._reach(module, unit, acts, nodes).names  # it may call what it gets
        is_other = run.is_dynamic or run.uses_other(known)
        return nodes if is_other or any(map(self._is_used, names)) else ()

    def _reach(
        self,
        module: Module,
        unit: SymbolSource,
        acts: Sequence[Act],
        nodes: Sequence[ast.stmt] | None = None,
    ) -> Reach:
        """Return what is named by acts of a statement, or by the statement itself."""
        key = (id(unit), nodes is None, *(id(act.node) for act in acts))
        reached: dict[tuple[int, ...], Reach] = self._finder.reached
        if key not in reached:
            if nodes is None:
                nodes = [ast_digest.as_statement(act.node) for act in acts]
            reached[key] = self._find_reach(module, nodes, self._is_declared_name)
        return reached[key]

    def _acting(
        self, module: Module, unit: SymbolSource, acts: Sequence[Act]
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

    def _is_inert(self, module: Module, act: Act) -> bool:
        """Return whether an act changes and calls nothing that a stage may use."""
        root = ast_digest.root(act.target)
        if act.kind == "base" or not isinstance(root, ast.Name):
            return isinstance(root, _TEXTS)  # a method of a text
        made = act.node if isinstance(act.node, ast.Call) else act.target
        if self._is_declared(module, made):
            if any(isinstance(path, Imported) for path in paths(root)):
                return True
            return act.kind != "store" and not self._is_used((module.name, root.id))
        called = paths(act.target)
        is_quiet = bool(called) and called <= _QUIET
        source = self._finder.source(str(module.path))
        if root.id not in source.bound:
            return is_quiet and not source.stars
        if is_quiet and all(isinstance(path, Imported) for path in called):
            return act.kind in ("call", "bare call")
        is_construction = isinstance(act.target, ast.Name) and act.kind == "call"
        return is_construction and any(is_lazy(unit.nodes[-1]) for unit in source.binding(root.id))

    def _is_declared(self, module: Module, value: ast.AST | None) -> bool:
        """Return whether a value is made by libraries whose declarations change nothing."""
        root = ast_digest.root(value) if value is not None else None
        if not isinstance(root, ast.Name):
            return False
        is_made = self._is_made(module, value, root)
        return self._is_declared_name(module, root.id) if is_made is None else is_made

    def _is_made(self, module: Module, value: ast.AST | None, root: ast.Name) -> bool | None:
        """Return whether a value is made by such a library, or by a function that declares.

        None if its name is one of the module, and not called.
        """
        imported = {path for path in paths(root) if isinstance(path, Imported)}
        if imported and all(_is_among(path, _INERT) for path in imported):
            return True
        nodes = ast.walk(value) if value is not None else ()
        calls = [node for node in nodes if isinstance(node, ast.Call) and _calls(node, root)]
        if not calls:
            return False if imported else None
        return all(self._only_declares(module, call) for call in calls)

    def _is_declared_name(self, module: Module, name: str) -> bool:
        key = (module.name, name)
        if key not in self._declared:
            self._declared[key] = False  # in a circle
            units = self._finder.source(str(module.path)).binding(name)
            made = [each for unit in units if name in unit.bound for each in _assigned(unit)]
            self._declared[key] = bool(made) and all(
                self._is_declared(module, each) for each in made
            )
        return self._declared[key]

    def _only_declares(self, module: Module, call: ast.Call) -> bool:
        """Return whether a call of a user's function declares something and changes nothing else.

        Nothing, that is, that a stage may use.
        """
        asked = self._asked_by(module, call.func)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if asked is None or any(map(self._is_used, asked | self._values(module, given))):
            return False
        return _DECLARES in asked or any(self._is_declared(module, each) for each in given)

    def _asked_by(self, module: Module, called: ast.expr) -> frozenset[Name] | None:
        """Return what a function or class of the user's asks when it is called; see `_asked`."""
        base, _ = chain(called)
        is_imported = any(isinstance(path, Imported) for path in paths(base))
        places = paths(called) if is_imported else [f"{module.name}.{getattr(called, 'id', '')}"]
        below = [self._asked(*(absolute(module, each) or "").rpartition(".")) for each in places]
        return None if None in below else frozenset().union(*filter(None, below))

    def _asked(self, place: str, _: str, name: str) -> frozenset[Name] | None:
        """Return the names whose objects a function asks for values; None if it may change others.

        It changes its own variables, makes values by libraries, classes and functions, and declares
        something, which `_DECLARES` stands for.
        """
        module = self._finder.find(place) if place else None
        if module is None or module.kind != "own" or not module.is_source:
            return None
        known: dict[Name, frozenset[Name] | None] = self._finder.asked
        if (place, name) not in known:
            known[place, name] = None  # in a circle
            units = self._finder.source(str(module.path)).binding(name)
            made = [unit.nodes[-1] for unit in units if name in unit.bound]
            asked = [self._asked_in(module, node) for node in made]
            if asked and None not in asked:
                known[place, name] = frozenset().union(*filter(None, asked))
        return known[place, name]

    def _asked_in(self, module: Module, made: ast.AST) -> frozenset[Name] | None:
        if isinstance(made, ast.ClassDef):
            return frozenset()
        if not isinstance(made, ast.FunctionDef) or made.decorator_list:
            return None
        nodes = [*top_nodes(made.body)]
        if any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in nodes):
            return None
        given = {each.arg for each in ast.walk(made.args) if isinstance(each, ast.arg)}
        own = given.union(*map(bound_by, nodes))
        asked = self._values(module, made.body, own)
        for act in (act for statement in made.body for act in acts(statement)):
            names = self._asked_by_act(module, act, given, own)
            if names is None:
                return None
            asked |= names
        return frozenset(asked)

    def _values(
        self, module: Module, nodes: Iterable[ast.AST], own: Set[str] = frozenset()
    ) -> set[Name]:
        """Return the names of objects that nodes name, but constants, functions and classes.

        Arguments of calls of other functions than the user's are left out.
        """
        names, waiting = set[Name](), list(nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Call) and self._asked_by(module, node.func) is None:
                waiting.append(node.func)
                continue
            waiting += ast.iter_child_nodes(node)
            for path in paths(node) if isinstance(node, (ast.Name, ast.Attribute)) else ():
                if isinstance(path, Imported):
                    place, _, name = (absolute(module, path) or "").rpartition(".")
                    names.add((place, name))
                elif isinstance(node, ast.Name) and path not in own:
                    names.add((module.name, path))
        return {each for each in names if self._is_value(*each)}

    def _is_value(self, place: str, name: str) -> bool:
        module = self._finder.find(place) if place else None
        if module is None or module.kind != "own" or not module.is_source:
            return False
        units = self._finder.source(str(module.path)).binding(name)
        return any(
            not (unit.is_import or isinstance(unit.nodes[-1], Definition))
            and not isinstance(getattr(unit.nodes[-1], "value", None), _TEXTS)
            for unit in units
        )

    def _asked_by_act(
        self, module: Module, act: Act, given: Set[str], own: Set[str]
    ) -> Set[Name] | None:
        """Return what an act of a function with some parameters and variables asks."""
        root, is_value = ast_digest.root(act.target), act.kind == "call"
        if not isinstance(root, ast.Name):
            return set() if is_value or isinstance(root, _TEXTS) else None
        known, source = (
            _MADE_BY.get(act.kind, _INERT) | _QUIET,
            self._finder.source(str(module.path)),
        )
        used = [p for p in paths(act.target) if isinstance(p, Imported)]
        used = used or [p for p in paths(root) if isinstance(p, Imported)]
        if used and all(_is_among(path, known) for path in used):
            return {_DECLARES} if any(_is_among(path, _DECLARING) for path in used) else set()
        if not used and root.id in own:
            is_set = isinstance(act.target, ast.Attribute) or root.id in given
            return None if act.kind == "store" and is_set else set()
        if not used and root.id not in source.bound:
            return set() if root.id in _QUIET and not source.stars else None
        if not isinstance(act.node, ast.Call):
            return None
        asked = self._asked_by(module, act.node.func)
        if asked is not None:
            return asked if asked or is_value else None
        if used or act.target is root or not (is_value or self._is_declared(module, root)):
            return None
        return {(module.name, root.id)}


def _calls(call: ast.Call, root: ast.Name) -> bool:
    """Return whether a call is of a name, or of an attribute of an imported one."""
    is_imported = any(isinstance(path, Imported) for path in paths(root))
    return call.func is root or (is_imported and chain(call.func)[0] is root)


def _assigned(unit: SymbolSource) -> Sequence[ast.expr | None]:
    """Return the expressions that an assignment assigns, but constants; else None."""
    node = unit.nodes[-1]
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    elements: Sequence[ast.expr | None] = getattr(value, "elts", [value])
    return [each for each in elements if not isinstance(each, ast.Constant)] or [None]
