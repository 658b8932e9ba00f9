"""The dependencies of a model's constructor, so that editing its calls can keep the weights.

A worker constructs a model once. If an edit changes only the code of its calls, an instance of the
new class may share the constructed state (`worker.model_versions`). The results equal those of a
new construction if these conditions hold for every version that shares the state:

- The constructor reaches the same code; this identity is its digest. Objects of the user's classes
  and the user's functions in the state therefore run the same code in both versions.
- Calls have no lasting effects: see `side_effects`.
- The constructor creates nothing outside the state that calls read: no class or mutable
  module-level object is reached by both, and neither writes to modules.

If the source does not prove one of these, the identity covers all of the code, and each edit
reloads the model. A function keeps no state but modules, and follows the same rules.
"""

from __future__ import annotations

import abc
import ast
import copy
import logging
import pathlib
import re
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.ast_digest import Scan
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine, file_digest
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.fingerprint.side_effects import (
    CONSTRUCTORS,
    FUNCTIONS,
    Effects,
    Escapes,
    Function,
    ModuleNames,
    parameters,
)
from vane_dagster.fingerprint.symbols import SymbolSource

_STARTS = ("__init__", "__post_init__")
_DUNDERS = {*_STARTS, "__call__", "__repr__", "__str__", "__len__", "__doc__", "__annotations__"}
_PLAIN_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
_LOOKS_AROUND = {"locals", "vars", "globals", "eval", "exec", "dir", "__class__"}
_FIXED = (str, bytes, int, float, complex, bool, type(None), re.Pattern, logging.Logger,
          pathlib.PurePath)  # fmt: skip
_STANDARD = {"builtins", "re", "logging", "pathlib", "pathlib._local"}
_UNKNOWN = object()
_UNPICKLES = {"pickle", "cloudpickle", "dill", "joblib"}
_FINDS_CODE = {
    "__subclasses__", "__globals__", "f_globals", "f_locals", "_getframe", "currentframe",
    "get_objects", "get_referrers", "resolve_name", "read_pickle", "import_module", "setattr",
    "delattr", "__dict__", "sys.modules",
}  # fmt: skip
_FIXED_NAMES = {("torch", "device"), ("torch", "dtype"), ("numpy", "dtype")}


@dataclass(frozen=True)
class ConstructorIdentity:
    """The identity of a model's workers.

    Attributes:
        digest: Versions of the code with the same digest share their workers.
        shares_state: Whether such versions may differ in the code that calls run.
        reason: Why the digest covers all of the code; empty if it does not.
    """

    digest: str
    shares_state: bool
    reason: str = ""


class _InseparableError(Exception):
    """The source does not prove that calls are independent of construction."""


def constructor_identity(
    target: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    method: str = "__call__",
    version: str | None = None,
    files: LocalFiles | None = None,
) -> ConstructorIdentity:
    """Compute the identity of the workers of a function or class.

    Args:
        target: The function or class.
        arguments: The arguments of its constructor or calls.
        method: The method of the class that calls use. Identities of a class that differ in it
            share their workers, unless the constructor runs the method too and the method keeps
            something.
        version: See `code_identity`. It replaces the code in keys, but not here: workers with other
            code are not used, regardless of its version.
        files: Reads the files that defaults name.

    Raises:
        CodeIdentityError: The code has no stable identity.
    """
    try:
        separated = _Separation(target, arguments, method, files).digest()
        effects = code_identity(target, files=files).effects
        return ConstructorIdentity(combine("constructor", separated, effects), True)
    except _InseparableError as refused:
        reason = str(refused)
    except CodeIdentityError as error:
        reason = str(error)
    found = code_identity(target, version=version, files=files)
    if version is None:
        return ConstructorIdentity(combine("whole", found.digest), False, reason)
    finder = Finder()
    modules = [finder.find(name) for name in found.modules]
    texts = [file_digest(module.path) for module in modules if module and module.path]
    return ConstructorIdentity(combine("files", found.digest, *texts), False, reason)


