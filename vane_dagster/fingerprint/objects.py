"""Digests of live functions, classes and modules, based on the digests of their files."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Set
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.module_attributes import module_attribute
from vane_dagster.fingerprint.modules import Module, path_kind, reading_finder
from vane_dagster.fingerprint.symbols import SourceFile, SymbolSource, code_digest
from vane_dagster.fingerprint.values import ValueEncoder
from vane_dagster.types.callables import captured_by, defaults_of, unwrapped

_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_WRAPPERS: Mapping[Any, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
}
_IS_HEAP_TYPE = 1 << 9  # CPython's flag of classes that are made at run time
_FIELDS = (
    "__dataclass_fields__", "__pydantic_fields__", "model_fields", "__private_attributes__",
    "__attrs_attrs__",
)  # fmt: skip
"""Attributes with the fields of a dataclass, pydantic model or attrs class."""
_MADE = ("_abc_impl", "_value2member_map_")
"""Attributes that are made with a class."""


class ObjectEncoder:
    """Hashes code objects, and collects everything that they reach in `dependency_walk`."""

    def __init__(
        self,
        dependency_walk: DependencyWalk,
        files: LocalFiles | None = None,
    ) -> None:
        self._dependency_walk = dependency_walk
        self._values = ValueEncoder(self._code, files)
        self._tokens: dict[int, str] = {}
        self._kept: list[Any] = []

    def digest(self, value: Any, path: str) -> str:
        """Hash any value, including code."""
        return self._values.digest(value, path)

    def script_value(self, name: str, value: Any, script: str) -> str:
        """Hash a script's value; a class or function with its attributes.

        Without a stable content, it counts by the script and its command line.
        """
        held = vars(value) if isinstance(value, (type, types.FunctionType)) else {}
        own = {n: v for n, v in held.items() if not hasattr(v, "__get__") and n[:1] != "_"}
        try:
            return combine(name, self.digest([value, own], name))
        except CodeIdentityError:
            return combine(name, script, *sys.argv[1:])

    def _code(self, obj: Any, path: str) -> str:
        if isinstance(obj, functools.partial):
            parts = (obj.func, list(obj.args), dict(obj.keywords))
            names = (".func", ".args", ".keywords")
            digests = [*map(self.digest, parts, [path + name for name in names])]
            if vars(obj):
                digests.append(self.digest(dict(vars(obj)), path))
            return combine("partial", *digests)
        if isinstance(obj, (staticmethod, classmethod)):
            return combine(type(obj).__name__, self._code(obj.__func__, path))
        if isinstance(obj, types.MethodType):
            owner = self.digest(obj.__self__, f"{path}.__self__")
            return combine("method", owner, self._code(obj.__func__, path))
        if isinstance(obj, types.ModuleType):
            self._dependency_walk.module(obj.__name__)
            return combine("module", obj.__name__)
        if isinstance(obj, _BOUND) and not isinstance(obj.__self__, (types.ModuleType, type(None))):
            owner = self.digest(obj.__self__, f"{path}.__self__")
            return combine("bound", owner, obj.__name__)
        if id(obj) not in self._tokens:
            # A function can reach itself through its closure; then its name is hashed in its place.
            self._tokens[id(obj)] = combine("again", getattr(obj, "__qualname__", ""))
            self._kept.append(obj)
            self._tokens[id(obj)] = self._fresh(obj, path)
        return self._tokens[id(obj)]

    def _fresh(self, obj: Any, path: str) -> str:
        if isinstance(obj, types.FunctionType):
            return self._function(obj, path)
        if not isinstance(obj, type) and hasattr(obj, "__wrapped__") and not self._is_named(obj):
            state = {name: item for name, item in vars(obj).items() if not _is_special(name)}
            parts = (type(obj), obj.__wrapped__, state)
            return combine("wrapped", self.digest(parts, path))
        name = getattr(obj, "__module__", None) or "builtins"
        module = self._dependency_walk.finder.find(name)
        if module is None or module.kind != "own":
            is_made = isinstance(obj, type) and obj.__flags__ & _IS_HEAP_TYPE
            if is_made and _lookup(obj) is not obj:  # as `make_dataclass` and `create_model` do
                return combine("class", self._members(obj, None, path), *self._bases(obj, path))
            return self._library(obj, name, module)
        if isinstance(obj, type):
            return self._class(obj, module, path)
        if module.is_source and _lookup(obj) is obj:
            return self._by_name(obj, module)
        raise CodeIdentityError(
            f"{path} is a {type(obj).__qualname__} whose code cannot be found. Define it at the "
            f"top level of a module, or give the stage `vd.Reuse(version=...)`."
        )

    def _library(self, obj: Any, name: str, module: Module | None) -> str:
        if module is None or module.kind == "installed":
            self._dependency_walk.packages.add(name.partition(".")[0])
        package = __name__.partition(".")[0]  # our own modules may move
        name = package if name.partition(".")[0] == package else name
        if name.partition(".")[0] in sys.stdlib_module_names:  # Python 3.13 has pathlib._local
            name = name.partition("._")[0]
        return combine("library", name, getattr(obj, "__qualname__", type(obj).__qualname__))

    def _by_name(self, obj: Any, module: Module) -> str:
        self._dependency_walk.name(module, obj.__qualname__.partition(".")[0])
        return combine("name", self._dependency_walk.label(module), obj.__qualname__)

    def _function(self, function: types.FunctionType, path: str) -> str:
        where = self._dependency_walk.finder.find(function.__module__ or "__main__")
        if where and self._is_named(function) and self._is_in_file(function, where):
            return self._by_name(function, where)
        name = function.__globals__.get("__name__", "__main__")
        module = self._dependency_walk.finder.find(name)
        if module is not None and module.kind != "own":
            token = self._library(function, name, module)
            is_named = _lookup(function) is function
            return combine("function", token, *(() if is_named else self._captured(function, path)))
        code, walk = function.__code__, self._dependency_walk
        place = None
        if module is not None and module.is_source and path_kind(code.co_filename) == "own":
            place = walk.finder.source(str(module.path)).place(code)
        is_in_file = place is not None
        if place is None and (cell := _cell(code.co_filename)):
            place = cell.place(code)
        if place is None:
            token, names = code_digest(code), ast_digest.global_names(code)
        else:
            unit, at = place
            token, names = combine("function", unit.digest, code.co_name, str(at)), {*unit.names}
            importer = module or Module("__main__", "own", None)
            walk.unit(importer, unit, names if is_in_file else ())
        is_nested = "<" in function.__qualname__ or code.co_flags & inspect.CO_NESTED
        if is_in_file and not is_nested and not self._is_rebound(function):
            return token
        parts = [*self._captured(function, path), *self._attributes_of(function, path)]
        if not is_in_file:
            parts += self._globals(names, function.__globals__, path)
        return combine(token, *parts)

    def _is_named(self, obj: Any) -> bool:
        """Return whether an object's name stands for it, and in a script never for another one."""
        return _lookup(obj) is obj and not self._is_rebound(obj)

    def _is_rebound(self, obj: Any) -> bool:
        module = self._dependency_walk.finder.find(obj.__module__ or "__main__")
        if module is None or not (module.is_main and module.is_source):
            return False
        source = self._dependency_walk.finder.source(str(module.path))
        name = obj.__qualname__.partition(".")[0]
        return name in source.rebound or name in source.set_by_functions

    def _is_in_file(self, obj: Any, module: Module) -> bool:
        """Return whether a function or class is a definition of its file, as it is on disk."""
        if module.kind != "own" or not module.is_source or "<" in obj.__qualname__:
            return False
        source, functions = self._dependency_walk.finder.source(str(module.path)), [obj]
        if isinstance(obj, type):
            own = (item for _, item in _functions(obj) if item.__module__ == obj.__module__)
            functions = [item for item in own if item.__code__.co_filename == module.path]
        if module.is_main and any(source.place(item.__code__) is None for item in functions):
            # Such a function is pickled by value: as in memory, not as in the file.
            return False
        return obj.__qualname__.partition(".")[0] in source.units

    def _captured(self, function: types.FunctionType, path: str) -> list[str]:
        """Hash defaults and the variables of enclosing functions."""
        cells = [
            combine(name, self.digest(value, f"{path}.__closure__[{name!r}]"))
            for name, value in captured_by(function).items()
        ]
        defaults = [
            combine(name, self.digest(value, f"{path}.__defaults__[{name!r}]"))
            for name, value in defaults_of(function).items()
        ]
        return [*defaults, *sorted(cells), *self._hints(function, path)]

    def _hints(self, obj: Any, path: str) -> list[str]:
        """Hash the values of hints and generic bases in what a function has made."""
        if "<locals>" not in obj.__qualname__:
            return []
        return [self.digest(_plain_hints(obj), f"{path}.__annotations__")]

    def _attributes_of(self, function: types.FunctionType, path: str) -> Iterator[str]:
        """Hash the attributes set on a function, and its docstring."""
        yield combine("__doc__", inspect.cleandoc(function.__doc__ or ""))
        for name, value in sorted(vars(function).items()):
            if not _is_special(name):  # such as the options of our decorators
                yield combine(name, self.digest(value, f"{path}.{name}"))

    def _globals(self, names: Set[str], scope: Mapping[str, Any], path: str) -> Iterator[str]:
        for name in sorted(names):
            if name in scope and not name.startswith("__"):
                yield combine(name, self.digest(scope[name], f"{path}.__globals__[{name!r}]"))

    def _class(self, cls: type, module: Module, path: str) -> str:
        bases = self._bases(cls, path) + self._hints(cls, path)
        kind = self._dependency_walk.finder.find(type(cls).__module__)
        if kind is not None and kind.kind == "own":
            bases.append(self.digest(type(cls), f"{path}.__class__"))
        if self._is_in_file(cls, module):
            token = self._by_name(cls, module)
            if self._is_named(cls):
                return combine("class", token, *bases)
            # The name now refers to something else, or another class may have that name.
            bases.append(token)
        return combine("class", self._members(cls, module, path), *bases)

    def _bases(self, cls: type, path: str) -> list[str]:
        return [self.digest(base, f"{path}.__bases__") for base in cls.__mro__[1:-1]]

    def _member(self, member: Any, path: str) -> str:
        """Hash an attribute of a class."""
        for made, names in _WRAPPERS.items():
            if isinstance(member, made):
                parts = [getattr(member, name) for name in names]
                return combine(made.__name__, self.digest(parts, path))
        return self.digest(member, path)

    def _members(self, cls: type, module: Module | None, path: str) -> str:
        """Hash a class that no name of a file stands for, member by member."""
        source = _cell_of(cls)
        if module is not None and module.is_source:
            source = self._dependency_walk.finder.source(str(module.path))
        units = source.binding(cls.__qualname__.partition(".")[0]) if source is not None else []
        nodes = [node for unit in units for node in unit.nodes]
        parts = [cls.__qualname__, self.digest(_plain_hints(cls), path)]
        if source is not None and nodes and module is not None:
            unit = SymbolSource(source.path, nodes)
            self._dependency_walk.unit(module, unit, unit.names if module.is_source else ())
            parts.append(unit.digest)
            if not module.is_source and cls.__module__ in sys.modules:
                scope = vars(sys.modules[cls.__module__])
                parts += self._globals(unit.names - {cls.__name__}, scope, path)
        for name, member in _members(cls):
            try:
                parts.append(combine(name, self._member(member, f"{path}.{name}")))
            except CodeIdentityError:
                # Outside of functions, the class's source text determines what its members are.
                if not nodes or "<locals>" in cls.__qualname__:
                    raise
        return combine("members", *parts)


