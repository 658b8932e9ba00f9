"""Static analysis of the writes by top-level statements while modules are imported.

Data flow: `Program` executes modules abstractly from their source, in Python's import order. It
evaluates each top-level statement: an expression's value is a set of `Origin`s, the module-level
objects, parameters and library states that it may denote or hold. No user code is run.

An effect is a write beyond the binding of a name in the statement's own module. It changes objects
of modules (``settings.K = 3``, ``register(x)``, a class that its base registers), or the state of
the standard library or an installed package (``os.environ["A"] = "1"``, ``torch.manual_seed(0)``).
Calls of user code are followed through one `Summary` per function: its writes, return values,
stores and imports, in terms of its parameters. The analysis ignores the order of statements and the
branches taken, so two names that were ever bound to one object are aliases.

Unknown code is assumed to write: an unknown method writes its receiver and its arguments, a
function that is passed to a call is called with the other arguments, ``globals()`` and ``exec``
write every name of the module. Exceptions: calls into dagster, vane_dagster, logging and warnings,
and into the objects that these return, write nothing; libraries listed as pure do not write to
their arguments.

`DependencyWalk` decides which effects count: those on library state, and those on objects that it
reads.
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.ast_digest import ImportRef
from vane_dagster.fingerprint.decorators import is_lazy
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SourceFile, SymbolSource

INERT = frozenset({"dagster", "vane_dagster", "logging", "warnings"})
PURE = frozenset({
    "__future__", "abc", "argparse", "base64", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "enum", "fractions", "functools", "hashlib", "inspect", "itertools", "json", "math",
    "numbers", "pathlib", "pprint", "re", "statistics", "string", "struct", "textwrap", "time",
    "traceback", "types", "typing", "typing_extensions", "uuid", "zoneinfo",
})  # fmt: skip
PURE_NAMES = (
    "os.path.", "os.environ.get", "os.environ.copy", "os.getenv", "os.getcwd", "os.cpu_count",
    "os.fspath", "sys.stdout.", "sys.stderr.", "gc.collect", "platform.", "operator.itemgetter",
    "operator.attrgetter", "operator.methodcaller", "importlib.metadata.", "importlib.resources.",
    "threading.Lock", "threading.RLock", "threading.local",
)  # fmt: skip
# Functions of the modules above that change their arguments or the process.
IMPURE = frozenset({
    "dataclasses.dataclass", "functools.total_ordering", "functools.update_wrapper",
    "abc.update_abstractmethods", "struct.pack_into", "time.tzset", "enum.global_enum",
    "contextlib.chdir", "contextlib.redirect_stdout", "copy.dispatch_table",
})  # fmt: skip
DECORATOR = "functools.cache"  # represents decorators that return their argument
DECORATORS = frozenset({
    "functools.cache", "functools.lru_cache", "functools.wraps", "functools.singledispatch",
    "contextlib.contextmanager", "abc.abstractmethod", "typing.overload", "typing.final",
    "enum.unique", "typing.runtime_checkable", "typing.no_type_check",
})  # fmt: skip
# Libraries with functions that return new objects; changing one does not change the library.
FRESH = frozenset({"duckdb", "numpy", "pandas", "polars", "pyarrow", "torch"})
ITEM_WRITERS = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft",
    "insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove",
    "reverse", "rotate", "setdefault", "sort", "symmetric_difference_update", "update",
    "__setitem__", "__delitem__",
})  # fmt: skip
READERS = frozenset({
    "absolute", "as_posix", "capitalize", "casefold", "copy", "count", "decode", "difference",
    "encode", "endswith", "exists", "expanduser", "find", "format", "format_map", "get", "glob",
    "hexdigest", "index", "intersection", "is_dir", "is_file", "isdigit", "isdisjoint", "issubset",
    "issuperset", "items", "iterdir", "join", "joinpath", "keys", "lower", "lstrip", "match",
    "most_common", "partition", "read_bytes", "read_text", "relative_to", "removeprefix",
    "removesuffix", "replace", "resolve", "rglob", "rpartition", "rsplit", "rstrip", "search",
    "split", "splitlines", "startswith", "strip", "sub", "title", "union", "upper", "values",
    "with_name", "with_suffix", "__getitem__", "__len__", "__contains__", "__iter__",
    "__subclasses__",
})  # fmt: skip
GETTERS = frozenset({"get", "__getitem__"})
STATE_VERBS = frozenset({
    "activate", "add", "append", "apply", "autolog", "basicconfig", "clear", "component",
    "configure", "disable", "enable", "extend", "factory", "init", "initialize", "insert",
    "install", "instrument", "load", "login", "manual", "monkey", "patch", "pop", "putenv",
    "register", "remove", "reset", "seed", "set", "setdefault", "setlocale", "setup", "unregister",
    "update", "use",
})  # fmt: skip
LOADERS = frozenset({"load", "loads", "init"})  # verbs that mostly return a new object
IMPORTERS = frozenset({
    "importlib.import_module", "importlib.__import__", "__import__", "pydoc.locate",
    "pkgutil.resolve_name", "importlib.util.find_spec",
})  # fmt: skip
RUNNERS = frozenset({
    "importlib.util.spec_from_file_location", "runpy.run_path", "runpy.run_module",
    "importlib.reload", "execfile",
})  # fmt: skip

BUILTINS = frozenset(dir(builtins))
SCALARS = frozenset({
    "abs", "all", "any", "ascii", "bin", "bool", "bytes", "callable", "chr", "divmod", "float",
    "format", "frozenset", "hasattr", "hash", "hex", "id", "input", "int", "isinstance",
    "issubclass", "len", "oct", "ord", "pow", "print", "range", "repr", "round", "str", "sum",
})  # fmt: skip


def is_state_verb(name: str, *, assigned: bool = False) -> bool:
    """Return whether a function's name implies that it changes the state of its library.

    Args:
        name: The function's name.
        assigned: Whether the call's result is used.
    """
    words = name.lower().strip("_").split("_")
    if assigned and (name in LOADERS or (words[0] == "load" and words[-1] != "dotenv")):
        return False
    whole = name.lower()
    return words[0] in STATE_VERBS or words[-1] == "seed" or whole.startswith("set")


CONTENT = "[]"  # the attribute of an origin for the items of an object
SUBCLASSES = "__subclasses__"
_MAX_VALUES = 40  # of one expression
_MAX_WRITES = 160  # of one function
_MAX_STEPS = 8  # of a dotted name in a library
_MAX_ROUNDS = 100
_PATH_WRITERS = frozenset({"write_text", "write_bytes", "symlink_to", "unlink"})
# Methods that are called by syntax, grouped by that syntax.
_BINARY = tuple(
    f"__{beside}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift",
                 "rshift", "and", "or", "xor")
    for beside in ("", "r", "i")
)  # fmt: skip
_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
_UNARY = ("__neg__", "__pos__", "__invert__", "__bool__", "__len__")
_ITERATED = ("__iter__", "__next__", "__aiter__", "__anext__")
_ENTERED = ("__enter__", "__exit__", "__aenter__", "__aexit__")
_STORED = ("__setitem__", "__setattr__", "__delitem__", "__delattr__")
_SHOWN = ("__format__", "__str__", "__repr__")
_CONVERTED = (
    *_SHOWN, *_UNARY, *_ITERATED, *_COMPARED, "__hash__", "__int__", "__float__", "__index__",
    "__abs__", "__round__", "__reversed__", "__bytes__", "__complex__", "__getitem__",
)  # fmt: skip
_IMPLICIT_ATTRIBUTES = ("__getattribute__", "__getattr__")


# Expressions that create a mutable object.
_CACHES = frozenset({"cache", "cached", "lru_cache"})
_MADE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)


class Origin(NamedTuple):
    """An object that an expression may denote.

    Attributes:
        kind: ``name`` for a module-level object, ``every`` for all objects of a module, ``module``
            for a user's module, ``library`` for state of another module, ``value`` for the result
            of a library function, ``new`` for a new object of a library, ``inert``, ``builtin``,
            ``parameter``, ``function``, ``instance``, or ``state`` for the state that a function
            keeps between calls: its defaults and the variables of enclosing functions.
        place: The file of a name, the module's name, or the key of a function or class.
        name: The name in the file, the dotted name in a library, or the parameter's position.
        attribute: The first attribute that is read from the object. With a `CONTENT` suffix, or as
            `CONTENT` alone, it denotes the object's items.
        inside: Whether the value only holds the object. If so, a store into the value does not
            change the object.
    """

    kind: str
    place: str
    name: str
    attribute: str = ""
    inside: bool = False


Values = frozenset[Origin]
NOTHING: Values = frozenset()
LIBRARY = Origin("library", "", "")
_INERT_VALUE = Origin("inert", "", "")


@dataclass
class Summary:
    """The effects of running code.

    Attributes:
        writes: The objects that it may change.
        returns: The values that it may return.
        stores: Pairs of a container and a value stored in it.
        imports: The modules that it imports, in order.
        unknown_imports: The places of imports by a computed name.
        applied: The calls included so far, with their results.
    """

    writes: set[Origin] = field(default_factory=set)
    returns: set[Origin] = field(default_factory=set)
    stores: set[tuple[Origin, Origin]] = field(default_factory=set)
    imports: dict[str, None] = field(default_factory=dict)
    unknown_imports: set[tuple[str, int]] = field(default_factory=set)
    applied: dict[object, Values] = field(default_factory=dict)  # calls included so far

    def size(self) -> int:
        found = len(self.writes) + len(self.returns) + len(self.stores)
        return found + len(self.imports) + len(self.unknown_imports)


@dataclass(frozen=True)
class Effect:
    """A top-level statement with its writes when its module is imported.

    Attributes:
        module: The module.
        unit: The statement.
        writes: The objects that it may change.
        imports: The modules that it imports, in order.
    """

    module: Module
    unit: SymbolSource
    writes: frozenset[Origin]
    imports: tuple[str, ...]

    @property
    def changes_itself(self) -> bool:
        """Whether it is a definition with decorators that change nothing else; names cover it."""
        path, unit = str(self.module.path), self.unit
        return unit.is_definition and all(
            item.kind == "name" and item.place == path and item.name in unit.touched
            for item in self.writes
        )


@dataclass(frozen=True)
class _Callable:
    """A function or class that can be called, with the frame of its body."""

    node: ast.AST
    module: Module
    frame: _Frame


def _joined(path: str, step: str) -> str:
    """Join two attribute steps: the items of ``X.known`` are ``known[]``, at any depth."""
    if not path:
        return step
    return path if path.endswith(CONTENT) else path + CONTENT


def _held(values: Iterable[Origin]) -> Values:
    """Return the values as items held by a container."""
    return frozenset(
        v if v.inside else Origin(v.kind, v.place, v.name, v.attribute, True) for v in values
    )


def _opened(values: Iterable[Origin], attribute: str = CONTENT) -> Values:
    """Return the result of reading an attribute or item of values."""
    return frozenset(
        Origin(
            v.kind,
            v.place,
            v.name,
            v.attribute if v.inside else _joined(v.attribute, attribute),
        )
        for v in values
    )


def _at(values: Values, path: str) -> Values:
    """Return the values at an `Origin.attribute` path of values."""
    if not path:
        return values
    plain = _opened(values, path.removesuffix(CONTENT) or CONTENT)
    return _opened(plain) if path.endswith(CONTENT) and path != CONTENT else plain


def _bounded(values: Values) -> Values:
    """Return the values, or `LIBRARY` if there are too many: any use of it counts."""
    return values if len(values) <= _MAX_VALUES else frozenset({LIBRARY})


def _bind(bound: set[Origin], values: Iterable[Origin]) -> None:
    if LIBRARY not in bound:
        bound.update(values)
        if len(bound) > _MAX_VALUES:
            bound.clear()
            bound.add(LIBRARY)


def _one(value: Origin) -> Values:
    return frozenset({value})


class Program:
    """The modules that an import executes, with the effects of their statements."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self.found: dict[str, Module | None] = {}
        self.sources: dict[str, SourceFile] = {}
        self.modules: dict[str, Module] = {}
        self.code: dict[str, _Callable] = {}
        self._keys: dict[int, str] = {}
        self._aliases: dict[Origin, Values] = {}
        self._class_of: dict[Origin, str] = {}
        self._classing: set[Origin] = set()
        self.methods: dict[str, set[str]] = {}
        self.holds: dict[tuple[str, str], dict[str, set[Origin]]] = {}
        self.bindings: dict[tuple[str, str], set[Origin]] = {}
        self._frames: dict[str, _Frame] = {}
        self._summaries: dict[str, Summary] = {}
        self._writes_too_much: set[str] = set()
        self._returns_too_much: set[str] = set()
        self._effects: dict[str, list[Effect]] = {}
        self._settled: set[str] = set()
        self.classes: dict[str, Origin] = {}
        self.texts: dict[str, ast.Module] = {}
        self.round = 0
        self.lock = threading.Lock()
        self._expanded: dict[Origin, frozenset[Origin]] = {}
        self._listed: dict[str, list[str]] = {}

    # Modules

    def find(self, name: str) -> Module | None:
        """Locate a module, and record that the answer was used."""
        if name not in self.found:
            self.found[name] = self.finder.find(name)
        return self.found[name]

    def is_current(self, finder: Finder) -> bool:
        """Return whether every module still has the same location and text."""
        try:
            return (
                all(finder.find(name) == module for name, module in self.found.items())
                and all(finder.source(path) is source for path, source in self.sources.items())
                and all(finder.below(name) == listed for name, listed in self._listed.items())
            )
        except CodeIdentityError:
            return False

    def source(self, module: Module) -> SourceFile | None:
        """Return a user's parsed module; None if it has no source or does not parse."""
        if module.kind != "own" or not module.is_source:
            return None
        path = str(module.path)
        if path not in self.sources:
            try:
                self.sources[path] = self.finder.source(path)
            except CodeIdentityError:
                return None
        self.modules.setdefault(path, module)
        return self.sources[path]

    def trace(self, names: Iterable[str]) -> list[Effect]:
        """Return the statements that importing modules executes, in execution order."""
        names = list(names)
        try:
            self._settle(names)
        except CodeIdentityError:
            self._settled.clear()  # so that the next attempt behaves the same
            raise
        found: list[Effect] = []
        entered: set[str] = set()
        stack: list[Iterator[str | Effect | tuple[Effect]]] = [iter(names)]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
            elif isinstance(item, tuple) and not isinstance(item, Effect):
                found.append(item[0])
            elif isinstance(item, Effect):
                # The imports of a statement are executed before the statement completes.
                stack.append(iter([*item.imports, (item,)]))
            elif item not in entered:
                entered.add(item)
                parent = item.rpartition(".")[0]
                steps: list[str | Effect | tuple[Effect]] = [parent] if parent else []
                module = self.find(item)
                if module is not None and module.path not in entered:
                    entered.add(str(module.path))
                    steps += self._effects.get(str(module.path), ())
                stack.append(iter(steps))
        return found

    def _settle(self, names: Iterable[str]) -> None:
        """Execute modules and their imports until the results no longer change."""
        waiting = list(names)
        is_new = False
        while waiting:
            name = waiting.pop()
            module = self.find(name)
            parent = name.rpartition(".")[0]
            if parent:
                waiting.append(parent)
            if module is None or self.source(module) is None or module.path in self._settled:
                continue
            self._settled.add(str(module.path))
            is_new = True
            self._execute(module)
            waiting += self._frames[str(module.path)].summary.imports
        if not is_new:
            return
        modules = [self.modules[path] for path in sorted(self._settled)]
        size = -1
        last = self.round + _MAX_ROUNDS
        while size != (now := self._size()):
            if self.round == last:
                raise CodeIdentityError(
                    f"what the import of {modules[0].name} and {len(modules) - 1} other modules "
                    f"changes cannot be determined. Give the stage `version=`."
                )
            size = now
            self.round += 1
            for module in modules:
                self._execute(module)
        self._effects.clear()
        for module in modules:
            frame = self.frame(module)
            source = self.source(module)
            self._effects[str(module.path)] = [
                self._effect(frame, module, unit)
                for unit in (source.statements if source is not None else ())
            ]
        self._expanded.clear()
        self._settle(
            name
            for effects in list(self._effects.values())
            for effect in effects
            for name in effect.imports
        )

    def _execute(self, module: Module) -> None:
        frame = self.frame(module)
        source = self.source(module)
        frame.summary = Summary()
        for unit in source.statements if source is not None else ():
            frame.statement(unit.nodes[-1])
        self._expanded.clear()

    def _size(self) -> int:
        frames = [*self._frames.values(), *(code.frame for code in self.code.values())]
        names = sum(len(values) for frame in frames for values in frame.names.values())
        held = sum(len(values) for paths in self.holds.values() for values in paths.values())
        held += sum(map(len, self.bindings.values()))
        return names + held + sum(item.size() for item in self._summaries.values())

    def _effect(self, frame: _Frame, module: Module, unit: SymbolSource) -> Effect:
        frame.summary = Summary()
        frame.statement(unit.nodes[-1])
        summary = frame.summary
        if summary.unknown_imports:
            found = dict.fromkeys(self._plugins(module, unit, summary))
            summary.imports.update(found)
        for container, value in summary.stores:
            if container.kind == "name" and value.kind != "parameter":
                held = self.holds.setdefault((container.place, container.name), {})
                held.setdefault(container.attribute, set()).add(value)
                self._expanded.clear()
        writes = frozenset(item for item in summary.writes if item.kind != "parameter")
        return Effect(module, unit, writes, tuple(summary.imports))

    def _plugins(self, module: Module, unit: SymbolSource, summary: Summary) -> Iterator[str]:
        """Yield the modules that an import by a computed name may import: those in its package."""
        texts = [
            node.value
            for node in ast.walk(unit.nodes[-1])
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        tops = {text.split(".")[0] for text in texts if text.split(".")[0].isidentifier()}
        if module.package:
            tops.add(module.package.partition(".")[0])
        packages = [top for top in sorted(tops) if self._is_own_package(top)]
        if not packages:
            _, line = min(summary.unknown_imports)
            raise CodeIdentityError(
                f"{module.path}, line {line}: a module is imported by a name that only a run "
                f"knows, so its changes cannot be determined. Import it by a literal name, or "
                f"give the stage `version=`."
            )
        for top in packages:
            yield top
            self._listed[top] = self.finder.below(top)
            yield from self._listed[top]

    def starred(self, module: Module) -> list[Module]:
        """Return the submodules that a star import of a package imports."""
        if module.search is not None:
            self._listed[module.name] = self.finder.below(module.name)
        return self.finder.starred(module)

    def _is_own_package(self, name: str) -> bool:
        module = self.find(name)
        return module is not None and module.kind == "own" and module.search is not None

    def frame(self, module: Module) -> _Frame:
        """Return the frame of a module, with the values of its names known so far."""
        path = str(module.path)
        if path not in self._frames:
            self._frames[path] = _Frame(self, module, "", None)
        return self._frames[path]

    # Names and aliases

    def global_values(self, path: str, name: str) -> Values:
        """Return the values of a module-level name, besides an object of its own.

        Args:
            path: The module's file.
            name: The name.
        """
        module = self.modules.get(path)
        if module is None:
            return NOTHING
        frame = self.frame(module)
        if name in frame.names:
            return frozenset(frame.names[name])
        for star in frame.stars:
            target = self.find(star)
            source = self.source(target) if target is not None else None
            if source is not None and (name in source.units or source.stars):
                return frozenset({Origin("name", source.path, name)})
        libraries = [self.library(f"{base}.{name}") for base in frame.library_stars]
        return frozenset(value for found in libraries for value in found)

    def aliases(self, values: Iterable[Origin]) -> Values:
        """Add to values everything that they are aliases of."""
        values = frozenset(values)
        if len(values) != 1:
            return frozenset().union(*(self.aliases((value,)) for value in values))
        (value,) = values
        if value.kind != "name":
            return values
        if value not in self._aliases:
            found = self._find_aliases(value)
            if self._classing:
                return found  # may be incomplete while a class is being resolved
            self._aliases[value] = found
        return self._aliases[value]

    def grow(self) -> None:
        """Clear everything derived from the values of names, after a name got another value."""
        self._aliases.clear()
        self._class_of.clear()

    def _find_aliases(self, value: Origin) -> Values:
        found: set[Origin] = set()
        stack = [value]
        while stack:
            item = stack.pop()
            if item in found:
                continue
            found.add(item)
            if item.kind == "name":
                for other in self.global_values(item.place, item.name):
                    stack += self.read_path(other, item.attribute)
                if item.attribute and not item.inside:
                    stack += self.attribute_values(item)
        return frozenset(found)

    def read_path(self, value: Origin, path: str) -> Values:
        """Return the values at an `Origin.attribute` path of a value.

        Args:
            value: The value.
            path: The attribute path.
        """
        if not path or path == CONTENT:
            return _opened([value]) if path else frozenset({value})
        values = self.read(value, path.removesuffix(CONTENT))
        return _opened(values) if path.endswith(CONTENT) else values

    def read(self, value: Origin, attribute: str) -> Values:
        """Return the values of an attribute or item of a value.

        Args:
            value: The value.
            attribute: The attribute's name, or `CONTENT` for an item.
        """
        if value.inside or attribute == CONTENT or value.attribute:
            return _opened([value], attribute)
        if value.kind == "module":
            module = self.find(value.place)
            return NOTHING if module is None else self.member(module, attribute)
        if value.kind == "library":
            is_same = value.name.endswith(f".{attribute}")  # as in linked nodes: ``x.next.next``
            return frozenset({value}) if is_same else self.library(f"{value.name}.{attribute}")
        if value.kind in ("value", "new", "inert", "builtin", "every"):
            return frozenset({value})
        return _opened([value], attribute)

    def is_module(self, value: Origin) -> bool:
        """Return whether a value is a user's module, and so not a mutable object."""
        return any(
            item.kind == "module" and not item.inside and not item.attribute
            for item in self.aliases([value])
        )

    def attribute_values(self, item: Origin) -> Values:
        """Return the values to which the class body binds a class attribute."""
        key = self.class_of(item._replace(attribute="", inside=False))
        code = self.code.get(key) if key else None
        attribute = item.attribute.removesuffix(CONTENT)
        if code is None or attribute not in code.frame.names:
            return NOTHING
        bound = [v for v in code.frame.names[attribute] if v.kind != "function"]
        return frozenset(bound) if attribute == item.attribute else _opened(bound)

    def expand(self, write: Origin) -> frozenset[Origin]:
        """Return every object that a write to one may change: its aliases and its items."""
        if write not in self._expanded:
            found: set[Origin] = set()
            stack = [write]
            while stack:
                item = stack.pop()
                if item in found or item.inside:
                    continue
                found.add(item)
                # Stores into a library's object are recorded as such; passing it is not a store.
                stack += [other for other in self.aliases([item]) if other.kind != "library"]
                if item.kind == "name" and item.attribute:
                    for path, values in self.holds.get((item.place, item.name), {}).items():
                        if item.attribute == CONTENT or item.attribute == path:
                            stack += values
                        if item.attribute.endswith(CONTENT) and item.attribute.startswith(path):
                            stack += _opened(values)
            self._expanded[write] = frozenset(found)
        return self._expanded[write]

    def is_own_class(self, path: str, name: str) -> bool:
        """Return whether a name is a class, or an instance of one, with only user-defined bases.

        Attributes of such a class that the user's code does not mention are never read.

        Args:
            path: The module's file.
            name: The name.
        """
        key = self.class_of(Origin("name", path, name))
        return bool(key) and all(
            self.class_of(base) or base.kind == "builtin"
            for owner, _ in self.lineage(key)
            for base in self.bases(self.code[owner])
        )

    def member(self, module: Module, name: str) -> Values:
        """Return the values of ``module.name``.

        Args:
            module: The module.
            name: The attribute's name.
        """
        if module.kind != "own":
            return self.library(f"{module.name}.{name}")
        inner = self.find(f"{module.name}.{name}") if module.search is not None else None
        source = self.source(module)
        found: set[Origin] = set()
        if source is not None and (inner is None or name in source.units):
            found.add(Origin("name", source.path, name))
        if inner is not None:
            found |= self.module_value(inner)
        return frozenset(found)

    def module_value(self, module: Module) -> Values:
        """Return the value of a module object."""
        if module.kind != "own":
            return self.library(module.name)
        return frozenset({Origin("module", module.name, "")})

    def library(self, name: str) -> Values:
        """Return the value of a dotted name outside the user's code."""
        if name.startswith(".") or name.count(".") > _MAX_STEPS:
            return frozenset({LIBRARY})
        inert = name.partition(".")[0].startswith(tuple(INERT)) and _root(name) in INERT
        if inert or _root(name).startswith("dagster_"):
            return frozenset({Origin("inert", "", "")})
        return frozenset({Origin("library", "", name)})

    # Functions and classes

    def register(self, node: ast.AST, module: Module, frame: _Frame) -> str:
        """Register a function or class of a frame, and return its key.

        Args:
            node: The definition.
            module: Its module.
            frame: The enclosing frame.
        """
        key = self._keys.setdefault(id(node), f"{len(self._keys):06}")
        if key not in self.code:  # keeps a reference to the node, so its id is not reused
            self.code[key] = _Callable(node, module, _Frame(self, module, key, frame))
        return key

    def class_of(self, value: Origin) -> str:
        """Return the key of a value's class, or of the class that it is; empty if unknown."""
        if value.kind == "instance":
            return value.place
        if value.kind == "function":
            return value.place if isinstance(self.code[value.place].node, ast.ClassDef) else ""
        if value.kind != "name" or value.attribute or value in self._classing:
            return ""
        if value not in self._class_of:
            self._classing.add(value)
            key = self._find_class(value)
            self._classing.discard(value)
            if self._classing:
                return key
            self._class_of[value] = key
        return self._class_of[value]

    def _find_class(self, value: Origin) -> str:
        for other in sorted(self.aliases([value])):
            if other.inside or other.attribute:
                continue
            if other.kind == "instance":
                return other.place
            if other.kind == "function" and isinstance(self.code[other.place].node, ast.ClassDef):
                return other.place
        return ""

    def lineage(self, key: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and its user-defined bases, with their keys."""
        seen: set[str] = set()
        stack = [key]
        while stack:
            item = stack.pop(0)
            code = self.code.get(item)
            if item in seen or code is None or not isinstance(code.node, ast.ClassDef):
                continue
            seen.add(item)
            yield item, code.node
            stack += [base for base in map(self.class_of, self.bases(code)) if base]

    def bases(self, code: _Callable) -> list[Origin]:
        """Return the values of a class's bases."""
        if not isinstance(code.node, ast.ClassDef):
            return []
        frame = code.frame.parent or self.frame(code.module)
        return [value for base in code.node.bases for value in sorted(frame.evaluate(base))]

    def method(self, key: str, name: str) -> str:
        """Return the key of a class's method, including inherited ones; empty if there is none.

        Args:
            key: The class's key.
            name: The method's name.
        """
        for owner, _ in self.lineage(key):
            frame = self.code[owner].frame
            for value in frame.names.get(name, ()):
                if value.kind == "function" and not value.inside:
                    return value.place
        return ""

    def is_property(self, key: str) -> bool:
        """Return whether reading a method's name runs it, as with ``@property``."""
        decorators = getattr(self.code[key].node, "decorator_list", ())
        return any("property" in _last_name(each) for each in decorators)

    def methods_of(self, key: str, name: str) -> set[str]:
        """Return the keys of a method in a class and all its bases; `super` may call any of them.

        Args:
            key: The class's key.
            name: The method's name.
        """
        return {
            value.place
            for owner, _ in self.lineage(key)
            for value in self.code[owner].frame.names.get(name, ())
            if value.kind == "function" and not value.inside
        }

    def summary(self, key: str) -> Summary:
        """Return the summary of a function's effects."""
        known = self._summaries.setdefault(key, Summary())
        code = self.code[key]
        if isinstance(code.node, ast.ClassDef) or code.frame.done_in == self.round:
            return known  # a recursive call: use the previous round's summary
        code.frame.done_in = self.round
        summary = code.frame.summary = Summary()
        code.frame.run(code.node)
        # Bounding can reduce a function's effects in the next round, so the excess is remembered.
        if max(len(summary.writes), len(summary.stores)) > _MAX_WRITES:
            self._writes_too_much.add(key)
        if len(summary.returns) > _MAX_VALUES:
            self._returns_too_much.add(key)
        if key in self._writes_too_much:
            summary.writes, summary.stores = {LIBRARY}, set()
        if key in self._returns_too_much:
            summary.returns = {LIBRARY}
        self._summaries[key] = summary
        return summary


_programs: dict[str, Program] = {}
_MAX_PROGRAMS = 16


def loaded_program(finder: Finder, roots: Sequence[str]) -> Program:
    """Return the program that contains some modules, from the cache if no file has changed.

    Args:
        finder: Locates the modules.
        roots: The names of the modules.
    """
    key = roots[0] if roots else ""
    program = _programs.pop(key, None)
    if program is None or not program.is_current(finder):
        program = Program(finder)
    program.finder = finder
    _programs[key] = program
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)))
    return program