@dataclass(frozen=True)
class _ScopedDefinition:
    """A function or class definition, and the names of its module."""

    names: ModuleNames
    node: Any


_Looked = tuple[_ScopedDefinition, Collection[str], Collection[str]]
"""A function, its parameters that hold state, and the methods that it may call on them."""


@dataclass
class _ReachedCode:
    """Code reached from other code: single names of its own file, and other modules whole."""

    names: dict[str, list[SymbolSource]] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)


class _Separation:
    """One attempt to separate the calls of a function or class from its construction."""

    def __init__(
        self,
        target: Callable[..., Any],
        arguments: Sequence[Any],
        method: str,
        files: LocalFiles | None,
    ) -> None:
        if not isinstance(target, (type, types.FunctionType)):
            raise _InseparableError(f"it is a {type(target).__name__}")
        self._target = target
        self._method = method
        self._files = files
        self._finder = Finder()
        self._by_module: dict[str, ModuleNames] = {}
        module = self._finder.find(target.__module__ or "__main__")
        if module is None or module.kind != "own" or not module.is_source or module.is_main:
            raise _InseparableError("its code is not in a module of the user's")
        if getattr(sys.modules.get(module.name), target.__qualname__, None) is not target:
            raise _InseparableError("it is not at the top level of its module")
        self._module = module
        self._names = self._names_of(module)
        for argument in arguments:
            if found := self._own_code_in(argument):
                raise _InseparableError(f"it is given {found}")

    def digest(self) -> str:
        """Hash the code that construction reaches.

        Raises:
            _InseparableError: Calls cannot be separated from it.
        """
        name = f"{self._module.label}.{self._target.__qualname__}"
        if isinstance(self._target, type):
            return combine("class", name, *self._defaults(), *self._class_parts(self._target))
        parts = self._function_parts(self._target.__name__)
        return combine("function", name, *self._defaults(), *parts)

    def _defaults(self) -> Iterator[str]:
        """Hash the values of defaults: the state keeps the content of files that they name."""
        kinds = self._target.__mro__ if isinstance(self._target, type) else ()
        members = [member for kind in kinds for member in vars(kind).values()] or [self._target]
        for member in members:
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                where = f"the defaults of {function.__qualname__}"
                for given in filter(None, (function.__defaults__, function.__kwdefaults__)):
                    yield value_digest(given, where, self._files)

    def _function_parts(self, name: str) -> list[str]:
        called = self._reached([self._definition(self._names, name)], {name})
        self._check_calls([], called, ())
        return [self._constructed([])]

    def _class_parts(self, cls: type) -> list[str]:
        chain = self._chain(cls)
        methods: dict[str, list[_ScopedDefinition]] = {}
        attributes: dict[str, list[ast.stmt]] = {}
        for each in chain:
            for name, member in _members(each.node):
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    methods.setdefault(name, []).append(_ScopedDefinition(each.names, member))
                else:
                    attributes.setdefault(name, []).append(member)
        made = _made_with(methods, attributes)
        constructs = [each for name in made for each in methods.get(name, ())]
        called_by_name = [name for name in methods if name not in made or name == self._method]
        calls = [each for name in called_by_name for each in methods[name]]
        later = [inner for each in constructs for inner in _inner_functions(each)]
        while more := [
            each
            for each in constructs
            if each not in calls and _is_mentioned(each.node, [*calls, *later])
        ]:
            calls += more
        own = [each.node for each in chain if each.names is self._names]
        kept = [_reduced(node, made, {node.name for node in own}) for node in own]
        built = self._reached(kept, set())
        called = self._reached([e.node for e in calls if e.names is self._names], set())
        for each in chain:
            if each.names is not self._names:
                self._add_module(called, each.names.module)
        if cls.__name__ in built.names:
            raise _InseparableError("its construction names its own class")
        self._check_both(built, called, [each.node for each in chain])
        built_code, called_code = self._text_of(built, ()), self._text_of(called, ())
        self._check_functions([*constructs, *built_code], [*calls, *called_code])
        escapes = self._check_calls(calls, called, methods)
        self._check_found(constructs, built, chain)
        self._check_construction(constructs, built, called, escapes)
        bases = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__[1:-1]]
        return [*bases, ast_digest.tree_digest(kept), self._constructed(kept)]

    def _constructed(self, kept: Sequence[ast.stmt]) -> str:
        """Hash everything that some statements reach."""
        dependency_walk = DependencyWalk(self._finder, self._module)
        if kept:
            unit = SymbolSource(self._names.source.path, kept)
            dependency_walk.unit(self._module, unit, unit.names)
        return dependency_walk.digest()

    def _names_of(self, module: Module) -> ModuleNames:
        path = str(module.path)
        if path not in self._by_module:
            self._by_module[path] = ModuleNames(self._finder, module)
        return self._by_module[path]

    # Parts of a class

    def _chain(self, cls: type) -> list[_ScopedDefinition]:
        """Return the class and its user-defined bases, as defined in their files."""
        if type(cls) not in (type, abc.ABCMeta):
            raise _InseparableError(f"it has the metaclass {type(cls).__name__}")
        found = []
        for each in cls.__mro__:
            if each in _PLAIN_BASES:
                continue
            module = self._finder.find(each.__module__)
            if module is None or module.kind != "own" or not module.is_source:
                raise _InseparableError(
                    f"the constructor of {each.__qualname__} may call any method"
                )
            if getattr(sys.modules.get(module.name), each.__qualname__, None) is not each:
                raise _InseparableError(
                    f"{each.__qualname__} is not at the top level of its module"
                )
            names = self._names_of(module)
            node = self._definition(names, each.__qualname__)
            if not isinstance(node, ast.ClassDef) or node.keywords:
                raise _InseparableError(f"{each.__qualname__} has a metaclass or arguments")
            if not all(_is_dataclass(decorator) for decorator in node.decorator_list):
                raise _InseparableError(f"{each.__qualname__} is decorated")
            found.append(_ScopedDefinition(names, node))
        return found

    def _definition(self, names: ModuleNames, name: str) -> ast.stmt:
        units = names.source.units.get(name, [])
        if len(units) != 1 or not isinstance(units[0].nodes[-1], ast_digest.Definition):
            raise _InseparableError(f"{name} is defined or changed in several places")
        if len(units[0].nodes) > 1:
            raise _InseparableError(f"{name} is defined under a condition")
        return units[0].nodes[-1]

    def _own_code_in(self, value: Any, depth: int = 0) -> str | None:
        """Return the name of user code that an argument may hold; None if it holds none."""
        if isinstance(value, (list, tuple, set, frozenset, dict)) and depth < 20:
            inner = [*value, *value.values()] if isinstance(value, dict) else list(value)
            if type(value).__module__ in ("builtins", "collections"):
                texts = (self._own_code_in(item, depth + 1) for item in inner)
                return next((text for text in texts if text), None)
        if isinstance(value, _FIXED) and type(value).__module__ in _STANDARD:
            return None
        code = value if isinstance(value, (type, types.FunctionType)) else type(value)
        module = self._finder.find(code.__module__ or "__main__")
        is_code = callable(value) and not isinstance(value, type)
        if module is not None and module.kind != "own" and not is_code:
            return None
        return f"{code.__module__}.{code.__qualname__}"

    # Reachability

    def _reached(self, nodes: Sequence[ast.stmt], besides: Collection[str]) -> _ReachedCode:
        """Collect the code reached from statements of the own file and from its names `besides`."""
        found = _ReachedCode()
        source = self._names.source
        waiting: deque[str] = deque(sorted(besides))
        if nodes:
            waiting += self._read_by(found, SymbolSource(source.path, nodes))
        while waiting:
            name = waiting.popleft()
            if name in found.names or (name not in source.units and not source.stars):
                continue
            found.names[name] = units = source.units.get(name) or source.stars
            for unit in units:
                waiting += self._read_by(found, unit)
        return found

    def _read_by(self, found: _ReachedCode, unit: SymbolSource) -> list[str]:
        """Add the modules that statements of the own file import; return the names they read."""
        if unit.reads.every:
            raise _InseparableError(
                f"line {unit.nodes[-1].lineno}: a name is looked up by its text"
            )
        names = sorted(unit.names | unit.reads.texts)
        return [*names, *self._follow(found, self._module, unit.scan, unit.names)]

    def _follow(
        self, found: _ReachedCode, module: Module, scan: Scan, names: Iterable[str]
    ) -> list[str]:
        """Add the modules that code imports; return the names of the own file among them."""
        if scan.dynamic:
            raise _InseparableError("it imports a module by a name that only a run knows")
        own: list[str] = []
        source = self._finder.source(str(module.path))
        refs = [*scan.imports, *(ref for name in names for ref in source.import_refs(name))]
        targets = [t for ref in refs for t in self._finder.targets(module, ref)]
        targets += self._finder.attribute_targets(module, scan, refs)
        for target in targets:
            reached = target.module
            if target.role != "whole" or reached is None or reached.path is None:
                continue
            if reached.path == self._module.path:
                own += [target.attribute] if target.attribute else sorted(self._names.source.units)
            else:
                self._add_module(found, reached)
        return own

    def _add_module(self, found: _ReachedCode, module: Module) -> None:
        if module.name in found.modules or module.path is None:
            return
        if not module.is_source:
            raise _InseparableError(f"the module {module.name} is no Python source")
        found.modules[module.name] = module
        whole = self._finder.source(module.path).whole
        own = self._follow(found, module, whole.scan, whole.names)
        if own:
            raise _InseparableError(f"the module {module.name} imports it")

    # Checks

    def _check_both(
        self, built: _ReachedCode, called: _ReachedCode, chain: Collection[ast.stmt]
    ) -> None:
        """Raise _InseparableError if shared code may be state, or a class with instances in it."""
        for name in built.names.keys() & called.names.keys():
            fixed = _is_fixed(getattr(sys.modules.get(self._module.name), name, _UNKNOWN))
            if not all(_is_stateless(unit.nodes[-1], chain, fixed) for unit in built.names[name]):
                raise _InseparableError(f"{name} is used by construction and by calls")
        for name in built.modules.keys() & called.modules.keys():
            module = built.modules[name]
            live = sys.modules.get(name)
            for node in self._finder.source(str(module.path)).tree.body:
                fixed = all(_is_fixed(getattr(live, each, _UNKNOWN)) for each in _assigned(node))
                if not _is_stateless(node, chain, fixed):
                    raise _InseparableError(
                        f"{name}, line {node.lineno}, is used by construction and by calls"
                    )

    def _check_functions(
        self, built: Sequence[_ScopedDefinition], called: Sequence[_ScopedDefinition]
    ) -> None:
        """Raise _InseparableError if calls may compare a function with another version's."""
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef)
        both = [each.node for each in built if isinstance(each.node, definitions)]
        own = {node.name for node in both if any(node is each.node for each in called)}
        kept, met = ({name for code in each for name in _values(code)} for each in (built, called))
        for name in sorted(own & kept & met):
            raise _InseparableError(f"{name} is passed on by construction and by calls")

    def _check_found(
        self,
        constructs: Sequence[_ScopedDefinition],
        built: _ReachedCode,
        chain: Sequence[_ScopedDefinition],
    ) -> None:
        """Raise _InseparableError if construction may hold user code that is not tracked.

        This includes its own bases, which have another version in calls, and code that it looks up
        at run time.
        """
        bases = {each.node.name for each in chain}
        nodes = [each.node for each in chain]
        for code in self._text_of(built, constructs):
            if isinstance(code.node, (ast.Import, ast.ImportFrom)) or code.node in nodes:
                continue
            for node in ast.walk(code.node):
                for name in _named(node, code.names):
                    if name in bases:
                        raise _InseparableError(
                            f"its construction names {name}, which calls are of"
                        )
                    if name in _UNPICKLES | _FINDS_CODE or _unpickles(node):
                        raise _InseparableError(f"its construction may reach any code by `{name}`")

    def _check_settings(self, runs: Sequence[_ScopedDefinition], called: _ReachedCode) -> None:
        """Raise _InseparableError if a later import would see settings made by construction."""
        functions = [each for each in runs if isinstance(each.node, FUNCTIONS)]
        settings = [
            (text, is_seed)
            for each in functions
            for text, is_seed in Effects(each.node, each.names, (), (), Escapes()).settings()
        ]
        for text, is_seed in settings:
            if is_seed:
                raise _InseparableError(f"construction, {text}")
            for code in self._text_of(called, ()):
                if not isinstance(code.node, ast_digest.Definition) and _is_computed(code):
                    raise _InseparableError(
                        f"{code.names.module.name}, line {code.node.lineno}, may be computed again "
                        f"after construction, {text}"
                    )

    def _check_construction(
        self,
        constructs: Sequence[_ScopedDefinition],
        built: _ReachedCode,
        called: _ReachedCode,
        escapes: Escapes,
    ) -> None:
        """Raise _InseparableError if construction writes to modules, or keeps code with effects."""
        runs = [*constructs, *self._code_of(built)]
        for each in runs:
            for node in ast.walk(each.node):
                if isinstance(node, ast.Name) and node.id in _LOOKS_AROUND:
                    raise _InseparableError(f"its construction uses {node.id}")
            if isinstance(each.node, FUNCTIONS):
                effects = Effects(each.node, each.names, (), (), Escapes())
                for text in (*effects.stores(), *effects.modules_passed()):
                    raise _InseparableError(f"construction, {text}")
        self._check_settings(runs, called)
        values = {name for code in self._text_of(built, constructs) for name in _values(code)}
        kept = [each for each in runs if isinstance(each.node, (ast.ClassDef, ast.Lambda))]
        kept += [each for each in runs if getattr(each.node, "name", "") in values]
        kept += [inner for each in runs for inner in _inner_functions(each)]
        self._check_kept(kept, escapes)

    def _check_kept(self, kept: Sequence[_ScopedDefinition], escapes: Escapes) -> None:
        """Raise _InseparableError if code that the state may hold has lasting effects.

        Such code keeps running in the modules of its own version, regardless of the version called.

        Args:
            kept: The code.
            escapes: Where calls pass state.
        """
        looked: dict[int, _Looked] = {}
        objects: dict[int, _Looked] = {}
        for each in [*kept, *self._code_of(self._kept_reach(kept))]:
            if not isinstance(each.node, ast.ClassDef):
                looked.setdefault(id(each.node), (each, (), ()))
                continue
            for function in _functions_in(each.node):
                if getattr(function, "name", "") not in CONSTRUCTORS:
                    objects[id(function)] = (
                        _ScopedDefinition(each.names, function),
                        _self(function),
                        (),
                    )
        for code, *_ in (*looked.values(), *objects.values()):
            for text in Effects(code.node, code.names, (), (), Escapes()).own_imports():
                raise _InseparableError(f"what construction may keep, {text}")
        # The callers of a function that was passed on, and their arguments, are not known.
        anyone = frozenset({""})
        _look(looked.values(), Escapes(passed=anyone, returned=True))
        passed = anyone if escapes.to_objects else escapes.passed
        if _look(objects.values(), Escapes(passed)).to_objects:
            _look(objects.values(), Escapes(anyone))

    def _kept_reach(self, kept: Sequence[_ScopedDefinition]) -> _ReachedCode:
        """Return everything reached from code that the state may hold."""
        own = [each.node for each in kept if each.names is self._names]
        nodes = [
            ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.Lambda) else node
            for node in own
        ]
        found = self._reached(nodes, set())
        for each in kept:
            if each.names is not self._names:
                self._add_module(found, each.names.module)
        return found

    def _text_of(
        self, reached: _ReachedCode, besides: Sequence[_ScopedDefinition]
    ) -> Iterator[_ScopedDefinition]:
        """Yield every reached statement, whether reached by name or as part of a module."""
        yield from besides
        for units in reached.names.values():
            for unit in units:
                yield from (_ScopedDefinition(self._names, node) for node in unit.nodes)
        for module in reached.modules.values():
            names = self._names_of(module)
            yield from (_ScopedDefinition(names, node) for node in names.source.tree.body)

    def _check_calls(
        self, calls: Sequence[_ScopedDefinition], called: _ReachedCode, methods: Collection[str]
    ) -> Escapes:
        """Raise _InseparableError if a call has lasting effects; return where it passes state."""
        looked: list[_Looked] = [(each, _self(each.node), methods) for each in calls]
        for each in self._code_of(called):
            if isinstance(each.node, ast.ClassDef):
                own = [
                    _ScopedDefinition(each.names, function) for function in _functions_in(each.node)
                ]
                looked += [(code, _class_only(code.node), ()) for code in own]
            else:
                looked.append((each, (), ()))
        return _look(looked, Escapes())

    def _code_of(self, reached: _ReachedCode) -> Iterator[_ScopedDefinition]:
        """Yield the reached functions and classes, including lambdas."""
        for units in reached.names.values():
            for unit in units:
                yield from _definitions(self._names, unit.nodes)
        for module in reached.modules.values():
            names = self._names_of(module)
            yield from _definitions(names, names.source.tree.body)


