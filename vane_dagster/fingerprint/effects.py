"""Top-level statements of imported files that do something to what a stage uses or to a library.

A statement does something if it calls, stores into an object, is decorated, derives a class from
one whose code runs then, or imports under a condition. Imports, definitions and constants do
nothing, nor do declarations of dagster and vane_dagster, calls of functions that only make these
and new values, command lines, tests, logging and warnings. A statement that does something counts
if it names, directly or through others, what the stage uses, or a library. A call whose result is
assigned may name some libraries without counting: those whose calls only make values. Nothing is
run, and nothing is known of what other calls do.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.acts import Act, acts
from vane_dagster.fingerprint.code_strings import Definition, Imported, chain, paths, top_nodes
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, Module, absolute
from vane_dagster.fingerprint.symbols import SymbolSource

EVERY = "*"
"""Stands for all names of a module."""
_INERT = frozenset({
    "click", "dagster", "logging", "pathlib", "pytest", "typer", "vane_dagster", "warnings",
})  # fmt: skip
"""Libraries whose declarations and settings change no result."""
_PARSERS = frozenset({
    "datetime", "decimal.Decimal", "hashlib", "json", "math", "max", "min", "re", "sorted",
    "string", "textwrap", "time", "tomllib", "uuid", "yaml.safe_load", "zoneinfo",
})  # fmt: skip
"""Libraries and functions that return new values, and change nothing without a callback."""
_CALLBACKS = frozenset({
    None, "cls", "default", "key", "object_hook", "object_pairs_hook", "parse_constant",
    "parse_float", "parse_int", "repl",
})  # fmt: skip
"""The keyword arguments that may be callbacks; None stands for ``**kwargs``."""
_REPLACING = frozenset({"sub", "subn"})
"""Functions and methods of `re` whose replacement is a text or a callback."""
_PURE = _INERT | _PARSERS | {
    "abc", "dataclasses", "functools", "itertools", "pydantic", "pydantic_settings", "typing",
    "typing_extensions", "os.environ.get", "os.getenv", "os.getcwd", "os.cpu_count", "os.fspath",
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
_DISPLAYS = (*_TEXTS, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
"""These, and containers that belong to the variable that they are assigned to."""
_DECLARING = frozenset({"dagster", "vane_dagster"})
"""Libraries whose base classes run no code of a subclass when an instance is made."""
_RECORDS = _DECLARING | {"dataclasses", "typing", "typing_extensions"}
"""Libraries whose decorators of classes run no code of the class when an instance is made."""
_HINTS = frozenset({"typing", "typing_extensions"})
_CONSTRUCTING = frozenset({
    "__init__", "__new__", "__post_init__", "__setattr__", "model_post_init", "__init_subclass__",
})  # fmt: skip
"""Methods that run when an instance is made."""
_IsDeclared = Callable[[ast.AST | None], bool]

_REBINDING = (
    ast.Global, ast.Nonlocal, ast.NamedExpr, ast.Import, ast.ImportFrom, ast.ExceptHandler,
    ast.match_case, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""What binds names of a function, or of its module, beside assignments and loops; or yields."""

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
        self._calls: dict[Any, tuple[bool, bool]] = {}

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
        root = _begin(act.target)
        made = act.node if isinstance(act.node, ast.Call) else act.target
        if act.kind != "base" and isinstance(root, ast.Name) and self._is_declared(module, made):
            is_direct = any(isinstance(path, Imported) for path in paths(root))
            return is_direct or not self._is_used((module.name, root.id))
        return self._makes_new(module, act)

    def _is_declared(self, module: Module, value: ast.AST | None) -> bool:
        """Return whether a value is made by libraries whose declarations change nothing."""
        root = _begin(value) if value is not None else None
        if not isinstance(root, ast.Name):
            return False
        is_made = self._is_made(module, value, root, lambda v: self._is_declared(module, v))
        return self._is_declared_name(module, root.id) if is_made is None else is_made

    def _is_made(
        self, module: Module, value: ast.AST | None, root: ast.Name, is_declared: _IsDeclared
    ) -> bool | None:
        """Return whether a value is made by such a library, or by a function that only declares.

        None if its name is one of the module, and not called.
        """
        imported = {path for path in paths(root) if isinstance(path, Imported)}
        if imported and all(_is_among(path, _INERT) for path in paths(root)):
            return imported == paths(root)
        nodes = ast.walk(value) if value is not None else ()
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        calls = [c for c in calls if (chain(c.func)[0] if imported else c.func) is root]
        if not calls:
            return False if imported else None
        return all(self._called(module, call, is_declared)[1] for call in calls)

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

    def _called(
        self, module: Module, call: ast.Call, is_declared: _IsDeclared
    ) -> tuple[bool, bool]:
        """Return whether a function changes only what it declares or is given of that.

        And whether it returns only that, too.
        """
        place, nodes = self._own(module, call.func)
        names = [*range(len(call.args)), *(each.arg for each in call.keywords)]
        values = [*call.args, *(each.value for each in call.keywords)]
        is_exact = not any(isinstance(each, ast.Starred) for each in call.args)
        given = frozenset(n for n, v in zip(names, values) if is_exact and is_declared(v))
        key = (tuple(map(id, nodes)), given)
        if key not in self._calls:
            self._calls[key] = False, False  # in a circle
            if nodes and all(isinstance(node, ast.FunctionDef) for node in nodes):
                each = [self._effects_of(place, node, given) for node in nodes]
                self._calls[key] = all(one for one, _ in each), all(both for _, both in each)
        return self._calls[key]

    def _effects_of(
        self, module: Module, function: ast.AST, declared: Set[int | str | None]
    ) -> tuple[bool, bool]:
        """See `_called`; some of the function's arguments are declared."""
        assert isinstance(function, ast.FunctionDef)
        places = [*function.args.posonlyargs, *function.args.args]
        given = [each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)]
        made: dict[str, list[ast.expr | None]] = {name: [None] for name in given}
        made |= {
            each.arg: [] for i, each in enumerate(places) if not declared.isdisjoint((i, each.arg))
        }
        nodes = [*top_nodes(function.body)]
        for node in nodes:
            if isinstance(node, _REBINDING):
                return False, False
            if isinstance(node, Definition):
                made.setdefault(node.name, []).append(None)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                made.setdefault(node.id, []).append(None)
        for node in nodes:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if value is not None and isinstance(target, ast.Name):
                    made[target.id].remove(None)
                    made[target.id].append(value)

        declared = set[str]()  # of the variables

        def is_declared(value: ast.AST | None) -> bool:
            root = _begin(value) if value is not None else None
            if not isinstance(root, ast.Name):
                return False
            if root.id in made:
                return root.id in declared
            return bool(self._is_made(module, value, root, is_declared))

        size = -1
        while size != len(declared):
            size = len(declared)
            declared.update(n for n in reversed(made) if all(map(is_declared, made[n])))

        augmented = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}

        def is_inert(act: Act) -> bool:
            root = _begin(act.target)
            if getattr(root, "id", "") not in made and self._makes_new(module, act):
                return True
            if act.kind in ("base", "decorator") or not isinstance(root, ast.Name):
                return False
            if (
                isinstance(act.node, ast.Call)
                and root.id not in made
                and self._called(module, act.node, is_declared)[0]
            ):
                return True
            # A method of a list, for example, or an item of a dict.
            kind = ast.Subscript if act.kind == "store" else ast.Attribute
            displays = made.get(root.id, ()) if getattr(act.target, "value", None) is root else ()
            is_own = bool(displays) and all(isinstance(each, _DISPLAYS) for each in displays)
            if is_own and isinstance(act.target, kind) and not _has_callback(act):
                return id(act.node) not in augmented
            return is_declared(act.node if isinstance(act.node, ast.Call) else root)

        done = [act for statement in function.body for act in acts(statement)]
        if function.decorator_list or not all(map(is_inert, done)):
            return False, False
        values = [node.value for node in nodes if isinstance(node, ast.Return)]
        returned = itertools.chain(*(_elements(value) for value in values if value))
        return True, all(isinstance(v, ast.Constant) or is_declared(v) for v in returned)

    def _makes_new(self, module: Module, act: Act) -> bool:
        """Return whether an act leaves nothing behind but its value.

        The rule: it calls what neither calls nor changes its arguments (a quiet function, a method
        of a text or logger, a class that runs no code when an instance is made), or a library that
        returns new values, without a callback.
        """
        root = ast_digest.root(act.target)
        if act.kind == "base" or not isinstance(root, ast.Name):
            return isinstance(root, _TEXTS)
        source = self._finder.source(str(module.path))
        called, begun = paths(act.target), paths(root)
        is_imported = all(isinstance(path, Imported) for path in begun)
        is_library = is_imported or not (root.id in source.bound or source.stars)
        if called and called <= _QUIET and is_library:
            return act.kind != "decorator" or not is_imported
        if act.kind not in ("call", "bare call"):
            return False
        values = [getattr(unit.nodes[-1], "value", None) for unit in source.binding(root.id)]
        is_set = root.id in source.set_by_functions
        if values and not is_set and all(_is_text(v) or _is_logger(v) for v in values):
            return True
        if act.kind == "bare call":
            return False
        classes = self._own(module, act.target)[1]
        if classes and all(map(_runs_nothing, classes)):
            return True
        whole = called if called and all(isinstance(p, Imported) for p in called) else begun
        is_parser = is_library and all(_is_among(path, _PARSERS) for path in whole)
        return is_parser and not _has_callback(act)