def _lookup(obj: Any) -> Any:
    value: Any = sys.modules.get(getattr(obj, "__module__", ""))
    for part in getattr(obj, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    return value


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the members of a class, but of special ones only fields, the docstring and methods."""
    for name, member in sorted(vars(cls).items()):
        if name in _MADE or isinstance(member, _SLOTS):
            continue
        is_text = name == "__doc__" and not dataclasses.is_dataclass(cls)
        is_named = name in _FIELDS or is_text or not _is_special(name)
        if is_named or any(_member_functions(member)):
            yield name, member


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _plain_hints(obj: Any) -> list[Any]:
    """Return the type hints of a function or class, and its generic bases, as values."""
    hints = inspect.get_annotations(obj).items()
    return [*map(_plain_hint, (*hints, *vars(obj).get("__orig_bases__", ())))]


def _plain_hint(hint: Any) -> Any:
    """Return a type hint as nested lists of its classes, and of texts in place of others."""
    if (origin := typing.get_origin(hint)) is not None:
        return [*map(_plain_hint, (origin, *typing.get_args(hint)))]
    if isinstance(hint, (list, tuple)):
        return [*map(_plain_hint, hint)]
    if isinstance(hint, type):
        return hint
    text = hint if isinstance(hint, str) else repr(hint)
    return None if " at 0x" in text else text


def _functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, member in sorted(vars(cls).items()):
        yield from ((name, item) for item in _member_functions(member))


def _member_functions(member: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that an attribute of a class wraps."""
    names = next((names for kind, names in _WRAPPERS.items() if isinstance(member, kind)), ())
    for item in map(unwrapped, [getattr(member, name) for name in names] or [member]):
        if isinstance(item, types.FunctionType):
            yield item


def _cell_of(cls: type) -> SourceFile | None:
    cells = (_cell(function.__code__.co_filename) for _, function in _functions(cls))
    return next((cell for cell in cells if cell is not None), None)


def _cell(filename: str) -> SourceFile | None:
    """Return the notebook or console cell that `linecache` holds under a name, if it parses."""
    lines = [] if os.path.isfile(filename) else linecache.getlines(filename)
    try:
        return SourceFile(filename, "".join(lines).encode()) if lines else None
    except CodeIdentityError:
        return None


def value_digest(value: Any, path: str = "value", files: LocalFiles | None = None) -> str:
    """Hash a value to a digest that is the same in every process."""
    dependency_walk = DependencyWalk(reading_finder(), None, files)
    encoder = ObjectEncoder(dependency_walk, files)
    token = encoder.digest(value, path)
    for script_value in dependency_walk.script_values():
        token = combine(token, encoder.script_value(*script_value))
    if dependency_walk.modules:
        # The stage's own file may change what code among its arguments uses.
        for loaded in list(sys.modules.values()):  # some twice, by an alias such as __mp_main__
            if files is not None and module_attribute(loaded, "__file__") in files.code:
                dependency_walk.modules.add(module_attribute(loaded, "__name__"))
    return combine("value", token, combine("reach", *dependency_walk.parts().values()))