def _root(name: str) -> str:
    return name.partition(".")[0]


class _Frame:
    """The names of a module, class body or function, and the effects of its statements."""

    def __init__(self, program: Program, module: Module, key: str, parent: _Frame | None) -> None:
        self.program = program
        self.module = module
        self.path = str(module.path)
        self.key = key
        self.parent = parent
        self.names: dict[str, set[Origin]] = {}
        self.stars: dict[str, None] = {}
        self.library_stars: dict[str, None] = {}
        self.summary = Summary()
        self.is_class = False
        self.done_in = -1
        self._globals: set[str] = set()
        self._nonlocals: set[str] = set()
        self._scopes: list[dict[str, set[Origin]]] = []

    @property
    def is_module(self) -> bool:
        return self.parent is None

    @cached_property
    def own_keys(self) -> frozenset[str]:
        """The keys of the function and its enclosing functions."""
        return frozenset({self.key}) | (self.parent.own_keys if self.parent is not None else set())

    @property
    def _state(self) -> Origin:
        return Origin("state", self.key, "")

    # Statements

    def run(self, node: ast.AST) -> None:
        """Execute the body of a function."""
        if isinstance(node, ast.Lambda):
            self.summary.returns |= self.evaluate(node.body)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                self.statement(statement)

    def statement(self, node: ast.AST) -> None:
        """Execute one statement, and those nested in it."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._define(node)
        elif isinstance(node, ast.ClassDef):
            self._define_class(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for ref in ast_digest.import_refs(node, False):
                self._import(ref)
        elif isinstance(node, ast.Assign):
            values = self.evaluate(node.value)
            bare = all(isinstance(t, ast.Name) and not t.id.strip("_") for t in node.targets)
            if bare and isinstance(node.value, ast.Call):
                self.evaluate(node.value, bare=True)
            for target in node.targets:
                self._bind(target, values, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._bind(node.target, self.evaluate(node.value), node.value)
        elif isinstance(node, ast.AugAssign):
            values = self.evaluate(node.value)
            target = ast.copy_location(_loaded(node.target), node.target)
            current = self.evaluate(target)
            if not _is_plain(node.value):
                self._write(current)
            self._implicit(current, _BINARY, values)
            self._store(current, values)
            self._bind(node.target, values | current)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            values = self.evaluate(node.iter)
            self._implicit(values, _ITERATED)
            self._bind(node.target, _opened(values))
            self._block(node.body, node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                values = self.evaluate(item.context_expr)
                self._implicit(values, _ENTERED)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, values | _opened(values))
            self._block(node.body)
        elif isinstance(node, ast.Expr):
            values = self.evaluate(node.value, bare=True)
            if isinstance(node.value, ast.BinOp):
                self._write(values)
        elif isinstance(node, ast.Return):
            self.summary.returns |= self.evaluate(node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._bind(target, NOTHING)
        elif isinstance(node, ast.Global):
            self._globals.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            self._nonlocals.update(node.names)
        elif isinstance(node, ast.Match):
            values = self.evaluate(node.subject)
            for inner in ast.walk(node):
                names = (getattr(inner, "name", None), getattr(inner, "rest", None))
                for name in names:
                    if isinstance(name, str) and isinstance(inner, ast.pattern):
                        self._name(name, values | _opened(values))
            for case in node.cases:
                if case.guard is not None:
                    self.evaluate(case.guard)
                self._block(case.body)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.evaluate(child)
                elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
                    self.statement(child)

    def _block(self, *bodies: Sequence[ast.stmt]) -> None:
        for body in bodies:
            for statement in body:
                self.statement(statement)

    def _bind(self, target: ast.expr, values: Values, value: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            self._name(target.id, values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts: list[ast.expr] = []
            if isinstance(value, (ast.Tuple, ast.List)):
                parts = value.elts
            if len(parts) == len(target.elts) and not any(
                isinstance(part, ast.Starred) for part in (*parts, *target.elts)
            ):
                for inner, part in zip(target.elts, parts, strict=True):
                    self._bind(inner, self.evaluate(part), part)
            else:
                for inner in target.elts:
                    self._bind(inner, _opened(values))
        elif isinstance(target, ast.Starred):
            self._bind(target.value, _held(values))
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            base = self.evaluate(target.value)
            if isinstance(target, ast.Subscript):
                self.evaluate(target.slice)
                self._write(base)
            else:
                self._set_attribute(base, target.attr)
            self._implicit(base, _STORED, values)
            step = CONTENT
            if isinstance(target, ast.Attribute):
                step = target.attr
                self._call_setter(base, target.attr, values)
            self._store(base, values, step)

    def _call_setter(self, base: Values, name: str, values: Values) -> None:
        for item in sorted(self.program.aliases(base)):
            if item.kind == "instance" and not item.inside and not item.attribute:
                for method in sorted(self.program.methods_of(item.place, name)):
                    self._apply(method, [base, values], {})

    def _set_attribute(self, base: Values, name: str | None) -> None:
        for item in self.program.aliases(base):
            if item.kind != "module" or item.inside:
                continue
            module = self.program.find(item.place)
            if module is None:
                continue
            if name is None:
                self.summary.writes.add(Origin("every", str(module.path), ""))
            else:
                self.summary.writes.add(Origin("name", str(module.path), name))
        self._write(value for value in base if not self.program.is_module(value))

    def _name(self, name: str, values: Values) -> None:
        if self._scopes and name in self._scopes[-1]:
            self._scopes[-1][name] |= values
        elif name in self._globals:
            self.summary.writes.add(Origin("name", self.path, name))
            self.summary.stores |= {(Origin("name", self.path, name), item) for item in values}
        else:
            if name in self._nonlocals:
                self.summary.writes.add(self._state)
            own = Origin("name", self.path, name)
            known = self.names.setdefault(name, set())
            size = len(known)
            if LIBRARY not in known:
                known.update(value for value in values if value != own)
            if len(known) > _MAX_VALUES:
                known.clear()
                known.add(LIBRARY)
                size = -1 if size != 1 else size
            if len(known) != size:
                self.program.grow()

    def _write(self, values: Iterable[Origin], *, passed: bool = False) -> None:
        for value in values:
            if value.inside:
                continue
            for item in self.program.aliases([value]):
                if item.kind == "library":
                    if not passed:
                        self.summary.writes.add(item)
                elif item.kind == "value" and not item.inside:
                    if not passed and _root(item.name) not in FRESH:
                        self.summary.writes.add(LIBRARY)
                elif item.kind in ("every", "parameter", "state") and not item.inside:
                    self.summary.writes.add(item)
                elif item.kind == "module" and not item.inside:
                    module = self.program.find(item.place)
                    if module is not None:
                        self.summary.writes.add(Origin("every", str(module.path), ""))
                elif item.kind in ("instance", "function") and item.attribute:
                    attribute = item.attribute.removesuffix(CONTENT)
                    for owner, _ in self.program.lineage(item.place):
                        if attribute in self.program.code[owner].frame.names:
                            cls = self.program.classes.get(owner)
                            if cls is not None:
                                self.summary.writes.add(cls._replace(attribute=item.attribute))
                self._write_class(item)
            if value.kind == "name":
                self.summary.writes.add(value)

    def _write_class(self, item: Origin) -> None:
        """Record a store into the class of an object: ``type(self).count += 1``."""
        if item.attribute.startswith("__class__") and not item.inside:
            for owner, _ in self.program.lineage(
                self.program.class_of(item._replace(attribute=""))
            ):
                if owner in self.program.classes:
                    self.summary.writes.add(self.program.classes[owner])

    def _write_passed(self, values: Iterable[Origin]) -> None:
        """Record that values are passed to unknown code, which may change them and their items."""
        for value in values:
            if value == LIBRARY:
                self.summary.writes.add(value)
            if not self._is_constant(value) and value.kind not in ("library", "value", "new"):
                plain = value._replace(inside=False)
                self._write([plain, *_opened([plain])], passed=True)

    def _is_constant(self, value: Origin) -> bool:
        if value.kind != "name":
            return value.kind in ("builtin", "inert")
        source = self.program.sources.get(value.place)
        units = source.units.get(value.name, ()) if source is not None else ()
        return bool(units) and all(_is_constant_binding(unit) for unit in units)

    def _store(self, base: Values, values: Set[Origin], step: str = CONTENT) -> None:
        """Record that an object now holds other objects, under an attribute or as items."""
        kept = [v for v in values if v.kind in ("name", "parameter", "module", "every")]
        for container in base:
            if container.kind in ("name", "parameter") and not container.inside:
                changed = container._replace(attribute=_joined(container.attribute, step))
                self.summary.stores.update((changed, value) for value in kept)

    def _implicit(
        self,
        receiver: Values,
        names: Iterable[str],
        values: Values = NOTHING,
        kind: str = "instance",
    ) -> None:
        """Call the methods that syntax invokes, if a user's class defines them.

        Args:
            receiver: The objects.
            names: The methods.
            values: Their possible arguments.
            kind: ``function`` for the methods of a class itself.
        """
        program = self.program
        defined = [name for name in names if name in program.methods]
        if not defined:
            return
        for item in sorted(program.aliases(self._with_bindings(receiver))):
            if item.kind == kind and not item.inside and not item.attribute:
                for method in [program.method(item.place, name) for name in defined]:
                    if method:
                        self._apply(method, [receiver, values, values, values], {})

    def _call_getter(self, values: Values, name: str) -> None:
        """Call the code behind an attribute read: a property of that name, or ``__getattr__``."""
        program = self.program
        getters = [key for key in program.methods.get(name, ()) if program.is_property(key)]
        if getters:
            self._implicit(values, [name])
        self._implicit(values, _IMPLICIT_ATTRIBUTES)

    def _import(self, ref: ImportRef) -> None:
        program = self.program
        base: str | None = ref.module
        if ref.level:
            parts = self.module.package.split(".") if self.module.package else []
            kept = parts[: len(parts) - ref.level + 1]
            base = ".".join([*kept, ref.module] if ref.module else kept) if kept else None
        top = program.find(_root(base)) if base else None
        if base is None or top is None or top.kind != "own":
            if base is not None and ref.name == "*":
                self.library_stars[base] = None
                program.grow()
            elif base is not None:
                dotted = ref.refers if ref.name is None else f"{base}.{ref.name}"
                self._name(ref.bound, program.library(dotted))
            return
        module = program.find(base)
        if module is not None:
            self.summary.imports[module.name] = None
            program.source(module)
        if ref.name is None:
            whole = program.find(ref.refers)
            values = NOTHING if whole is None else program.module_value(whole)
        elif module is None:
            values = NOTHING
        else:
            if ref.name == "*":
                self.stars[module.name] = None
                program.grow()
                for submodule in program.starred(module):
                    self.summary.imports[submodule.name] = None
                    bound = submodule.name.rpartition(".")[2]
                    self._name(bound, program.module_value(submodule))
                return
            inner = program.find(f"{module.name}.{ref.name}")
            if inner is not None and inner.kind == "own":
                self.summary.imports[inner.name] = None
            values = program.member(module, ref.name)
        if ref.bound:
            self._name(ref.bound, values)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        value = self._function(node)
        self._name(node.name, frozenset({value}))
        self._decorate(node, value)

    def _decorate(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, value: Origin
    ) -> None:
        values = frozenset({value})
        if self.is_module:
            values |= {Origin("name", self.path, node.name)}
        for decorator in reversed(node.decorator_list):
            function = self.evaluate(decorator)
            receiver, name = NOTHING, ""
            inner = decorator
            if isinstance(inner, ast.Attribute):
                receiver, name = self.evaluate(inner.value), inner.attr
            result = self._invoke(function, receiver, name, [values], {}, None)
            if self.is_module:
                self._name(node.name, result)

    def _function(self, node: ast.AST) -> Origin:
        program = self.program
        key = program.register(node, self.module, self)
        self._parameters(node, key)
        return Origin("function", key, "")

    def _parameters(self, node: ast.AST, key: str) -> None:
        """Bind a function's parameters to the values of their defaults."""
        frame = self.program.code[key].frame
        arguments = getattr(node, "args", None)
        if not isinstance(arguments, ast.arguments):
            return
        plain = [*arguments.posonlyargs, *arguments.args]
        for position, argument in enumerate(plain):
            frame.names.setdefault(argument.arg, set()).add(Origin("parameter", key, str(position)))
        for argument in arguments.kwonlyargs:
            frame.names.setdefault(argument.arg, set()).add(Origin("parameter", key, argument.arg))
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                value = Origin("parameter", key, "*", "", True)
                frame.names.setdefault(rest.arg, set()).add(value)
        defaults = arguments.defaults
        for argument, default in zip(plain[len(plain) - len(defaults) :], defaults, strict=True):
            frame.names[argument.arg] |= self._default(default, key)
        for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if given is not None:
                frame.names[argument.arg] |= self._default(given, key)

    def _default(self, node: ast.expr, key: str) -> Values:
        values = self.evaluate(node)
        return values | ({Origin("state", key, "")} if isinstance(node, _MADE) else NOTHING)

    def _define_class(self, node: ast.ClassDef) -> None:
        program = self.program
        key = program.register(node, self.module, self)
        body = program.code[key].frame
        body.is_class = True
        body.summary = self.summary
        value = Origin("function", key, "")
        values = frozenset({value})
        if self.is_module:
            values |= {Origin("name", self.path, node.name)}
            program.classes[key] = Origin("name", self.path, node.name)
        self._name(node.name, frozenset({value}))
        bases = [self.evaluate(base) for base in node.bases]
        keywords = {item.arg or "*": self.evaluate(item.value) for item in node.keywords}
        for statement in node.body:
            body.statement(statement)
        for name, bound in body.names.items():
            for item in list(bound):
                if item.kind == "function" and not item.inside:
                    program.methods.setdefault(name, set()).add(item.place)
                if item.kind == "instance" and not item.inside:
                    setter = program.method(item.place, "__set_name__")
                    if setter:
                        self._apply(setter, [frozenset({item}), values, NOTHING], {})
        self._make_subclass(values, bases, keywords)
        self._decorate(node, value)

    def _make_subclass(
        self, values: Values, bases: list[Values], keywords: dict[str, Values]
    ) -> None:
        """Apply the effects of creating a class: calls into its bases and its metaclasses."""
        program = self.program
        given: Values = frozenset(item for options in keywords.values() for item in options)
        classes = values or frozenset().union(*bases)
        for base in bases:
            for item in sorted(program.aliases(base)):
                key = program.class_of(item)
                if not key:
                    continue
                for owner, _ in program.lineage(key):
                    if owner in program.classes:
                        write = program.classes[owner]._replace(attribute=SUBCLASSES)
                        self.summary.writes.add(write)
                hook = program.method(key, "__init_subclass__")
                if hook:
                    self._apply(hook, [classes, given], {})
        metaclasses = [keywords.get("metaclass", NOTHING)]
        for base in bases:
            for item in sorted(program.aliases(base)):
                for _, node in program.lineage(program.class_of(item)):
                    options = [k.value for k in node.keywords if k.arg == "metaclass"]
                    metaclasses += [self.evaluate(option) for option in options]
        for metaclass in metaclasses:
            for item in sorted(program.aliases(metaclass)):
                key = program.class_of(item)
                for name in ("__prepare__", "__new__", "__init__") if key else ():
                    hook = program.method(key, name)
                    if hook:
                        self._apply(hook, [classes, given, classes, given], {})

    # Expressions

    def evaluate(self, node: ast.expr | None, *, bare: bool = False) -> Values:
        """Return the values that an expression may denote.

        Args:
            node: The expression.
            bare: Whether its result is unused.
        """
        if node is None or isinstance(node, ast.Constant):
            return NOTHING
        if isinstance(node, ast.Name):
            return self._lookup(node.id)
        if isinstance(node, ast.Attribute):
            values = self.evaluate(node.value)
            self._call_getter(values, node.attr)
            return self._attribute(values, node.attr)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Call):
            return self._call(node, bare)
        if isinstance(node, ast.Lambda):
            return frozenset({self._function(node)})
        if isinstance(node, ast.NamedExpr):
            values = self.evaluate(node.value)
            self._bind(node.target, values, node.value)
            return values
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return _held(value for item in node.elts for value in self.evaluate(item))
        if isinstance(node, ast.Dict):
            parts = [*(key for key in node.keys if key is not None), *node.values]
            return _held(value for item in parts for value in self.evaluate(item))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node)
        if isinstance(node, ast.IfExp):
            self.evaluate(node.test)
            return self.evaluate(node.body, bare=bare) | self.evaluate(node.orelse, bare=bare)
        if isinstance(node, ast.BoolOp):
            return frozenset(v for item in node.values for v in self.evaluate(item, bare=bare))
        if isinstance(node, (ast.Await, ast.Starred)):
            return self.evaluate(node.value, bare=bare)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self.summary.returns |= _held(self.evaluate(node.value))
            return NOTHING
        if isinstance(node, ast.BinOp):
            left, right = self.evaluate(node.left), self.evaluate(node.right)
            self._implicit(left, _BINARY, right)
            self._implicit(right, _BINARY, left)
            return left | right if bare else _held(left | right)
        if isinstance(node, ast.Compare):
            compared = [self.evaluate(child) for child in (node.left, *node.comparators)]
            others = frozenset(value for values in compared for value in values)
            for values in compared:
                self._implicit(values, _COMPARED, others)
            return NOTHING
        if isinstance(node, ast.FormattedValue):
            self._implicit(self.evaluate(node.value), _SHOWN)
            self.evaluate(node.format_spec)
            return NOTHING
        if isinstance(node, ast.UnaryOp):
            values = self.evaluate(node.operand)
            self._implicit(values, _UNARY)
            return _held(values)
        if isinstance(node, ast.JoinedStr):
            for child in node.values:
                self.evaluate(child)
            return NOTHING
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return _held(value for child in children for value in self.evaluate(child))

    def _lookup(self, name: str) -> Values:
        for scope in reversed(self._scopes):
            if name in scope:
                return frozenset(scope[name])
        frame: _Frame | None = self
        while frame is not None and not frame.is_module:
            is_visible = frame is self or not frame.is_class
            if is_visible and name in frame.names and name not in frame._globals:
                kept = frame is not self and not self.is_class and not frame.is_class
                return frozenset(frame.names[name]) | ({self._state} if kept else NOTHING)
            frame = frame.parent
        source = self.program.sources.get(self.path)
        if source is not None:
            is_bound = name in source.units and (name not in BUILTINS or name in source.bound)
            if is_bound or (source.stars and name not in BUILTINS):
                return frozenset({Origin("name", self.path, name)})
        if name in self.names:
            return frozenset(self.names[name])
        return frozenset({Origin("builtin", "", name)})

    def _attribute(self, values: Values, name: str) -> Values:
        program = self.program
        found: set[Origin] = set()
        for value in values:
            foreign = [
                other
                for other in program.aliases([value])
                if other.kind in ("module", "library", "inert") and not other.inside
            ]
            for other in foreign or [value]:
                found |= program.read(other, name)
                module = program.find(other.place) if other.kind == "module" else None
                if module is not None and name == "__dict__":
                    found.add(Origin("every", str(module.path), ""))
        return frozenset(values | found if name in ("__class__", "__dict__") else found)

    def _item(self, node: ast.Subscript) -> Values:
        values = self.evaluate(node.value)
        index = self.evaluate(node.slice)
        self._implicit(values, ("__getitem__", "__missing__"), index)
        self._implicit(values, ("__class_getitem__",), index, kind="function")
        literal = node.slice.value if isinstance(node.slice, ast.Constant) else None
        found: set[Origin] = set()
        for value in self.program.aliases(values):
            if value.kind == "library" and value.name == "sys.modules":
                return self._module_named(node.slice)
            if value.kind == "every" and isinstance(literal, str):
                found.add(Origin("name", value.place, literal))
        return frozenset(found) or _opened(values)

    def _module_named(self, node: ast.expr | None) -> Values:
        if isinstance(node, ast.Name) and node.id == "__name__":
            return frozenset({Origin("module", self.module.name, "")})
        name = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(name, str):
            return frozenset({Origin("library", "", "sys.modules")})
        module = self.program.find(name.lstrip("."))
        return NOTHING if module is None else self.program.module_value(module)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Values:
        scope: dict[str, set[Origin]] = {}
        for generator in node.generators:
            values = self.evaluate(generator.iter)
            self._implicit(values, _ITERATED)
            values = _opened(values)
            for inner in ast.walk(generator.target):
                if isinstance(inner, ast.Name):
                    scope.setdefault(inner.id, set())
            self._scopes.append(scope)
            self._bind(generator.target, values)
            for condition in generator.ifs:
                self.evaluate(condition)
            self._scopes.pop()
        self._scopes.append(scope)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        found = [value for element in elements for value in self.evaluate(element, bare=True)]
        self._scopes.pop()
        return _held(found)

    # Calls

    def _call(self, node: ast.Call, bare: bool) -> Values:
        receiver, name = NOTHING, ""
        chained = False
        if isinstance(node.func, ast.Attribute):
            receiver, name = self.evaluate(node.func.value), node.func.attr
            self._call_getter(receiver, name)
            chained = isinstance(node.func.value, ast.Call)
            function = self._attribute(receiver, name)
        else:
            function = self.evaluate(node.func)
        arguments = [self.evaluate(item) for item in node.args]
        keywords: dict[str, Values] = {}
        for item in node.keywords:
            keywords[item.arg or "*"] = keywords.get(item.arg or "*", NOTHING) | self.evaluate(
                item.value
            )
        special = self._special(node, function, receiver, name, arguments, bare)
        if special is not None:
            return special
        if any(isinstance(item, ast.Starred) for item in node.args):
            spread = _opened(value for given in arguments for value in given)
            arguments = [*arguments, *[spread | given for given in arguments] * 3]
        if bare and chained and any(item.kind == "new" for item in receiver):
            self.summary.writes.add(LIBRARY)
        return _bounded(self._invoke(function, receiver, name, arguments, keywords, bare))

    def _special(
        self,
        node: ast.Call,
        function: Values,
        receiver: Values,
        name: str,
        arguments: list[Values],
        bare: bool,
    ) -> Values | None:
        """Handle functions that access names by strings; None for other functions."""
        names = {item.name for item in self.program.aliases(function) if item.kind == "library"}
        builtin = {item.name for item in function if item.kind == "builtin"} if not name else set()
        texts = [item.value if isinstance(item, ast.Constant) else None for item in node.args]
        everything = frozenset({Origin("every", self.path, "")})
        if (names | builtin) & IMPORTERS and "find_spec" not in " ".join(names):
            return self._import_call(node, texts[0] if texts else None)
        if names & RUNNERS:
            self.summary.unknown_imports.add((self.path, node.lineno))
            return NOTHING
        if builtin & {"globals", "locals"} or (builtin & {"vars"} and not node.args):
            if "locals" in builtin and not self.is_module:
                return NOTHING
            return everything
        if builtin & {"vars"} and arguments:
            modules = [item for item in self.program.aliases(arguments[0]) if item.kind == "module"]
            places = [self.program.find(item.place) for item in modules]
            every = {Origin("every", str(m.path), "") for m in places if m is not None}
            return frozenset(every) or arguments[0]
        if builtin & {"exec", "eval", "compile"}:
            if "compile" not in builtin:
                self._run_text(texts[0] if texts else None, "exec" in builtin)
            return NOTHING
        target = receiver if name in ("__setattr__", "__delattr__") else None
        if builtin & {"setattr", "delattr"} and arguments:
            target = arguments[0]
        elif target is not None and any(item.kind == "builtin" for item in receiver):
            target = arguments[0] if arguments else NOTHING
        if target is not None:
            text = next((text for text in texts[:2] if isinstance(text, str)), None)
            self._set_attribute(target, text)
            stored = frozenset(value for given in arguments[1:] for value in given)
            self._store(target, stored, text or CONTENT)
            return NOTHING
        if builtin & {"getattr"} and len(arguments) > 1:
            default = frozenset(value for given in arguments[2:] for value in given)
            if isinstance(texts[1], str):
                return self._attribute(arguments[0], texts[1]) | default
            modules = [item for item in self.program.aliases(arguments[0]) if item.kind == "module"]
            places = [self.program.find(item.place) for item in modules]
            every = {Origin("every", str(m.path), "") for m in places if m is not None}
            return frozenset(every) | _opened(arguments[0]) | default
        if builtin & {"type"} and len(arguments) == 1:
            return arguments[0] | _opened(arguments[0], "__class__")
        if builtin & {"type"} and len(arguments) == 3:
            self._make_subclass(NOTHING, [_opened(arguments[1])], {})
            return _held(arguments[1] | arguments[2])
        if builtin & {"super"} and self.parent is not None:
            return frozenset(item for values in list(self.names.values())[:1] for item in values)
        return None

    def _import_call(self, node: ast.Call, text: object) -> Values:
        if not isinstance(text, str):
            self.summary.unknown_imports.add((self.path, node.lineno))
            return NOTHING
        name = text.lstrip(".")
        if text != name:
            parts = self.module.package.split(".")
            name = ".".join([*parts[: len(parts) - (len(text) - len(name)) + 1], name])
        for prefix, module in self.program.finder.chain(name):
            if module is not None and module.kind == "own":
                self.summary.imports[prefix] = None
        module = self.program.find(name)
        return self.program.library(name) if module is None else self.program.module_value(module)

    def _run_text(self, text: object, is_exec: bool) -> None:
        """Execute a string passed to `exec` or `eval`. A computed string may do anything."""
        if isinstance(text, str):
            if text not in self.program.texts:
                try:
                    self.program.texts[text] = ast_digest.parse(text)
                except (SyntaxError, ValueError):
                    return
            for statement in self.program.texts[text].body:
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        self.summary.writes.add(Origin("name", self.path, inner.id))
                self.statement(statement)
        elif is_exec:
            self.summary.writes |= {Origin("every", self.path, ""), LIBRARY}

    def _invoke(
        self,
        function: Values,
        receiver: Values,
        name: str,
        arguments: list[Values],
        keywords: dict[str, Values],
        bare: bool | None,
    ) -> Values:
        """Call each function that a value may denote, and return the possible results.

        `bare` means that the result is unused; it is None for a decorator call.
        """
        program = self.program
        everything = [*arguments, *keywords.values()]
        passed: Values = frozenset(value for given in everything for value in given)
        found: set[Origin] = set()
        known = False
        if self._is_inert_parameter(receiver if name else function):
            return frozenset({_INERT_VALUE})
        targets = program.aliases(self._with_bindings(function))
        bound = [item._replace(inside=False) for item in targets if item.inside]
        if bound:  # as with functools.partial
            arguments = [given | frozenset(bound) for given in [*arguments, *map(_one, bound)]]
        kinds = {item.kind for item in targets if not item.inside}
        for item in sorted(targets):
            if item.inside:
                continue
            if item.kind == "function" and not item.attribute:
                known = True
                result = self._run_function(item, arguments, keywords)
                found |= self._with_state(item, function, result)
            elif item.attribute and name != item.attribute and self._is_method(item):
                known = True  # a method bound to a name: ``register = registry.register``
                owner = frozenset({item._replace(attribute="")})
                found |= self._call_method(owner, item.attribute, arguments, keywords, passed, bare)
            elif item.kind == "library":
                known = True
                found |= self._call_library(item.name, passed, everything, bare)
            elif item.kind == "inert":
                known = True
                found.add(item)
            elif item.kind == "builtin" and not receiver:
                known = True
                found |= self._call_builtin(item.name, passed, everything, bare)
            elif item.kind == "instance" and not item.attribute:
                method = program.method(item.place, "__call__")
                if method:
                    known = True
                    self._construct_late(item.place, function)
                    found |= self._apply(method, [function, *arguments], keywords)
        if "inert" in kinds and not any(item.kind == "parameter" for item in function):
            return frozenset(found)
        libraries = {item.name for item in targets if item.kind == "library"}
        only_wraps = bool(libraries) and libraries <= DECORATORS | {"functools.partial"}
        if (
            bare is not None
            and not only_wraps
            and kinds != {"function"} | kinds & {"name", "module"}
        ):
            self._call_passed(passed, everything, found)
        objects = frozenset(item for item in receiver if not program.is_module(item))
        if name and "library" not in kinds and (objects or not receiver):
            found |= self._call_method(objects, name, arguments, keywords, passed, bare)
        elif not known:
            given = passed | {item for item in function if item.kind != "state"}
            self._write_passed(given)
            found |= _held(given)
        return frozenset(found)

    def _with_state(self, called: Origin, function: Values, result: Values) -> Values:
        """Return the result of a call, given that the called function may keep state.

        A change of that state is a change of the function. A result taken from that state, or from
        a cache, belongs to the function.
        """
        state = Origin("state", called.place, "")
        node = self.program.code[called.place].node
        held = [item for item in function if item.kind in ("name", "parameter")]
        if state in self.program.summary(called.place).writes:
            self._write(held)
        decorators = getattr(node, "decorator_list", ())
        is_cached = any(_last_name(item) in _CACHES for item in decorators)
        own = {item for item in result if item.kind == "state" and item.place == called.place}
        return result - own | (_opened(held) if own or is_cached else NOTHING)

    def _is_method(self, item: Origin) -> bool:
        if item.kind not in ("name", "instance") or item.inside:
            return False
        key = self.program.class_of(item._replace(attribute=""))
        return bool(key) and bool(self.program.method(key, item.attribute))

    def _with_bindings(self, values: Values) -> Values:
        """Add to parameters the values that any call passed for them."""
        found: set[Origin] = set()
        stack = list(values)
        while stack:
            item = stack.pop()
            if item in found:
                continue
            found.add(item)
            if item.kind == "parameter":
                bound = frozenset(self.program.bindings.get((item.place, item.name), ()))
                given = _at(bound, item.attribute)
                stack += _held(given) if item.inside else given
        return frozenset(found)

    def _is_inert_parameter(self, values: Values) -> bool:
        """Return whether values are parameters to which only inert values are ever passed."""
        if not any(item.kind == "parameter" for item in values):
            return False
        given = [item for item in self._with_bindings(values) if item.kind != "parameter"]
        return bool(given) and all(
            any(other.kind == "inert" for other in self.program.aliases([item])) for item in given
        )

    def _run_function(
        self, item: Origin, arguments: list[Values], keywords: dict[str, Values]
    ) -> Values:
        if isinstance(self.program.code[item.place].node, ast.ClassDef):
            return self._construct(item, arguments, keywords)
        return self._apply(item.place, arguments, keywords)

    def _construct(
        self, item: Origin, arguments: list[Values], keywords: dict[str, Values]
    ) -> Values:
        program = self.program
        passed = frozenset(v for given in [*arguments, *keywords.values()] for v in given)
        instance = frozenset({Origin("instance", item.place, "")}) | _held(passed)
        if is_lazy(program.code[item.place].node):
            return instance
        for name in ("__new__", "__init__", "__post_init__", "__enter__", "__exit__"):
            method = program.method(item.place, name)
            if method:
                given = arguments if name in ("__new__", "__init__") else []
                self._apply(method, [instance, *given], keywords)
        return instance

    def _construct_late(self, key: str, receiver: Values) -> None:
        """Apply the effects of constructing a lazy instance, when one of its methods is called."""
        program = self.program
        constructor = program.method(key, "__init__") if is_lazy(program.code[key].node) else ""
        if constructor:
            self._apply(constructor, [receiver], {})

    def _call_method(
        self,
        receiver: Values,
        name: str,
        arguments: list[Values],
        keywords: dict[str, Values],
        passed: Values,
        bare: bool | None,
    ) -> Values:
        program = self.program
        found: set[Origin] = set()
        owners = {
            key
            for item in program.aliases(self._with_bindings(receiver))
            if not item.inside and not item.attribute and (key := program.class_of(item))
        }
        for key in sorted(owners):
            self._construct_late(key, receiver)
        methods = {method for key in owners for method in program.methods_of(key, name)}
        is_unknown = not owners or not all(program.method(key, name) for key in owners)
        if is_unknown and receiver and name not in ITEM_WRITERS | READERS:
            # It may be any method of that name, or a library's.
            methods |= program.methods.get(name, set())
        for method in sorted(methods):
            found |= self._apply(method, [receiver, *arguments], keywords)
            decorated = getattr(program.code[method].node, "decorator_list", ())
            if any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in decorated):
                found |= self._apply(method, arguments, keywords)
        if methods and not is_unknown:
            return frozenset(found)
        if name in READERS:
            items = _opened(receiver)
            return frozenset(found) | _held(passed) | (items if name in GETTERS else _held(items))
        if name in _PATH_WRITERS and bare:
            self.summary.writes.add(LIBRARY)
        kinds = {item.kind for item in program.aliases(receiver) if not item.inside}
        if "builtin" in kinds and arguments:
            self._write(arguments[0])  # as in dict.update(D, a=1)
        is_library = "new" in kinds or "value" in kinds
        if is_library and name not in ITEM_WRITERS and is_state_verb(name):
            self.summary.writes.add(LIBRARY)
        self._write(
            item
            for item in receiver
            if bare or item.kind != "value"  # otherwise it is called for its result
        )
        self._store(receiver, passed)
        if name not in ITEM_WRITERS and receiver:
            self._write_passed(passed)
        return frozenset(found) | _held(passed) | _opened(receiver)

    def _call_passed(self, passed: Values, everything: list[Values], found: set[Origin]) -> None:
        """Call the functions that are passed to a call, with the other arguments."""
        functions = {
            item
            for item in self.program.aliases(self._with_bindings(passed))
            if item.kind == "function" and not item.attribute
        }
        for item in sorted(functions):
            if isinstance(self.program.code[item.place].node, ast.ClassDef):
                continue
            others = frozenset(
                v for given in everything if item not in self.program.aliases(given) for v in given
            )
            opened = others | _opened(others)
            count = len(
                getattr(getattr(self.program.code[item.place].node, "args", None), "args", ())
            )
            found |= self._apply(item.place, [opened] * count, {})

    def _call_library(
        self, name: str, passed: Values, everything: list[Values], bare: bool | None
    ) -> Values:
        if not name:
            self.summary.writes.add(LIBRARY)  # it may be any function
            return frozenset({LIBRARY})
        root = _root(name)
        last = name.rpartition(".")[2]
        if (root in PURE or name.startswith(PURE_NAMES)) and name not in IMPURE:
            if name == "functools.partial":
                functions = {v for given in everything[:1] for v in given}
                return frozenset(functions) | _held(passed - functions)
            if name in DECORATORS:
                is_function = passed and name != "functools.wraps"
                return passed if is_function else frozenset({Origin("library", "", DECORATOR)})
            return _held(passed)
        if name not in IMPURE and (bare or is_state_verb(last, assigned=True)):
            self.summary.writes.add(Origin("library", "", name))
        self._write_passed(passed)
        if name in IMPURE:
            return passed
        kind = "new" if last[:1].isupper() or root in FRESH else "value"
        return frozenset({Origin(kind, "", name)}) | _held(passed)

    def _call_builtin(
        self, name: str, passed: Values, everything: list[Values], bare: bool | None
    ) -> Values:
        if name not in BUILTINS:
            self._write_passed(passed)
            return _held(passed)
        if name in ("map", "filter") and everything:
            items = [_opened(given) for given in everything[1:]]
            return self._invoke(everything[0], NOTHING, "", items, {}, False) | _held(
                value for given in items for value in given
            )
        self._implicit(passed, _CONVERTED, passed)
        if name == "next":
            self._write(passed)
        if name in ("next", "iter", "reversed", "enumerate", "zip", "min", "max"):
            return _held(passed) | _held(_opened(passed))
        if name in ("list", "dict", "tuple", "set", "sorted"):
            return _held(_opened(passed))
        if name == "open":
            return frozenset({Origin("value", "", "io.open")})
        return NOTHING if name in SCALARS else _held(passed)

    def _apply(self, key: str, arguments: Sequence[Values], keywords: dict[str, Values]) -> Values:
        """Apply a user's function: its summary, with arguments in place of parameters."""
        call = (key, tuple(arguments), frozenset(keywords.items()))
        if call not in self.summary.applied:
            self.summary.applied[call] = NOTHING  # for recursive calls
            self.summary.applied[call] = self._applied(key, arguments, keywords)
        return self.summary.applied[call]

    def _applied(
        self, key: str, arguments: Sequence[Values], keywords: dict[str, Values]
    ) -> Values:
        program = self.program
        code = program.code[key]
        node_arguments = getattr(code.node, "args", None)
        names: list[str] = []
        if isinstance(node_arguments, ast.arguments):
            names = [a.arg for a in (*node_arguments.posonlyargs, *node_arguments.args)]
        rest = frozenset(v for given in arguments[len(names) :] for v in given)
        rest |= frozenset(v for n, given in keywords.items() if n not in names for v in given)

        own_keys = self.own_keys
        for position in range(len(names)):
            if position < len(arguments):
                bound = program.bindings.setdefault((key, str(position)), set())
                _bind(bound, (v for v in arguments[position] if v.place != key))
        for name, given in keywords.items():
            position_or_name = str(names.index(name)) if name in names else name
            bound = program.bindings.setdefault((key, position_or_name), set())
            _bind(bound, (v for v in given if v.place != key))
        summary = program.summary(key)
        known: dict[Origin, Values] = {}

        def replaced(value: Origin) -> Values:
            if value not in known:
                known[value] = found(value)
            return known[value]

        def found(value: Origin) -> Values:
            if value.kind == "parameter" and value.place != key and value.place not in own_keys:
                # From an enclosing function that has returned; it may be from any of its calls.
                return frozenset(
                    item
                    for item in self._with_bindings(frozenset({value}))
                    if item.kind != "parameter" or item.place in own_keys
                )
            if value.kind != "parameter" or value.place != key:
                return frozenset({value})
            given: Values = NOTHING
            if value.name.isdigit():
                position = int(value.name)
                if position < len(arguments):
                    given |= arguments[position]
                given |= keywords.get(names[position], NOTHING)
                given |= keywords.get("*", NOTHING)
            elif value.name == "*":
                given = rest
            else:
                given = keywords.get(value.name, NOTHING)
            given = _at(_bounded(given), value.attribute)
            return _held(given) if value.inside else given

        for write in list(summary.writes):
            if write.kind == "parameter":
                self._write(replaced(write))
            elif write.kind != "state" or write.place != key:
                self.summary.writes.add(write)
        stored: dict[Origin, set[Origin]] = {}
        for container, value in list(summary.stores):
            stored.setdefault(container, set()).update(replaced(value))
        for container, values in stored.items():
            self._store(replaced(container._replace(attribute="")), values, container.attribute)
        self.summary.imports.update(summary.imports)
        self.summary.unknown_imports |= summary.unknown_imports
        returned = frozenset(v for value in list(summary.returns) for v in replaced(value))
        return _bounded(returned)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _loaded(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    if isinstance(node, ast.Attribute):
        return ast.Attribute(node.value, node.attr, ast.Load())
    if isinstance(node, ast.Subscript):
        return ast.Subscript(node.value, node.slice, ast.Load())
    return node


def _is_plain(node: ast.expr) -> bool:
    """Return whether a value is clearly a number or string, not a list or dict."""
    if isinstance(node, (ast.Tuple,)):
        return False
    return isinstance(node, (ast.Constant, ast.JoinedStr))


def _is_constant_binding(unit: SymbolSource) -> bool:
    node = unit.nodes[-1]
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    return value is not None and _is_constant(value)


def _is_constant(node: ast.expr) -> bool:
    """Return whether an expression clearly gives an immutable value."""
    if isinstance(node, ast.Tuple):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left) and _is_constant(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    if isinstance(node, ast.Call):
        root = ast_digest.root_name(node.func)
        return root in ("str", "int", "float", "bool", "len", "bytes", "Path", "frozenset", "re")
    return isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare))
