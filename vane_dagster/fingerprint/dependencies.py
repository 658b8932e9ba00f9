"""Collects everything that code reaches: names of its file, user modules, installed packages."""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vane_dagster._secrets import MASK, marks_secret
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.ast_digest import ImportRef, Scan
from vane_dagster.fingerprint.code_strings import Definition
from vane_dagster.fingerprint.effects import (
    EVERY,
    Effects,
    Executed,
    Reach,
    executed,
    lists_subclasses,
)
from vane_dagster.fingerprint.files import LocalFiles, file_digests
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import Finder, ImportTarget, Module
from vane_dagster.fingerprint.symbols import SymbolSource

FILE = "file"
_OWN_LABEL = "."


class DependencyWalk:
    """The transitive walk from a UDF, name by name.

    The module `own` has no name in digests. A module that is used as an object counts as a whole.
    Of modules that are imported, the statements count that do something to what is reached or to a
    library (see `effects`).

    Attributes:
        modules: The names of the reached modules.
        packages: The names of the reached installed packages.
    """

    def __init__(self, finder: Finder, own: Module | None, files: LocalFiles | None = None) -> None:
        self.finder = finder
        self._files = files or LocalFiles()
        self.modules: set[str] = set()
        self.packages: set[str] = set()
        self._own = own
        self._facts: dict[str, str] = {}
        self._waiting: deque[tuple[Module, str, bool]] = deque()
        # Whether the object counts that a name stands for, not only attributes of that module.
        self._seen: dict[tuple[str, str], bool] = {}
        self._whole: set[str] = set()
        self._packages: set[str] = set()  # packages whose modules all count
        self._walked: dict[int, tuple[Module, SymbolSource]] = {}
        self._given: set[str] = set()  # what imported names stand for that are used as objects
        self._allows_computed_imports = False
        self._is_end: Callable[[Module, str], bool] = lambda module, name: False
        self._read: list[tuple[Module, str]] = []  # the names that the UDF itself reads

    def parts(self) -> dict[str, str]:
        """Return the digests of everything reached so far, by name; the names count."""
        self._add_effects()
        facts = self._facts | self._files_named()
        return {name: combine(name, value) for name, value in sorted(facts.items())}

    @property
    def units(self) -> list[SymbolSource]:
        """The code reached so far."""
        return [unit for _, unit in self._walked.values()]

    def texts(self) -> dict[str, str]:
        """Return the lines of the code reached so far for people, by the name of the file's module.

        The UDF's own file has no name. Lines with literals under names of secrets are masked.
        """
        nodes_by_place: dict[tuple[str, str], list[ast.stmt]] = {}
        for module, unit in self._walked.values():
            label = self.label(module).lstrip(_OWN_LABEL)
            nodes_by_place.setdefault((label, unit.path), []).extend(unit.nodes)
        texts: dict[str, str] = {}
        for (label, path), nodes in sorted(nodes_by_place.items(), key=lambda item: item[0]):
            linecache.checkcache(path)
            lines, secret = linecache.getlines(path), _secret_lines(nodes)
            numbers: set[int] = set()
            for node in nodes:
                decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
                first = min([node.lineno, *decorators])
                numbers.update(range(first, (node.end_lineno or first) + 1))
            held = [
                f"{MASK}\n" if number in secret else lines[number - 1]
                for number in sorted(numbers)
                if number <= len(lines)
            ]
            texts[label] = texts.get(label, "") + "".join(held)
        return texts

    def label(self, module: Module) -> str:
        """Return a module's name in a digest. The UDF's own file has none, so it can be renamed."""
        own = self._own
        return _OWN_LABEL if own is not None and module.path == own.path else module.label

    def name(self, module: Module, name: str) -> None:
        """Collect a module-level name of a file, and everything that it reaches."""
        self._read.append((module, name))
        self.modules.add(module.name)
        self._waiting.append((module, name, True))
        self._drain()

    def unit(self, module: Module, unit: SymbolSource, names: Iterable[str]) -> None:
        """Collect the reads and imports of code."""
        self._walked[id(unit)] = (module, unit)
        self._read += [(module, name) for name in names]
        if module.is_source:
            self.modules.add(module.name)
            self._read_names(module, unit.scan, names)
        self._follow(module, unit.scan)
        self._drain()

    def module(self, name: str) -> None:
        """Collect a module that code holds as an object."""
        self._follow_import(name)
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            module, name, is_object = self._waiting.popleft()
            units = self.finder.source(str(module.path)).binding(name)
            if is_object:
                self._given.update(path for unit in units for path in unit.imported)
            is_object = is_object or len(units) != 1 or not units[0].is_import
            if self._seen.get((module.name, name)) in (True, is_object):
                continue
            self._seen[module.name, name] = is_object
            if self._is_end(module, name):
                continue
            if units:
                digest = combine("units", *(unit.digest for unit in units))
                self._facts[f"{self.label(module)}.{name}".lstrip(_OWN_LABEL)] = digest
            for unit in units:
                self._read_unit(module, unit, is_object)

    def _read_unit(self, module: Module, unit: SymbolSource, is_object: bool = True) -> None:
        self._walked[id(unit)] = (module, unit)
        self._read_names(module, unit.scan, unit.names)
        self._follow(module, unit.scan, is_object)

    def _read_names(self, module: Module, scan: Scan, names: Iterable[str]) -> None:
        """Collect names; of one that stands for a module, only the attributes if it is dotted."""
        dotted = {chain[0] for chain in scan.chains if len(chain) > 1}
        dotted -= {chain[0] for chain in scan.chains if len(chain) == 1}
        self._waiting += [(module, name, name not in dotted) for name in sorted(names)]

    def _add_effects(self) -> None:
        """Add the top-level statements that do something to what is reached, or to a library.

        They are hashed in the order of execution, with the statements that bind reached names.
        """
        effects = Effects(self.finder, self._is_reached, self._reach_of)
        counting: dict[int, SymbolSource] = {}
        size = -1
        while size != len(self._walked) + len(counting):
            size = len(self._walked) + len(counting)
            reached = sorted(self.modules)
            own = reached if self._own is None else [self._own.name]
            statements, _ = executed(self.finder, own, reached)
            effects.lists_subclasses = lists_subclasses(self.finder, statements)
            for module, unit, _ in statements:
                nodes = () if id(unit) in counting else effects.counting(module, unit)
                if nodes:
                    acting = unit
                    if nodes is not unit.nodes:
                        acting = SymbolSource(unit.path, nodes, unit.position)
                    counting[id(unit)] = acting
                    self._read_unit(module, acting)
                    self._drain()
        if parts := self._ordered(statements, counting):
            self._facts["top-level statements"] = combine("effects", *parts)

    def _ordered(
        self,
        statements: Iterable[Executed],
        counting: Mapping[int, SymbolSource],
    ) -> list[str]:
        """Return the digests of the statements whose order counts.

        They are those that do something, or that bind a name again, those that give a reached name
        its value, and imports of own modules in a file that itself may not be imported.
        """
        rebound = {name for name in self._seen if len(self._binding(*name)) > 1}
        parts: list[str] = []
        for module, unit, is_sure in statements:
            names = {(module.name, name) for name in unit.touched}
            placed = rebound if unit.is_definition else self._seen.keys()
            is_placed = id(unit) in counting or not names.isdisjoint(placed)
            if is_placed or (not is_sure and self.finder.own_imports(module, unit)):
                digest = counting.get(id(unit), unit).digest
                parts.append(combine("statement", self.label(module), str(is_sure), digest))
        return parts if counting or rebound else []

    def script_values(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the values of a script's names that its file does not determine, with its digest.

        They are of names that the UDF reads, and that what the caller hashes meanwhile reads.
        """
        known = set[str]()
        for module, name in self._read:  # which grows
            live = vars(sys.modules[module.name]) if module.is_main else {}
            if name not in live or name in known or name.startswith("__"):
                continue
            known.add(name)
            units = self._binding(module.name, name)
            if self._varies(module, name, live[name], units):
                yield name, live[name], self.finder.source(str(module.path)).whole.digest
            else:
                named = (unit.names for unit in units if name in unit.bound)
                self._read += [(module, each) for each in sorted(frozenset[str]().union(*named))]

    def _varies(self, module: Module, name: str, value: Any, units: Sequence[SymbolSource]) -> bool:
        if isinstance(value, (types.ModuleType, logging.Logger)):
            return False
        source = self.finder.source(str(module.path))
        units = [unit for unit in units if not unit.is_main_guard]
        bound = [unit for unit in units if name in unit.bound]
        node: Any = bound[-1].nodes[-1] if bound else None
        if node is None or name in source.rebound:
            return True
        is_own = isinstance(value, types.FunctionType) and value.__module__ == module.name
        if is_own and source.place(value.__code__) is None:  # the file was edited meanwhile
            return True
        with contextlib.suppress(ValueError, AttributeError):  # it is computed
            literal = ast.literal_eval(node.value)
            if units == bound and bound[-1].touched == {name}:
                return repr(literal) != repr(value)
        made = (*Definition, ast.Import, ast.ImportFrom)
        is_made = all(isinstance(each.nodes[-1], made) for each in units)
        return name in source.changed_later or (len(sys.argv) > 1 and not is_made)

    def _files_named(self) -> dict[str, str]:
        """Return the digests of the files that literals of the code name, by these."""
        parts_by_name: dict[str, set[str]] = {}
        for module, unit in self._walked.values():
            for text, line in literals(unit.nodes):
                for at, path in enumerate(self._files.places(text, module.path)):
                    if content := self._files.content(path, f"{module.path}, line {line}"):
                        part = combine(self.label(module), str(at), content)
                        parts_by_name.setdefault(f"{FILE} {text}", set()).add(part)
        return {name: combine(FILE, *sorted(parts)) for name, parts in parts_by_name.items()}

    def _reach_of(
        self, module: Module, nodes: Sequence[ast.stmt], is_end: Callable[[Module, str], bool]
    ) -> Reach:
        """Return what statements of a module reach; names that are ends lead no further."""
        walk = DependencyWalk(self.finder, self._own, self._files)
        walk._is_end = is_end
        walk._allows_computed_imports = True
        unit = SymbolSource(str(module.path), nodes)
        with contextlib.suppress(CodeIdentityError):  # importing it fails
            walk.unit(module, unit, unit.names)
        names = {name for name in walk._seen if self._is_bound(*name)}
        names |= {(each, EVERY) for each in walk._whole}
        # Statements that only change a name count by themselves.
        made = [each for each in walk.units if each is unit or each.bound]
        uses = walk._given.union(unit.imported, *(each.uses for each in made))
        return Reach(
            frozenset(names),
            frozenset(use for use in uses if not self.finder.is_own(use)),
            any(each.has_code for each in walk.units),
            any(each.is_hooked for each in walk.units),
            any(each.scan.dynamic for each in walk.units),
        )

    def _is_reached(self, name: tuple[str, str]) -> bool:
        if name[1] == EVERY and any(module == name[0] for module, _ in self._seen):
            return True
        return name in self._seen or name[0] in self._whole

    def _binding(self, module: str, name: str) -> list[SymbolSource]:
        """Return the statements of a module that bind or change a name."""
        located = self.finder.find(module)
        is_read = located is not None and located.kind == "own" and located.is_source
        return self.finder.source(str(located.path)).binding(name) if located and is_read else []

    def _is_bound(self, module: str, name: str) -> bool:
        """Return whether a name is not a builtin, and stands for more than an imported one."""
        units = self._binding(module, name)
        is_made = any(name in unit.bound and not unit.is_import for unit in units)
        return is_made or not (units or hasattr(builtins, name))

    def _follow(self, module: Module, scan: Scan, is_object: bool = True) -> None:
        if scan.dynamic and not self._allows_computed_imports:
            raise CodeIdentityError(
                f"{module.path}, line {scan.dynamic[0]}: code may import a module that no literal "
                f"names, as `exec` and `compile` may, so the code's dependencies cannot be "
                f"determined. Import it by a literal name, or give the stage "
                f"`vd.Reuse(version=...)`."
            )
        for ref in scan.imports:
            targets = list(self.finder.targets(module, ref))
            for target in targets:
                self._target(module, target, ref, is_object)
            if ref.guarded:  # an error in what it runs decides what else runs
                roots = [target.name for target in targets if target.module is not None]
                for each in executed(self.finder, roots)[0]:
                    self._read_file(each.module)
        for target in self.finder.attribute_targets(module, scan):
            self._target(module, target, None)

    def _target(
        self,
        importer: Module,
        target: ImportTarget,
        ref: ImportRef | None,
        is_object: bool = True,
    ) -> None:
        if target.role == "package":
            self.packages.add(target.name)
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
            is_module = ref is not None and ref.name != "*" and target.attribute is None
            if target.role == "passing" or (is_module and not is_object):
                self._passing(target.module, target.attribute)
            else:
                self._reach(target.module, target.attribute)

    def _passing(self, module: Module, attribute: str | None) -> None:
        """Collect a package's bindings of a submodule name; import effects are added apart."""
        if module.is_source:
            units = self.finder.source(str(module.path)).units
            for name in {attribute or "", "__getattr__", "__path__"} & set(units):
                self._waiting.append((module, name, True))

    def _reach(self, module: Module, attribute: str | None) -> None:
        """Collect a name of a module.

        If the module is used as an object, or lacks the name, collect all of it, and all modules
        below it.
        """
        if attribute and self._binding(module.name, attribute):
            self._passing(module, None)
            self._waiting.append((module, attribute, True))
            return
        if module.kind == "own" and module.name not in self._packages:
            self._packages.add(module.name)
            for name in self.finder.below(module.name):
                self._follow_import(name)
        self._read_file(module)

    def _read_file(self, module: Module) -> None:
        """Collect all of a module's file."""
        if module.name in self._whole:
            return
        self._whole.add(module.name)
        self.modules.add(module.name)
        if module.path is None:
            return
        if not module.is_source:
            (digest,) = file_digests([module.path], module.path, module.name)
            self._facts[f"module {module.label}"] = digest
            return
        unit = self.finder.source(module.path).whole
        self._facts[f"module {module.label}"] = unit.digest
        self._walked[id(unit)] = (module, unit)
        self._given |= unit.imported
        self._follow(module, unit.scan)

    def _follow_import(self, name: str) -> None:
        ref = ImportRef(name, 0, None, True, 0)
        importer = Module("", "own", None)
        for target in self.finder.targets(importer, ref):
            self._target(importer, target, ref)


def literals(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the strings in statements that an import executes and in defaults, with their lines."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        waiting += ast_digest.evaluated(node)


def _secret_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the numbers of the lines with literals under names of secrets."""
    return {
        number
        for node in nodes
        for name, value in _named_values(node)
        if isinstance(value, (ast.Constant, ast.JoinedStr)) and marks_secret(name)
        for number in range(value.lineno, (value.end_lineno or value.lineno) + 1)
    }


def _named_values(tree: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the values that code gives to variables, attributes, keys and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((_last_name(target), node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            yield _last_name(node.target), node.value
        elif isinstance(node, ast.keyword):
            yield node.arg or "", node.value
        elif isinstance(node, ast.Dict):
            yield from ((_last_name(key), value) for key, value in zip(node.keys, node.values))
        elif isinstance(node, ast.arguments):
            placed = [*node.posonlyargs, *node.args]
            yield from ((a.arg, v) for a, v in zip(placed[::-1], node.defaults[::-1]))
            yield from ((a.arg, v) for a, v in zip(node.kwonlyargs, node.kw_defaults))


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.slice)
    return str(
        getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", "")
    )