def _look(functions: Collection[_Looked], escapes: Escapes) -> Escapes:
    """Analyze functions repeatedly until the set of places where they pass state is stable.

    Raises:
        _InseparableError: A function may have lasting effects.
    """
    while True:
        before = replace(escapes)
        for code, shared, methods in functions:
            effects = Effects(code.node, code.names, shared, methods, escapes)
            for text in effects.found():
                raise _InseparableError(f"{code.names.module.name}, {text}")
            effects.note_returned()
        if escapes == before:
            return escapes


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the bindings of a class body, by name.

    Raises:
        _InseparableError: It holds more than methods and constants.
    """
    is_data = bool(node.decorator_list)
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = statement.name
            if name.startswith("__") and name.endswith("__") and name not in _DUNDERS:
                raise _InseparableError(f"{node.name} has {name}")
            yield name, statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            value = statement.value
            is_fixed = value is None or _is_literal(value) or (is_data and _is_field(value))
            targets = (
                [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
            )
            for target in targets:
                if not isinstance(target, ast.Name) or not is_fixed:
                    raise _InseparableError(f"{node.name}.{ast.unparse(target)} may be state")
                if target.id.startswith("__"):
                    raise _InseparableError(f"{node.name} has {target.id}")
                yield target.id, statement
        elif not isinstance(statement, ast.Pass) and not _is_text(statement):
            raise _InseparableError(f"{node.name} has statements in its body")


def _made_with(
    methods: Mapping[str, Sequence[_ScopedDefinition]], attributes: Mapping[str, Sequence[ast.stmt]]
) -> list[str]:
    """Return the methods and attributes that construction uses, starting at ``__init__``.

    Raises:
        _InseparableError: It passes its object, or one of its methods, to other code.
    """
    found: list[str] = []
    waiting = deque(name for name in _STARTS if name in methods)
    while waiting:
        name = waiting.popleft()
        if name in found or (name not in methods and name not in attributes):
            continue
        found.append(name)
        for each in methods.get(name, ()):
            waiting += _own_names(each.node, methods)
    return found


def _own_names(
    function: Function, methods: Mapping[str, Sequence[_ScopedDefinition]]
) -> Iterator[str]:
    """Yield the attributes of its own object that a method uses."""
    own = _self(function)
    bases: set[int] = set()
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute):
            continue
        value = node.value
        is_super = isinstance(value, ast.Call) and ast_digest.root_name(value.func) == "super"
        if not is_super and not (isinstance(value, ast.Name) and value.id in own):
            continue
        bases.add(id(value))
        name = node.attr
        if name.startswith("__") and name.endswith("__") and name not in _STARTS:
            raise _InseparableError(f"its construction uses {name}")
        is_method = any(not _is_property(each.node) for each in methods.get(name, ()))
        if is_method and isinstance(node.ctx, ast.Load) and id(node) not in called:
            raise _InseparableError(f"its construction passes its method {name} on")
        yield name
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in own and id(node) not in bases:
            raise _InseparableError(f"its construction passes {node.id!r} on")
        is_super = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"
        if isinstance(node, ast.Call) and is_super and (node.args or id(node) not in bases):
            raise _InseparableError("its construction passes its base on")


def _reduced(node: ast.ClassDef, made: Collection[str], own: Collection[str]) -> ast.ClassDef:
    """Copy a class with only the parts that construction uses, and without the bases in `own`."""
    is_data = bool(node.decorator_list)
    body: list[ast.stmt] = []
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            keep = statement.name in made
        else:
            targets = _assigned(statement)
            keep = is_data or any(name in made for name in targets)
        if keep:
            body.append(statement)
    bases = [base for base in node.bases if not (isinstance(base, ast.Name) and base.id in own)]
    # The copy keeps the hints and the docstring that `ast_digest.parse` has detached.
    reduced = copy.copy(node)
    reduced.bases = bases
    reduced.body = body or [ast.copy_location(ast.Pass(), node)]
    return reduced


def _self(function: Any) -> list[str]:
    """Return the parameter that holds a method's object or class, as a list; empty if static."""
    if isinstance(function, ast.Lambda):
        return []
    static = any(getattr(each, "id", "") == "staticmethod" for each in function.decorator_list)
    return [] if static else parameters(function)[:1]