def _begin(node: ast.AST) -> ast.AST:
    """Return what an expression begins with, also of a path: ``A`` for ``(A / "b").parent``."""
    root = ast_digest.root(node)
    while isinstance(root, ast.BinOp) and isinstance(root.op, ast.Div):
        root = ast_digest.root(root.left)
    return root


def _has_callback(act: Act) -> bool:
    """Return whether a call gets a function that it may call."""
    given = {each.arg for each in getattr(act.node, "keywords", ())}
    called = {getattr(act.target, "attr", ""), *(p.rpartition(".")[2] for p in paths(act.target))}
    is_text = all(isinstance(each, _TEXTS) for each in getattr(act.node, "args", [])[:-1])
    return not given.isdisjoint(_CALLBACKS) or not (called.isdisjoint(_REPLACING) or is_text)


def _is_text(value: ast.AST | None) -> bool:
    return isinstance(value, _TEXTS) and getattr(value, "value", "") is not None


def _is_logger(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Call) and paths(value.func) == {"logging.getLogger"}


def _runs_nothing(node: ast.AST) -> bool:
    """Return whether a node is a class, such as a user's check, without code for new instances."""
    if not isinstance(node, ast.ClassDef) or node.keywords:
        return False
    if is_lazy(node):
        return not node.decorator_list
    hints = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
    return (
        _are_from(node.bases, _DECLARING)
        and _are_from(node.decorator_list, _RECORDS)
        and (not node.bases or all(map(_is_plain_hint, hints)))
        and all(map(_is_plain_member, node.body))
    )


