"""Locates modules without running them, and distinguishes the user's from installed ones."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from typing import Any, Literal

from vane_dagster.fingerprint.ast_digest import ImportRef, Scan
from vane_dagster.fingerprint.module_attributes import module_attribute, module_folders
from vane_dagster.fingerprint.symbols import SourceFile, SymbolSource, load_source

ModuleKind = Literal["own", "installed", "stdlib", "self"]
_SITE_NAMES = ("site-packages", "dist-packages")
MAIN_NAMES = ("__main__", "__mp_main__")


@dataclass(frozen=True)
class Module:
    """The location of a module.

    Attributes:
        name: The dotted name.
        kind: ``own`` for the user's, ``installed``, ``stdlib``, or ``self`` for this package's.
        path: The file; None for a namespace package.
        search: The folders of a package; None for any other module.
    """

    name: str
    kind: ModuleKind
    path: str | None
    search: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """The module's name in a digest; a script is named by its file."""
        if not self.is_main:
            return self.name
        spec = module_attribute(sys.modules.get(self.name), "__spec__")
        stem = os.path.splitext(os.path.basename(self.path or self.name))[0]
        return spec.name if spec is not None else stem

    @property
    def is_main(self) -> bool:
        """Whether the module is the script that runs."""
        return self.name in MAIN_NAMES

    @property
    def is_source(self) -> bool:
        """Whether the module is a Python source file."""
        return self.path is not None and self.path.endswith((".py", ".pyw"))

    @property
    def package(self) -> str:
        """The package that the module's relative imports start from."""
        return self.label if self.search is not None else self.label.rpartition(".")[0]


@dataclass(frozen=True)
class ImportTarget:
    """A module that an import leads to.

    Attributes:
        role: ``whole`` for an imported module, ``passing`` for a parent package on the way to one,
            ``package`` for an installed package, ``missing`` for a module that does not exist.
        name: The dotted name.
        attribute: The name that is taken from the module, if any.
        module: The module; None if it is installed or missing.
        line: The line number of the import.
    """

    role: Literal["whole", "passing", "package", "missing"]
    name: str
    attribute: str | None = None
    module: Module | None = None
    line: int = 0


@functools.lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    """Return the folders of the standard library; folders in them may hold installed packages."""
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    paths.add(os.path.dirname(os.path.abspath(os.__file__)))
    both = {os.path.abspath(path) for path in paths} | {os.path.realpath(path) for path in paths}
    return tuple(sorted(path.rstrip(os.sep) + os.sep for path in both))


@functools.lru_cache(maxsize=1)
def _targets() -> tuple[str, ...]:
    """What `pip install --target` put into other folders of `sys.path`: folders and modules."""
    folders: set[str] = set()
    for folder in map(os.path.abspath, sys.path):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in names if not folder.endswith(_SITE_NAMES) else []:
            if name.endswith(".dist-info"):
                files = Distribution.at(os.path.join(folder, name)).files or ()
                folders.update(os.path.join(folder, *file.parts[:1], "") for file in files)
    return tuple(each if os.path.isdir(each) else each.rstrip(os.sep) for each in sorted(folders))


_declaring: set[str] = set()
_declared_path: list[str] = []
"""The folders of `sys.path` when stages were declared: Dagster adds some while it loads them."""


def count_as_own(module: str) -> None:
    """Count the package of a module that declares stages as the user's, even if it is installed.

    Also keep the folders that it is imported from.
    """
    _declared_path.extend(p for p in map(os.path.abspath, sys.path) if p not in _declared_path)
    top = module.partition(".")[0]
    if top not in _declaring:
        _declaring.add(top)
        path_kind.cache_clear()


def _declaring_places() -> tuple[str, ...]:
    """Return the folders and files of the packages and modules that declare stages."""
    places: list[str] = []
    for module in map(sys.modules.get, _declaring):
        file = module_attribute(module, "__file__")
        folders = module_folders(module)
        places += [os.path.join(os.path.abspath(each), "") for each in folders or ()]
        places += [os.path.abspath(file)] if file and folders is None else []
    return tuple(places)


