"""Collects what code reaches: names of its file, modules of the user's, installed packages."""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Iterable

from vane_dagster.errors import CodeIdentityError
from vane_dagster.plan.hashing import combine, file_digest
from vane_dagster.plan.introspection import Counting
from vane_dagster.plan.modules import Finder, Module, Target
from vane_dagster.plan.syntax import ImportRef, Scan
from vane_dagster.plan.units import SourceFile, Unit

_BUILTINS = frozenset(dir(builtins))
_OWN_LABEL = "."


class Reach:
    """The transitive walk from a UDF; `own` is the module in which names count one by one."""

    def __init__(self, finder: Finder, own: Module | None) -> None:
        self.finder = finder
        self.modules: set[str] = set()
        self.packages: set[str] = set()
        self._own = own
        self._facts: dict[str, str] = {}
        self._waiting: deque[tuple[Module, str, Unit | None]] = deque()
        self._seen: set[tuple[str, str, int]] = set()
        self._whole: set[str] = set()
        self._walked: dict[int, tuple[Module, Unit]] = {}
        self.hints_of: frozenset[str] = frozenset()

    def digest(self) -> str:
        """Hashes everything reached so far, in an order that the walk does not change."""
        self._count_texts()
        return combine("reach", *(f"{key}={value}" for key, value in sorted(self._facts.items())))

    def label(self, module: Module) -> str:
        """Names a module in a digest; the UDF's own file has no name, so it can be renamed."""
        own = self._own
        return _OWN_LABEL if own is not None and module.path == own.path else module.label

    def name(self, module: Module, name: str) -> None:
        """Reaches one module-level name of a file, and what that name reaches."""
        self.modules.add(module.name)
        self._waiting.append((module, name, None))
        self._drain()

    def names(self, module: Module, names: Iterable[str]) -> None:
        """Reaches the names that some code of a file reads."""
        for name in sorted(names):
            self.name(module, name)

    def imports(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        """Reaches what code imports, also through the names that it reads of its module."""
        self._follow(module, scan, names)
        self._drain()

    def unit(self, module: Module, unit: Unit, names: Iterable[str]) -> None:
        """Reaches what some code of a file reads and imports, and what it says about texts."""
        self._walked[id(unit)] = (module, unit)
        if module.is_source:
            self.modules.add(module.name)
            self.names(module, names)
        self.imports(module, unit.scan, names)

    def module(self, name: str) -> None:
        """Reaches a module that code holds as an object."""
        self._follow_import(name)
        self._drain()

    def package(self, name: str) -> None:
        """Notes an installed package."""
        self.packages.add(name.partition(".")[0])

    def _count_texts(self) -> None:
        """Adds the docstrings and hints that count, and what those hints reach."""
        done: set[int] = set()
        size = -1
        while size != len(self._walked):
            size = len(self._walked)
            pieces = [unit.evidence for _, unit in self._walked.values()]
            counting = Counting(pieces, self._kind_of, self.hints_of)
            for module, unit in list(self._walked.values()):
                for name, nodes in counting.texts(unit.evidence):
                    if nodes and id(nodes[0]) not in done:
                        done.add(id(nodes[0]))
                        self._count_text(module, name, Unit(unit.path, nodes))
            self._drain()

    def _count_text(self, module: Module, name: str, text: Unit) -> None:
        self._facts[f"{self.label(module)}:{name} {text.digest}"] = ""
        if module.name in self._whole:
            self._follow(module, text.scan, text.names)
        elif module.is_source:
            self._read_unit(module, text)

    def _kind_of(self, name: str) -> str | None:
        module = self.finder.find(name)
        return None if module is None else module.kind

    def _drain(self) -> None:
        while self._waiting:
            module, name, reader = self._waiting.popleft()
            source = self.finder.source(str(module.path))
            registered = source.registered(name, reader)
            key = (module.name, name, len(registered))
            if key in self._seen:
                continue
            self._seen.add(key)
            units = source.units.get(name)
            if units is None:
                units = [] if name in _BUILTINS or name.startswith("__") else source.stars
            else:
                digest = combine("units", *(unit.digest for unit in units))
                self._facts[f"{self.label(module)}:{name}"] = digest
            self._waiting += [(module, item, None) for item in sorted(registered)]
            for unit in units:
                self._read_unit(module, unit)

    def _read_unit(self, module: Module, unit: Unit) -> None:
        self._walked[id(unit)] = (module, unit)
        for name in sorted(unit.names):
            self._waiting.append((module, name, unit))
        self._follow(module, unit.scan, unit.names)

    def _follow(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        if scan.dynamic:
            raise CodeIdentityError(
                f"{module.path}, line {scan.dynamic[0]}: a module is imported by a name that only "
                f"a run knows, so what the code depends on cannot be told. Import it by a literal "
                f"name, or give the stage `version=`."
            )
        for ref in scan.imports:
            for target in self.finder.targets(module, ref):
                self._target(module, target, ref)
        refs: list[ImportRef] = list(scan.imports)
        if module.is_source:
            source: SourceFile = self.finder.source(str(module.path))
            refs += [ref for name in sorted(names) for ref in source.import_refs(name)]
        for target in self.finder.attribute_targets(module, scan, refs):
            self._target(module, target, None)

    def _target(self, importer: Module, target: Target, ref: ImportRef | None) -> None:
        if target.role == "package":
            self.package(target.name)
        elif target.role == "missing":
            if ref is None or not ref.guarded:
                raise CodeIdentityError(
                    f"{importer.path}, line {target.line}: the module {target.name!r} cannot be "
                    f"found, so what the code depends on cannot be told. Correct the import, put "
                    f"it under `try: ... except ImportError:`, or give the stage `version=`."
                )
        elif target.module is not None:
            self.modules.add(target.name)
            if target.role == "passing":
                self._passing(target.module)
            else:
                self._reach_whole(target.module, target.attribute)

    def _passing(self, module: Module) -> None:
        if module.is_source:
            unit = self.finder.source(str(module.path)).whole
            if unit.nodes:
                self._facts[f"package {module.label}"] = unit.digest
                self._walked[id(unit)] = (module, unit)

    def _reach_whole(self, module: Module, attribute: str | None) -> None:
        own = self._own
        if attribute and own is not None and module.path is not None and module.path == own.path:
            self._waiting.append((module, attribute, None))
            return
        if module.name in self._whole or module.path is None:
            return
        self._whole.add(module.name)
        if not module.is_source:
            self._facts[f"module {module.label}"] = file_digest(module.path)
            return
        unit = self.finder.source(module.path).whole
        self._facts[f"module {module.label}"] = unit.digest
        self._walked[id(unit)] = (module, unit)
        self._follow(module, unit.scan, ())

    def _follow_import(self, name: str) -> None:
        ref = ImportRef(name, 0, None, "", name, True, 0)
        importer = Module("", "own", None)
        for target in self.finder.targets(importer, ref):
            self._target(importer, target, ref)