def _are_from(nodes: Iterable[ast.AST], libraries: Set[str]) -> bool:
    """Return whether nodes name what libraries have."""
    named = [paths(getattr(each, "func", each)) for each in nodes]
    known = (
        isinstance(path, Imported) and _is_among(path, libraries)
        for path in itertools.chain(*named)
    )
    return all(named) and all(known)


def _is_plain_hint(hint: ast.AST) -> bool:
    """Return whether a hint names only builtins, so no validators."""
    return all(
        path.partition(".")[0] in _HINTS or hasattr(builtins, path)
        for node in ast.walk(hint)
        if isinstance(node, (ast.Name, ast.Attribute))
        for path in paths(node)
    )


def _is_plain_member(node: ast.stmt) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        is_plain = all(paths(each) and paths(each) <= _QUIET for each in node.decorator_list)
        return is_plain and node.name not in _CONSTRUCTING
    value = getattr(node, "value", None)
    return isinstance(node, (ast.AnnAssign, ast.Assign, ast.Expr, ast.Pass)) and (
        value is None or isinstance(value, _DISPLAYS)
    )


def _elements(value: ast.expr) -> Sequence[ast.expr]:
    """Return the elements of a tuple, list or dict; else the value itself."""
    return getattr(value, "elts", None) or getattr(value, "values", None) or [value]


def _assigned(unit: SymbolSource) -> Sequence[ast.expr | None]:
    """Return the expressions that an assignment assigns, but constants; else None."""
    node = unit.nodes[-1]
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    elements: Sequence[ast.expr | None] = getattr(value, "elts", [value])
    return [each for each in elements if not isinstance(each, ast.Constant)] or [None]