def _class_only(function: Any) -> list[str]:
    """Return a class method's class parameter; class attributes outlast a call."""
    decorators = getattr(function, "decorator_list", ())
    is_class = any(getattr(each, "id", "") == "classmethod" for each in decorators)
    return parameters(function)[:1] if is_class else []


def _is_property(function: Any) -> bool:
    texts = [ast.unparse(each) for each in function.decorator_list]
    return any(text == "property" or text.endswith((".setter", ".deleter")) for text in texts)


def _is_mentioned(function: Any, calls: Sequence[_ScopedDefinition]) -> bool:
    """Return whether calls may run a method that construction uses."""
    for each in calls:
        own, bases = _self(each.node), set()
        for node in ast.walk(each.node):
            if isinstance(node, ast.Attribute):
                bases.add(id(node.value))
                if node.attr == function.name:
                    return True
            if isinstance(node, ast.Constant) and node.value == function.name:
                return True
        for node in ast.walk(each.node):
            if isinstance(node, ast.Name) and node.id in own and id(node) not in bases:
                return function.name not in _STARTS
    return False


def _definitions(names: ModuleNames, nodes: Sequence[ast.stmt]) -> Iterator[_ScopedDefinition]:
    stack: list[ast.AST] = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, (*ast_digest.Definition, ast.Lambda)):
            yield _ScopedDefinition(names, node)
        else:
            stack += ast.iter_child_nodes(node)


