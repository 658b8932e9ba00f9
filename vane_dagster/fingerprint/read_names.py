"""The module-level names that reached code reads, including modules that count whole.

A statement that changes an object counts for code that reads the object, but not for code that only
registers something in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vane_dagster.fingerprint.ast_digest import ImportRef, Scan
from vane_dagster.fingerprint.import_effects import CONTENT, SUBCLASSES, Effect, Origin, Program
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SymbolSource


def binding_units(finder: Finder, module: Module, name: str) -> list[SymbolSource]:
    """Return the statements of a file that may bind a name, including star imports, in order.

    Args:
        finder: Locates modules.
        module: The module of the file.
        name: The name.
    """
    source = finder.source(str(module.path))
    units = list(source.units.get(name, ()))
    first = min((unit.position for unit in units), default=0)
    if not units and name.startswith("__"):
        return units
    for star in source.stars:
        exports = _star_exports(finder, module, star, name, set())
        if exports or (exports is None and star.position >= first):
            units.append(star)
    return sorted(units, key=lambda unit: unit.position)


def _star_exports(
    finder: Finder, module: Module, star: SymbolSource, name: str, seen: set[str]
) -> bool | None:
    """Return whether a star import binds a name; None if unknown."""
    for ref in star.scan.imports:
        wholes = [item for item in finder.targets(module, ref) if item.role != "passing"]
        if any(item.name.rpartition(".")[2] == name for item in wholes[1:]):
            return True  # a submodule
        for target in wholes:
            found = target.module
            if found is None or not found.is_source:
                return None
            if found.name in seen:
                continue
            seen.add(found.name)
            source = finder.source(str(found.path))
            if name in source.units:
                return True
            inner = [_star_exports(finder, found, unit, name, seen) for unit in source.stars]
            if any(inner):
                return True
            if None in inner:
                return None
            return False
    return None


class ReadNames:
    """The walk over names that are actually read."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._names: set[tuple[str, str]] = set()
        self._paths: set[str] = set()
        self._every: set[str] = set()
        self._attributes: set[str] = set()
        self._waiting: list[tuple[Module, str]] = []
        self._decorators: list[tuple[Module, SymbolSource, str]] = []

    def counts(self, program: Program, effect: Effect, beside: str | None = None) -> bool:
        """Return whether a statement changes a name that is read, or the state of a library.

        Args:
            program: The program that contains the statement.
            effect: The statement's effect.
            beside: A file with objects to ignore.
        """
        self._drain()
        while self._decorators:
            self._add_decorator(program, *self._decorators.pop())
            self._drain()
        return any(
            self._is_read(program, item.kind, item.place, item.name, item.attribute)
            for write in effect.writes
            for item in program.expand(write)
            if beside is None or item.place != beside
        )

    def _is_read(self, program: Program, kind: str, path: str, name: str, attribute: str) -> bool:
        if kind == "library":
            return True
        if kind == "every":
            return path in self._paths
        if kind != "name" or (path, name) not in self._names:
            return False
        attribute = attribute.removesuffix(CONTENT)
        if not attribute or attribute in self._attributes:
            return True
        # The changed object is one that an attribute holds.
        return attribute != SUBCLASSES and not program.is_own_class(path, name)

    def name(self, module: Module, name: str) -> None:
        """Add a module-level name.

        Args:
            module: The module.
            name: The name.
        """
        self._waiting.append((module, name))

    def module(self, name: str) -> None:
        """Add every name of a module."""
        module = self._finder.find(name)
        if module is not None:
            self._every_name(module)

    def imports(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        """Add the imports of code, and the names that it reads from modules by dotted names.

        Args:
            module: The code's module.
            scan: The imports and dotted names of the code.
            names: The module-level names that it reads.
        """
        refs: list[ImportRef] = list(scan.imports)
        for ref in scan.imports:
            for target in self._finder.targets(module, ref):
                if target.module is None:
                    continue
                if target.role == "passing":
                    self._waiting.append((target.module, "__getattr__"))
                elif target.attribute is not None:
                    self._waiting.append((target.module, target.attribute))
                elif not ref.bound:
                    self._every_name(target.module)
        if module.is_source:
            source = self._finder.source(str(module.path))
            refs += [ref for name in sorted(names) for ref in source.import_refs(name)]
        for target in self._finder.attribute_targets(module, scan, refs):
            if target.module is None:
                continue
            if target.attribute is None:
                self._every_name(target.module)
            else:
                self._waiting.append((target.module, target.attribute))

    def unit(self, module: Module, unit: SymbolSource) -> None:
        """Add the names that statements read.

        Args:
            module: Their module.
            unit: The statements.
        """
        reads = unit.reads
        self._attributes |= reads.attributes
        names = unit.names & reads.names | reads.texts
        if reads.every:
            self._every_name(module)
        self._waiting += [(module, name) for name in sorted(names)]
        decorators = unit.names & reads.decorators - names
        self._decorators += [(module, unit, name) for name in sorted(decorators)]
        self.imports(module, unit.scan, names)

    def _add_decorator(
        self, program: Program, module: Module, unit: SymbolSource, name: str
    ) -> None:
        """Add an object with a method used as a decorator, unless it is a library's.

        The result of a library's decorator does not depend on the other functions that it
        decorated.
        """
        value = Origin("name", str(module.path), name)
        if program.is_module(value) or program.class_of(value):
            self._waiting.append((module, name))
            self.imports(module, unit.scan, (name,))

    def _every_name(self, module: Module) -> None:
        if module.kind != "own" or not module.is_source or module.name in self._every:
            return
        self._every.add(module.name)
        source = self._finder.source(str(module.path))
        self._waiting += [(module, name) for name in sorted(source.units)]
        for star in source.stars:
            for ref in star.scan.imports:
                for target in self._finder.targets(module, ref):
                    if target.role == "whole" and target.module is not None:
                        self._every_name(target.module)

    def _drain(self) -> None:
        while self._waiting:
            module, name = self._waiting.pop()
            if module.kind != "own" or not module.is_source:
                continue
            key = (str(module.path), name)
            if key in self._names:
                continue
            self._names.add(key)
            self._paths.add(key[0])
            for unit in binding_units(self._finder, module, name):
                self._from_star(module, unit, name)
                self.unit(module, unit)

    def _from_star(self, module: Module, unit: SymbolSource, name: str) -> None:
        for ref in unit.scan.imports:
            if ref.name == "*":
                for target in self._finder.targets(module, ref):
                    if target.role == "whole" and target.module is not None:
                        if target.name.rpartition(".")[2] == name:
                            self._every_name(target.module)
                        self._waiting.append((target.module, name))
