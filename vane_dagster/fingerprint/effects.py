"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, is decorated, derives a class from
one whose code runs then, or imports under a condition. Imports, definitions and constants do
nothing, nor do declarations of dagster and vane_dagster, command lines, tests, logging and
warnings. A statement that does something counts if it names, directly or through others, what the
stage uses, or a library. A call whose result is assigned may name some libraries without counting:
those whose calls only make values. Nothing is run. A call of the user's function names all that
the function does, unless the function only declares, as one that makes a pipeline and returns it.
"""

from __future__ import annotations

import ast
import builtins
import itertools
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
    "abc", "dataclasses", "datetime", "decimal.Decimal", "functools", "hashlib", "itertools",
    "json", "math", "max", "min", "pydantic", "pydantic_settings", "re", "sorted", "string",
    "textwrap", "time", "tomllib", "typing", "typing_extensions", "uuid", "yaml.safe_load",
    "zoneinfo", "os.environ.get", "os.getenv", "os.getcwd", "os.cpu_count", "os.fspath",
    "os.path", "jax.jit", "numba.jit", "numba.njit", "ray.remote", "tenacity.retry",
    "tensorflow.function", "torch.compile", "torch.device", "torch.inference_mode",
    "torch.no_grad", "triton.jit",
}  # fmt: skip
"""Libraries and functions that the user's code may use when an import runs it."""
_VALUES = _PURE | {
    "__future__", "argparse", "attr", "attrs", "collections", "contextlib", "copy", "enum",
    "fractions", "threading", "torch.cuda.device_count", "torch.cuda.is_available", "types",
}  # fmt: skip
"""Libraries whose results are all that a call or decorator leaves behind."""
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
"""The same, except for their decorators, which register."""
_QUIET = frozenset({
    "abs", "all", "any", "bool", "classmethod", "dict", "enumerate", "float", "frozenset",
    "hasattr", "int", "isinstance", "len", "list", "print", "property", "range", "repr",
    "reversed", "round", "set", "staticmethod", "str", "sum", "tuple", "zip",
    "functools.partial", "os.environ.get", "os.getenv", "os.makedirs", "os.mkdir",
    "os.path.abspath", "os.path.basename", "os.path.dirname", "os.path.exists",
    "os.path.expanduser", "os.path.join", "shutil.rmtree",
    *(name for name, each in vars(builtins).items() if isinstance(each, type(Exception))
      and issubclass(each, BaseException)),
})  # fmt: skip
"""Functions that neither call nor change their arguments. Creating a folder changes no code."""
_TEXTS = (ast.Constant, ast.JoinedStr)
"""Values that nothing can change."""
_RECORDS = frozenset({"dataclasses.dataclass", "vane_dagster.checks"})
"""Decorators and bases of records and checks; they run no code of a class for an instance."""
_CONSTRUCTING = frozenset({
    "__init__", "__new__", "__post_init__", "__setattr__", "model_post_init", "__init_subclass__",
})  # fmt: skip
"""Methods that run when an instance is made."""
_REBINDING = (
    ast.Global, ast.Nonlocal, ast.NamedExpr, ast.Import, ast.ImportFrom, ast.ExceptHandler,
    ast.match_case, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""What binds names of a function, or of its module, beside assignments and loops; or yields."""
Assigned = dict[str, list[ast.expr | None]]
"""The expressions that are assigned to the variables of a function; None for any other value."""
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
) -> tuple[list[Executed], Set[str]]:
    """Return the top-level statements that imports execute, in their order, and the modules.

    The statements are of the user's modules. One whose first import may not be executed is there
    again with the first that is. `later` are modules that functions import; they follow, with the
    imports inside functions. None leaves out both.
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
    return statements, known.keys()


def modules_run(finder: Finder, names: Iterable[str]) -> tuple[str, ...]:
    """Return the own modules that importing some modules can run, which workers need.

    If a module imports a name that is known only at run time, its whole package is included.
    """
    modules, size = {*names}, -1
    while size != len(modules):
        size = len(modules)
        statements, imported = executed(finder, sorted(modules), ())
        dynamic = {each.module.label for each in statements if each.unit.scan.dynamic}
        modules.update(imported, *(finder.below(name.partition(".")[0]) for name in dynamic))
    located = map(finder.find, modules)
    return tuple(sorted(each.name for each in located if each and each.kind == "own"))


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
        self._declaring: dict[int, bool] = {}  # functions

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
        made = act.node if isinstance(act.node, ast.Call) else act.target
        if act.kind != "base" and isinstance(root, ast.Name) and self._is_declared(module, made):
            is_direct = any(isinstance(path, Imported) for path in paths(root))
            return is_direct or not self._is_used((module.name, root.id))
        return self._makes_new(module, act)

    def _is_declared(
        self, module: Module, value: ast.AST | None, local: Assigned | None = None
    ) -> bool:
        """Return whether a value is made by libraries whose declarations change nothing.

        `local` are the variables of the function that makes it.
        """
        root = ast_digest.root(value) if value is not None else None
        if value is None or not isinstance(root, ast.Name):
            return False
        if local and root.id in local:
            others = {name: made for name, made in local.items() if name != root.id}
            others[root.id] = [None]  # in a circle
            return all(self._is_declared(module, each, others) for each in local[root.id])
        begun = paths(root)
        is_imported = any(isinstance(path, Imported) for path in begun)
        if is_imported and all(
            isinstance(path, Imported) and _is_among(path, _INERT) for path in begun
        ):
            return True
        calls = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
        called = [f for f in calls if (chain(f)[0] if is_imported else f) is root]
        if is_imported or called:
            return bool(called) and all(self._only_declares(module, each) for each in called)
        return self._is_declared_name(module, root.id)

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

    def _only_declares(self, module: Module, called: ast.AST) -> bool:
        """Return whether a user's function only makes and returns what it declares."""
        place, nodes = self._own(module, called)
        for node in nodes:
            if id(node) not in self._declaring:
                self._declaring[id(node)] = False  # in a circle
                self._declaring[id(node)] = self._all_is_declared(place, node)
        return bool(nodes) and all(self._declaring[id(node)] for node in nodes)

    def _all_is_declared(self, module: Module, function: ast.AST) -> bool:
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return False
        nodes = [*top_nodes(function.body)]
        if any(isinstance(node, _REBINDING) for node in nodes):
            return False
        local = Assigned()
        for node in (*ast.walk(function.args), *nodes):
            for name in bound_by(node):
                local.setdefault(name, []).append(None)
        for node in nodes:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if value is not None and isinstance(target, ast.Name):
                    local[target.id].remove(None)
                    local[target.id].append(value)
        for act in (act for statement in function.body for act in acts(statement)):
            is_local = getattr(ast_digest.root(act.target), "id", "") in local
            made = act.node if isinstance(act.node, ast.Call) else act.target
            is_declared = act.kind != "base" and self._is_declared(module, made, local)
            if not is_declared and (is_local or not self._makes_new(module, act)):
                return False
        returned = (node.value for node in nodes if isinstance(node, ast.Return))
        values = itertools.chain(*(getattr(each, "elts", [each]) for each in returned if each))
        return all(
            isinstance(v, ast.Constant) or self._is_declared(module, v, local) for v in values
        )

    def _own(self, module: Module, called: ast.AST) -> tuple[Module, Sequence[ast.AST]]:
        """Return the module of a user's function or class that is called, and its definitions."""
        place: Module | None = module
        path, *others = paths(called) or ["?"]
        if isinstance(path, Imported):
            package, _, path = (absolute(module, path) or "").rpartition(".")
            place = self._finder.find(package) if package else None
        if others or "." in path or place is None or place.kind != "own" or not place.is_source:
            return module, ()
        units = self._finder.source(str(place.path)).binding(path)
        return place, [unit.nodes[-1] for unit in units]

    def _makes_new(self, module: Module, act: Act) -> bool:
        """Return whether an act leaves nothing behind but its value.

        It calls a quiet function, a method of a text, or a class that constructs nothing.
        """
        root = ast_digest.root(act.target)
        if act.kind == "base" or not isinstance(root, ast.Name):
            return isinstance(root, _TEXTS)
        source = self._finder.source(str(module.path))
        called = paths(act.target)
        is_imported = all(isinstance(path, Imported) for path in paths(root))
        is_library = is_imported or not (root.id in source.bound or source.stars)
        if called and called <= _QUIET and is_library:
            return act.kind != "decorator" or not is_imported
        classes = self._own(module, act.target)[1] if act.kind == "call" else ()
        return bool(classes) and all(map(_runs_nothing, classes))


def _runs_nothing(node: ast.AST) -> bool:
    """Return whether a node is a class under `vd.cls`, a record or a check without constructor."""
    if not isinstance(node, ast.ClassDef) or node.keywords:
        return False
    if is_lazy(node):
        return not node.decorator_list
    around = [paths(getattr(each, "func", each)) for each in (*node.bases, *node.decorator_list)]
    known = (isinstance(p, Imported) and _is_among(p, _RECORDS) for p in itertools.chain(*around))
    return all(around) and all(known) and all(map(_is_plain_member, node.body))


def _is_plain_member(node: ast.stmt) -> bool:
    """Return whether a member of a class is a plain method or a constant."""
    if isinstance(node, ast.FunctionDef):
        return not node.decorator_list and node.name not in _CONSTRUCTING
    value = getattr(node, "value", None)
    return isinstance(node, (ast.AnnAssign, ast.Assign, ast.Expr, ast.Pass)) and (
        value is None or isinstance(value, _TEXTS)
    )


def _assigned(unit: SymbolSource) -> Sequence[ast.expr | None]:
    """Return the expressions that an assignment assigns, but constants; else None."""
    node = unit.nodes[-1]
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    elements: Sequence[ast.expr | None] = getattr(value, "elts", [value])
    return [each for each in elements if not isinstance(each, ast.Constant)] or [None]