def _functions_in(node: ast.AST) -> Iterator[Function]:
    """Yield the functions directly inside a class, and inside its nested classes."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, FUNCTIONS):
            yield inner
        elif not isinstance(inner, ast.expr_context):
            yield from _functions_in(inner)


def _inner_functions(code: _ScopedDefinition) -> list[_ScopedDefinition]:
    """Return the functions nested in a function, which it may pass on."""
    if not isinstance(code.node, FUNCTIONS):
        return []
    inner = [node for node in ast.walk(code.node) if isinstance(node, FUNCTIONS)]
    return [_ScopedDefinition(code.names, node) for node in inner if node is not code.node]


def _values(code: _ScopedDefinition) -> Iterator[str]:
    """Yield the names of functions that code may refer to without calling them."""
    called = {id(node.func) for node in ast.walk(code.node) if isinstance(node, ast.Call)}
    for node in ast.walk(code.node):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in called:
            name = node.id if isinstance(node, ast.Name) else node.attr
            yield name
            for ref in code.names.source.import_refs(name):
                yield ref.name or name


def _named(node: ast.AST, names: ModuleNames) -> Iterator[str]:
    """Yield the names in a node: as written, and under their original names if imported."""
    if isinstance(node, ast.Attribute):
        yield from (node.attr, ast.unparse(node))
    elif isinstance(node, ast.Name):
        yield node.id
        for ref in names.source.import_refs(node.id):
            yield from (ref.module.partition(".")[0], ref.name or ref.refers)
    elif isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call):
        yield ast.unparse(node.func)


def _unpickles(node: ast.AST) -> bool:
    """Return whether a call may unpickle any class, as `torch.load` and `numpy.load` can."""
    unsafe = {"weights_only": False, "allow_pickle": True}
    return isinstance(node, ast.Call) and any(
        keyword.arg in unsafe
        and not (
            isinstance(keyword.value, ast.Constant)
            and keyword.value.value is not unsafe[keyword.arg]
        )
        for keyword in node.keywords
    )


def _is_computed(code: _ScopedDefinition) -> bool:
    """Return whether a module-level statement may depend on settings of a library it calls."""
    for node in ast.walk(code.node):
        root = ast_digest.root_name(node.func) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and root not in _STANDARD:
            if root is None or code.names.kind(root) != "builtin":
                return True
        elif isinstance(node, ast.Subscript):
            root = ast_digest.root_name(node)
            if root is not None and code.names.kind(root) == "library":
                return True
    return False


def _is_stateless(node: ast.stmt, chain: Collection[ast.stmt], fixed: bool) -> bool:
    """Return whether a module-level statement binds nothing mutable, and no class."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)) or _is_text(node):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        texts = [ast.unparse(each).lower() for each in node.decorator_list]
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        return not any("cache" in t or "memo" in t for t in texts) and all(
            _is_literal(each) or isinstance(each, (ast.Name, ast.Attribute)) for each in defaults
        )
    if isinstance(node, ast.ClassDef):
        return node in chain
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        value = node.value
        if "__all__" in _assigned(node) or value is None or _is_literal(value):
            return True
        return fixed and not isinstance(value, (ast.List, ast.Dict, ast.Set))
    if isinstance(node, (ast.If, ast.Try)):
        handlers = [each for handler in getattr(node, "handlers", ()) for each in handler.body]
        inner = [*node.body, *node.orelse, *getattr(node, "finalbody", ()), *handlers]
        return all(_is_stateless(each, chain, fixed) for each in inner)
    return False


def _is_fixed(value: Any) -> bool:
    """Return whether a value is immutable."""
    if isinstance(value, (tuple, frozenset)) and type(value).__module__ == "builtins":
        return all(_is_fixed(item) for item in value)
    kind = type(value)
    named = (kind.__module__, kind.__qualname__) in _FIXED_NAMES
    return named or (isinstance(value, _FIXED) and kind.__module__ in _STANDARD)


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression is a constant, or consists only of constants."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Tuple):
        return all(_is_literal(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp):
        return _is_literal(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_literal(node.left) and _is_literal(node.right)
    return False


def _is_field(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field"


def _is_dataclass(decorator: ast.expr) -> bool:
    call = decorator if isinstance(decorator, ast.Call) else None
    name = ast.unparse(call.func if call else decorator)
    plain = {"frozen", "eq", "order", "repr", "kw_only"}
    return name in ("dataclass", "dataclasses.dataclass") and all(
        keyword.arg in plain for keyword in (call.keywords if call else ())
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _assigned(node: ast.stmt) -> set[str]:
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