@functools.lru_cache(maxsize=16384)
def path_kind(path: str) -> ModuleKind:
    """Return the kind of a source file, or of a folder whose path ends with a separator."""
    path = os.path.abspath(path) + (os.sep if path.endswith(os.sep) else "")
    is_in_site = any(name in path.split(os.sep) for name in _SITE_NAMES)
    if is_in_site or path.startswith(_targets()):
        return "own" if path.startswith(_declaring_places()) else "installed"
    return "stdlib" if path.startswith(_standard()) else "own"


@dataclass
class Finder:
    """Locates modules by name, first in `sys.modules`, then on the path.

    It caches its answers and the files that it read, so a walk sees a consistent state.

    Attributes:
        reached: What the statements of these files name; see `effects.Effects`.
    """

    _known: dict[str, Module | None] = field(default_factory=dict)
    _sources: dict[str, SourceFile] = field(default_factory=dict)
    reached: dict[Any, Any] = field(default_factory=dict)

    def source(self, path: str) -> SourceFile:
        """Return a parsed file."""
        if path not in self._sources:
            self._sources[path] = load_source(path)
        return self._sources[path]

    def find(self, name: str) -> Module | None:
        """Return the location of a module, or None if it cannot be found. Imports nothing."""
        if name not in self._known:
            self._known[name] = self._locate(name)
        return self._known[name]

    def _locate(self, name: str) -> Module | None:
        parent_name, _, _ = name.rpartition(".")
        if name.partition(".")[0] == __name__.partition(".")[0]:
            return Module(name, "self", None)
        loaded = sys.modules.get(name)
        if isinstance(loaded, types.ModuleType):  # not an object that a module put in its place
            return self._loaded(name, loaded)
        located = self._on_path(name, parent_name)
        return self._loaded(name, loaded) if located is None and loaded is not None else located

    def _on_path(self, name: str, parent_name: str) -> Module | None:
        search: Iterable[str] | None = None
        if parent_name:
            parent = self.find(parent_name)
            if parent is None or parent.search is None:
                return None
            search = parent.search
        spec = _find_spec(name, search)
        if spec is None and search is None:
            spec = _find_spec(name, _declared_path)
        if spec is None:
            return None
        if spec.origin in ("built-in", "frozen"):
            return Module(name, "stdlib", None)
        locations = spec.submodule_search_locations
        folders = None if locations is None else tuple(locations)
        path = spec.origin if spec.has_location else None
        return _classified(name, path, folders)

    def _loaded(self, name: str, loaded: Any) -> Module:
        origin = getattr(module_attribute(loaded, "__spec__"), "origin", None)
        if origin in ("built-in", "frozen"):
            return Module(name, "stdlib", None)
        path = module_attribute(loaded, "__file__")
        if isinstance(origin, str) and (path is None or path.endswith(".pyc")):
            path = origin if os.path.isfile(origin) else path
        folders = module_folders(loaded)
        if path is None and folders is None and name not in MAIN_NAMES:
            # A module object created in memory, as six does, belongs to its package.
            parent = self.find(name.rpartition(".")[0]) if "." in name else None
            return Module(name, parent.kind if parent else "installed", None)
        return _classified(name, path, folders)

    def below(self, name: str) -> list[str]:
        """Return the names of all modules in the folders of a package."""
        package = self.find(name)
        folders = (package.search or ()) if package is not None else ()
        return [item for folder in folders for item in submodules(folder, name)]

    def chain(self, name: str) -> Iterator[tuple[str, Module | None]]:
        """Yield every parent package of a module, then the module itself."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            yield prefix, self.find(prefix)

    def targets(self, importer: Module, ref: ImportRef) -> Iterator[ImportTarget]:
        """Yield the modules that one imported name leads to."""
        base = absolute(importer, "." * ref.level + ref.module)
        if base is None:
            yield ImportTarget("missing", "." * ref.level + ref.module, line=ref.line)
            return
        top = base.partition(".")[0]
        first = self.find(top)
        if first is None or first.kind != "own":
            if first is None and ref.level:
                yield ImportTarget("missing", base, line=ref.line)
            elif first is None or first.kind == "installed":
                yield ImportTarget("package", top, line=ref.line)
            return
        located: Module | None = None
        for name, located in self.chain(base):
            if located is None:
                yield ImportTarget("missing", name, line=ref.line)
                return
            if name != base:
                part = base[len(name) + 1 :].partition(".")[0]
                yield ImportTarget("passing", name, part, module=located, line=ref.line)
        yield from self._imported(located, base, ref)

    def is_own(self, path: str) -> bool:
        """Return whether a path is one of the user's modules, or lies in one."""
        module = self.find(path.partition(".")[0]) if path[:1] != "." else None
        return path[:1] == "." or (module is not None and module.kind == "own")

    def own_imports(self, importer: Module, unit: SymbolSource) -> list[str]:
        """Return the own modules that a statement imports, also inside functions."""
        targets = [each for ref in unit.scan.imports for each in self.targets(importer, ref)]
        return [target.name for target in targets if target.module is not None]

    def _imported(
        self, located: Module | None, base: str, ref: ImportRef
    ) -> Iterator[ImportTarget]:
        if ref.name is None or ref.name == "*":
            yield ImportTarget("whole", base, module=located, line=ref.line)
            for name in self.below(base) if ref.name == "*" else ():
                yield ImportTarget("whole", name, module=self.find(name), line=ref.line)
            return
        inner = self.find(f"{base}.{ref.name}")
        if inner is not None:
            yield ImportTarget("passing", base, ref.name, module=located, line=ref.line)
            yield ImportTarget("whole", inner.name, module=inner, line=ref.line)
        elif located is not None and located.path is None:
            yield ImportTarget("missing", f"{base}.{ref.name}", line=ref.line)
        else:
            yield ImportTarget("whole", base, ref.name, located, ref.line)

    def attribute_targets(self, importer: Module, scan: Scan) -> Iterator[ImportTarget]:
        """Yield the own modules that dotted names use: ``a.b`` for ``a.b.f()``."""
        for path in sorted(scan.paths):
            top, *parts = (absolute(importer, path) or "").split(".")
            module = self.find(top) if top else None
            if module is None or module.kind != "own":
                continue
            attribute: str | None = None
            for part in parts:
                inner = self.find(f"{module.name}.{part}") if module.search is not None else None
                if inner is None:
                    attribute = part
                    break
                yield ImportTarget("passing", module.name, part, module)
                module = inner
            yield ImportTarget("whole", module.name, attribute, module)


