"""Collects everything that code reaches: names of its file, user modules, installed packages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.ast_digest import ImportRef, Scan
from vane_dagster.fingerprint.hashing import combine, file_digest
from vane_dagster.fingerprint.import_effects import Effect, Program, loaded_program
from vane_dagster.fingerprint.modules import Finder, ImportTarget, Module
from vane_dagster.fingerprint.read_names import ReadNames, binding_units
from vane_dagster.fingerprint.symbols import SourceFile, SymbolSource

_OWN_LABEL = "."


class DependencyWalk:
    """The transitive walk from a UDF; names of the module `own` count one by one.

    For modules that are only imported, the statements count that change what is read or the state
    of a library (see `import_effects`).

    Attributes:
        modules: The names of the reached modules.
        packages: The names of the reached installed packages.
        imported: The names of the modules that importing them imports.
    """

    def __init__(self, finder: Finder, own: Module | None) -> None:
        self.finder = finder
        self.modules: set[str] = set()
        self.packages: set[str] = set()
        self.imported: set[str] = set()
        self._own = own
        self._facts: dict[str, str] = {}
        self._waiting: deque[tuple[Module, str]] = deque()
        self._seen: set[tuple[str, str]] = set()
        self._whole: set[str] = set()
        self._read = ReadNames(finder)
        self._walked: dict[int, tuple[Module, SymbolSource]] = {}

    def digest(self) -> str:
        """Hash everything reached so far, in an order that is independent of the walk."""
        self._add_effects()
        return combine("reach", *(f"{key}={value}" for key, value in sorted(self._facts.items())))

    @property
    def units(self) -> list[SymbolSource]:
        """The code reached so far."""
        return [unit for _, unit in self._walked.values()]

    def label(self, module: Module) -> str:
        """Return a module's name in a digest. The UDF's own file has none, so it can be renamed."""
        own = self._own
        return _OWN_LABEL if own is not None and module.path == own.path else module.label

    def name(self, module: Module, name: str) -> None:
        """Collect a module-level name of a file, and everything that it reaches.

        Args:
            module: The module of the file.
            name: The name.
        """
        self.modules.add(module.name)
        self._waiting.append((module, name))
        self._read.name(module, name)
        self._drain()

    def names(self, module: Module, names: Iterable[str]) -> None:
        """Collect the names that code of a file reads.

        Args:
            module: The module of the file.
            names: The names.
        """
        for name in sorted(names):
            self.name(module, name)

    def imports(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        """Collect the imports of code, including those through the names that it reads.

        Args:
            module: The code's module.
            scan: The imports and dotted names of the code.
            names: The module-level names that it reads.
        """
        self._read.imports(module, scan, names)
        self._follow(module, scan, names)
        self._drain()

    def unit(self, module: Module, unit: SymbolSource, names: Iterable[str]) -> None:
        """Collect the reads and imports of code.

        Args:
            module: The code's module.
            unit: The code.
            names: The module-level names that it reads.
        """
        self._walked[id(unit)] = (module, unit)
        if module.is_source:
            self.modules.add(module.name)
            self.names(module, names)
        self.imports(module, unit.scan, names)

    def module(self, name: str) -> None:
        """Collect a module that code holds as an object."""
        self._read.module(name)
        self._follow_import(name)
        self._drain()

    def package(self, name: str) -> None:
        """Record an installed package."""
        self.packages.add(name.partition(".")[0])

    def _drain(self) -> None:
        while self._waiting:
            module, name = self._waiting.popleft()
            if (module.name, name) in self._seen:
                continue
            self._seen.add((module.name, name))
            units = binding_units(self.finder, module, name)
            if units:
                digest = combine("units", *(unit.digest for unit in units))
                self._facts[f"{self.label(module)}:{name}"] = digest
            for unit in units:
                self._read_unit(module, unit)

    def _read_unit(self, module: Module, unit: SymbolSource) -> None:
        self._walked[id(unit)] = (module, unit)
        names = set(unit.names | unit.reads.texts)
        if unit.reads.every:
            names |= set(self.finder.source(str(module.path)).units)
        for name in sorted(names):
            self._waiting.append((module, name))
        self._follow(module, unit.scan, unit.names)

    def _add_effects(self) -> None:
        """Add the import-time statements that change what is read, or a library's state.

        They are hashed in execution order, together with the other statements that bind the same
        names.
        """
        roots = sorted(self.modules)
        if self._own is not None:
            roots = [self._own.name, *roots]
        program = loaded_program(self.finder, roots)
        counting: dict[int, Effect] = {}
        with program.lock:
            while True:
                roots += sorted(self.modules.difference(roots))
                trace = program.trace(roots)
                found = [
                    effect
                    for effect in trace
                    if id(effect.unit) not in counting
                    and not effect.changes_itself
                    and self._read.counts(program, effect)
                ]
                for effect in found:
                    counting[id(effect.unit)] = effect
                    self._read.unit(effect.module, effect.unit)
                    if effect.module.name not in self._whole:
                        self.modules.add(effect.module.name)
                        self._read_unit(effect.module, effect.unit)
                self._drain()
                if not found:
                    break
            changed = self._changed_names(program, counting.values())
        # The closure of imports does not include those by a computed name.
        self.imported = {name for effect in trace for name in effect.imports}
        parts = [
            part
            for effect in trace
            if id(effect.unit) in counting or not effect.unit.is_definition
            for part in self._ordered(program, effect, counting, changed)
        ]
        if parts:
            self._facts["effects"] = combine("effects", *parts)

    def _changed_names(
        self, program: Program, effects: Iterable[Effect]
    ) -> frozenset[tuple[str, str]]:
        return frozenset(
            (item.place, item.name)
            for effect in effects
            for write in effect.writes
            for item in program.expand(write)
            if item.kind == "name"
        )

    def _ordered(
        self,
        program: Program,
        effect: Effect,
        counting: dict[int, Effect],
        changed: frozenset[tuple[str, str]],
    ) -> Iterator[str]:
        path = str(effect.module.path)
        if effect.module.name in self._whole:
            # The digest of a module that counts whole includes the order of its statements.
            if id(effect.unit) in counting and self._read.counts(program, effect, path):
                yield combine("whole", self.label(effect.module), effect.unit.digest)
        elif id(effect.unit) in counting or any(
            (path, name) in changed and (effect.module.name, name) in self._seen
            for name in effect.unit.touched
        ):
            yield combine("statement", self.label(effect.module), effect.unit.digest)

    def _follow(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        if scan.dynamic:
            raise CodeIdentityError(
                f"{module.path}, line {scan.dynamic[0]}: a module is imported by a name that only "
                f"a run knows, so the code's dependencies cannot be determined. Import it by a "
                f"literal name, or give the stage `version=`."
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

    def _target(self, importer: Module, target: ImportTarget, ref: ImportRef | None) -> None:
        if target.role == "package":
            self.package(target.name)
        elif target.role == "missing":
            if ref is None or not ref.guarded:
                raise CodeIdentityError(
                    f"{importer.path}, line {target.line}: the module {target.name!r} cannot be "
                    f"found, so the code's dependencies cannot be determined. Correct the "
                    f"import, put it under `try: ... except ImportError:`, or give the stage "
                    f"`version=`."
                )
        elif target.module is not None:
            self.modules.add(target.name)
            if target.role == "passing":
                self._passing(target.module, target.attribute)
            else:
                self._reach_whole(target.module, target.attribute)

    def _passing(self, module: Module, attribute: str | None) -> None:
        """Collect a package's bindings of a submodule name; import effects are added apart."""
        if module.is_source:
            units = self.finder.source(str(module.path)).units
            for name in {attribute or "", "__getattr__", "__path__"} & set(units):
                self._waiting.append((module, name))

    def _reach_whole(self, module: Module, attribute: str | None) -> None:
        own = self._own
        if attribute and own is not None and module.path is not None and module.path == own.path:
            self._waiting.append((module, attribute))
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
