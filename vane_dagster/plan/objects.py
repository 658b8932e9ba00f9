"""Digests of functions, classes and modules as objects, on top of what their files say."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.plan import syntax
from vane_dagster.plan.files import LocalFiles, UnboundedContentError
from vane_dagster.plan.hashing import combine
from vane_dagster.plan.library_names import library_name
from vane_dagster.plan.modules import Module, path_kind
from vane_dagster.plan.reach import Reach
from vane_dagster.plan.units import SourceFile, code_digest
from vane_dagster.plan.values import ValueEncoder

_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CLASS_DETAILS = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__",
    "__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
    "__slots__", "_abc_impl",
}  # fmt: skip


def unwrapped(obj: Any) -> Any:
    """Returns the function or class that partials and method descriptors stand around."""
    while isinstance(obj, (functools.partial, staticmethod, classmethod)):
        obj = obj.func if isinstance(obj, functools.partial) else obj.__func__
    return obj


class ObjectEncoder:
    """Hashes code objects; what they reach is collected in `reach`."""

    def __init__(self, reach: Reach, files: LocalFiles | None = None) -> None:
        self._reach = reach
        self._values = ValueEncoder(self._code, files)
        self._tokens: dict[int, str] = {}
        self._kept: list[Any] = []

    def digest(self, value: Any, path: str) -> str:
        """Hashes any value, code included."""
        return self._values.digest(value, path)

    def _code(self, obj: Any, path: str) -> str:
        if isinstance(obj, functools.partial):
            parts = (obj.func, list(obj.args), dict(obj.keywords))
            names = (".func", ".args", ".keywords")
            return combine("partial", *map(self.digest, parts, [path + name for name in names]))
        if isinstance(obj, (staticmethod, classmethod)):
            return combine(type(obj).__name__, self._code(obj.__func__, path))
        if isinstance(obj, types.MethodType):
            owner = self.digest(obj.__self__, f"{path}.__self__")
            return combine("method", owner, self._code(obj.__func__, path))
        if isinstance(obj, types.ModuleType):
            self._reach.module(obj.__name__)
            return combine("module", obj.__name__)
        if isinstance(obj, _BOUND) and not isinstance(obj.__self__, (types.ModuleType, type(None))):
            owner = self.digest(obj.__self__, f"{path}.__self__")
            return combine("bound", owner, obj.__name__)
        if id(obj) not in self._tokens:
            # A function can reach itself through its closure: then its name stands for it.
            self._tokens[id(obj)] = combine("again", getattr(obj, "__qualname__", ""))
            self._kept.append(obj)
            self._tokens[id(obj)] = self._fresh(obj, path)
        return self._tokens[id(obj)]

    def _fresh(self, obj: Any, path: str) -> str:
        if isinstance(obj, types.FunctionType):
            return self._function(obj, path)
        name = getattr(obj, "__module__", None) or "builtins"
        module = self._reach.finder.find(name)
        if module is None or module.kind != "own":
            return self._library(obj, name, module)
        if isinstance(obj, type):
            return self._class(obj, module, path)
        if module.is_source and _lookup(obj) is obj:
            return self._by_name(obj, module)
        if hasattr(obj, "__wrapped__"):
            inner = self.digest(obj.__wrapped__, f"{path}.__wrapped__")
            return combine("wrapped", type(obj).__qualname__, inner)
        raise CodeIdentityError(
            f"{path} is a {type(obj).__qualname__} whose code cannot be found. Define it at the "
            f"top level of a module, or give the stage `version=`."
        )

    def _library(self, obj: Any, name: str, module: Module | None) -> str:
        if module is None or module.kind == "installed":
            self._reach.package(name)
        return combine("library", *library_name(obj, name))

    def _by_name(self, obj: Any, module: Module) -> str:
        self._reach.name(module, obj.__qualname__.partition(".")[0])
        return combine("name", self._reach.label(module), obj.__qualname__)

    def _function(self, function: types.FunctionType, path: str) -> str:
        where = self._reach.finder.find(function.__module__ or "__main__")
        if where is not None and self._is_named(function, where):
            return self._with_defaults(function, self._by_name(function, where), path)
        name = function.__globals__.get("__name__", "__main__")
        module = self._reach.finder.find(name)
        file = function.__code__.co_filename
        captured = self._captured(function, path)
        if module is not None and module.kind != "own":
            return combine("function", self._library(function, name, module), *captured)
        if module is not None and module.is_source and path_kind(file) == "own":
            source = self._reach.finder.source(str(module.path))
            node = source.function_node(function.__code__)
            if node is not None:
                names = syntax.global_names(function.__code__)
                self._reach.modules.add(module.name)
                self._reach.names(module, names)
                self._reach.imports(module, syntax.scan([node]), names)
                return combine("function", syntax.tree_digest([node]), *captured)
        return combine("function", self._in_memory(function, module, path), *captured)

    def _is_named(self, function: types.FunctionType, module: Module) -> bool:
        """Says whether a file's module-level definition, as it is on disk, is this function."""
        if module.kind != "own" or not module.is_source or "<" in function.__qualname__:
            return False
        source = self._reach.finder.source(str(module.path))
        if module.name in ("__main__", "__mp_main__") and not source.holds(function.__code__):
            # Such a function travels by value: as it is in memory, not as in the file.
            return False
        if _lookup(function) is function:
            return function.__qualname__.partition(".")[0] in source.units
        defined = source.definition(function.__qualname__) is not None
        same_file = function.__code__.co_filename == module.path
        return defined and same_file and function.__code__.co_name == function.__name__

    def _with_defaults(self, function: types.FunctionType, token: str, path: str) -> str:
        """Adds the values of defaults where they have a digest; their text counts in any case."""
        parts = []
        for name, value in _defaults(function).items():
            try:
                parts.append(self._default(name, value, path))
            except UnboundedContentError:
                raise
            except CodeIdentityError:
                parts.append(name)
        return combine("defaults", token, *parts)

    def _default(self, name: str, value: Any, path: str) -> str:
        return combine(name, self.digest(value, f"{path}.__defaults__[{name!r}]"))

    def _captured(self, function: types.FunctionType, path: str) -> list[str]:
        found = [self._default(name, item, path) for name, item in _defaults(function).items()]
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                found.append(combine(name))
                continue
            found.append(combine(name, self.digest(value, f"{path}.__closure__[{name!r}]")))
        return found

    def _in_memory(self, function: types.FunctionType, module: Module | None, path: str) -> str:
        """Hashes a function that no file holds: by its cell's source, else by its bytecode."""
        code = function.__code__
        cell = _cell(code.co_filename)
        node = cell.function_node(code) if cell is not None else None
        importer = module or Module("__main__", "own", None)
        if node is not None:
            self._reach.imports(importer, syntax.scan([node]), ())
            digest = syntax.tree_digest([node])
        else:
            digest = code_digest(code)
        names = syntax.global_names(code)
        return combine("memory", digest, *self._globals(names, function.__globals__, path))

    def _globals(self, names: set[str], scope: Mapping[str, Any], path: str) -> Iterator[str]:
        for name in sorted(names):
            if name in scope and not name.startswith("__"):
                yield combine(name, self.digest(scope[name], f"{path}.__globals__[{name!r}]"))

    def _class(self, cls: type, module: Module, path: str) -> str:
        bases = [self.digest(base, f"{path}.__bases__") for base in cls.__mro__[1:-1]]
        if module.is_source and self._holds_class(cls, module):
            named = self._by_name(cls, module)
            defaults = [
                self._with_defaults(item, name, f"{path}.{name}") for name, item in _functions(cls)
            ]
            return combine("class", named, *defaults, *bases)
        methods = [item for _, item in _functions(cls) if not _is_generated(cls, item)]
        captured = [item for method in methods for item in self._captured(method, path)]
        scope = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        source = (
            self._reach.finder.source(str(module.path)) if module.is_source else _cell_of(methods)
        )
        node = source.definition(cls.__qualname__) if source is not None else None
        if source is None or node is None or not all(source.holds(m.__code__) for m in methods):
            return combine("class", self._members(cls, path), *bases)
        names = syntax.global_names(syntax.compile_nodes([node], source.path))
        if module.is_source:
            self._reach.names(module, names)
        else:
            captured += self._globals(names - {cls.__name__}, scope, path)
        self._reach.imports(module, syntax.scan([node]), names)
        return combine("class", syntax.tree_digest([node]), *captured, *bases)

    def _holds_class(self, cls: type, module: Module) -> bool:
        if "<" in cls.__qualname__:
            return False
        source = self._reach.finder.source(str(module.path))
        if module.name in ("__main__", "__mp_main__"):
            methods = [item for _, item in _functions(cls) if item.__module__ == cls.__module__]
            own = [item for item in methods if item.__code__.co_filename == module.path]
            if not all(source.holds(item.__code__) for item in own):
                return False
        if source.definition(cls.__qualname__) is not None:
            return True
        return _lookup(cls) is cls and cls.__qualname__.partition(".")[0] in source.units

    def _members(self, cls: type, path: str) -> str:
        """Hashes a class that no source holds, member by member."""
        generated = {name for name, item in _functions(cls) if _is_generated(cls, item)}
        parts = [cls.__qualname__]
        if dataclasses.is_dataclass(cls):
            parts += [f"{field.name}: {field.type}" for field in dataclasses.fields(cls)]
        for name, member in sorted(vars(cls).items()):
            if name in _CLASS_DETAILS or name in generated or isinstance(member, _SLOTS):
                continue
            where = f"{path}.{name}"
            if isinstance(member, property):
                accessors = [member.fget, member.fset, member.fdel]
                parts.append(combine(name, self.digest(accessors, where)))
            else:
                parts.append(combine(name, self.digest(member, where)))
        return combine("members", *parts)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def _lookup(obj: Any) -> Any:
    found: Any = sys.modules.get(obj.__module__)
    for part in getattr(obj, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found


def _functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, member in sorted(vars(cls).items()):
        accessors = [member.fget, member.fset] if isinstance(member, property) else [member]
        for item in map(unwrapped, accessors):
            if isinstance(item, types.FunctionType):
                yield name, item


def _is_generated(cls: type, function: types.FunctionType) -> bool:
    return dataclasses.is_dataclass(cls) and function.__code__.co_filename == "<string>"


def _cell_of(functions: list[types.FunctionType]) -> SourceFile | None:
    found = (_cell(function.__code__.co_filename) for function in functions)
    return next((cell for cell in found if cell is not None), None)


def _cell(filename: str) -> SourceFile | None:
    """Returns the notebook or console cell that `linecache` keeps under a name, if it parses."""
    lines = linecache.getlines(filename) if filename.startswith("<") else []
    if not lines and not os.path.isfile(filename) and filename in linecache.cache:
        lines = linecache.getlines(filename)
    try:
        return SourceFile(filename, "".join(lines).encode()) if lines else None
    except CodeIdentityError:
        return None