_reading: ContextVar[Finder | None] = ContextVar("_reading", default=None)


@contextlib.contextmanager
def files_read_once() -> Iterator[None]:
    """Within it, identities and values read each file once, and share what statements reach."""
    token = _reading.set(_reading.get() or Finder())
    try:
        yield
    finally:
        _reading.reset(token)


def reading_finder() -> Finder:
    """Return the finder of `files_read_once`, else a new one."""
    return _reading.get() or Finder()


def _classified(name: str, path: str | None, folders: tuple[str, ...] | None) -> Module:
    if path is not None:
        path = os.path.abspath(path)
        return Module(name, path_kind(path), path, folders)
    kinds = {path_kind(folder + os.sep) for folder in folders or ()}
    kind: ModuleKind = "own" if "own" in kinds or not kinds else "installed"
    return Module(name, kind, None, folders)


def _find_spec(name: str, search: Iterable[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Locate one level of a name."""
    folders = None if search is None else list(search)
    with warnings.catch_warnings():  # a library may warn about its own old names
        warnings.simplefilter("ignore")
        for finder in sys.meta_path:
            try:
                spec = finder.find_spec(name, folders)
            except KeyError:  # a folder without `__init__` in another one that is not imported
                places = [os.path.join(each, name.rpartition(".")[2]) for each in folders or ()]
                spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = [each for each in places if os.path.isdir(each)]
            if isinstance(spec, importlib.machinery.ModuleSpec):
                return spec
    return None


def absolute(importer: Module, path: str) -> str | None:
    """Return a module's path without leading dots; None if they lead out of the package."""
    name = path.lstrip(".")
    if not (level := len(path) - len(name)):
        return path
    parts = importer.package.split(".") if importer.package else []
    if level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name])])


def submodules(folder: str, name: str) -> Iterator[str]:
    """Yield the names of all modules in the folder of a package."""
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        stem, suffix = os.path.splitext(entry.name)
        if entry.is_file() and suffix == ".py" and stem != "__init__":
            yield f"{name}.{stem}"
        elif entry.is_dir() and entry.name.isidentifier() and entry.name != "__pycache__":
            yield f"{name}.{entry.name}"
            yield from submodules(entry.path, f"{name}.{entry.name}")
