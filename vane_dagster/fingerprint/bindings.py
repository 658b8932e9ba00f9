"""The statements that bind a name of a module, including star imports."""

from __future__ import annotations

import builtins

from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SymbolSource

_EVERYWHERE = {*dir(builtins), "__annotations__", "__builtins__", "__file__", "__path__", "__all__"}
"""Names that a file has without binding them, and `__all__`, which no star import binds."""


def binding_units(finder: Finder, module: Module, name: str) -> list[SymbolSource]:
    """Return the statements of a file that may bind a name, including star imports, in order.

    Any star import may bind a name that nothing else is known to bind.
    """
    source = finder.source(str(module.path))
    units = list(source.units.get(name, ()))
    first = min((unit.position for unit in units), default=0)
    if not units and name.startswith("__"):
        return [] if name in _EVERYWHERE else list(source.stars)
    for star in source.stars:
        exports = _star_exports(finder, module, star, name, set())
        if exports or (exports is None and star.position >= first):
            units.append(star)
    if not units and name not in _EVERYWHERE:
        return list(source.stars)
    return sorted(units, key=lambda unit: unit.position)


def _star_exports(
    finder: Finder, module: Module, star: SymbolSource, name: str, seen: set[str]
) -> bool | None:
    """Return whether a star import binds a name; None if unknown."""
    found: list[bool | None] = []
    for ref in (ref for ref in star.scan.imports if ref.name == "*"):
        wholes = [item for item in finder.targets(module, ref) if item.role != "passing"]
        if any(item.name.rpartition(".")[2] == name for item in wholes[1:]):
            return True  # a submodule
        target = wholes[0].module if wholes else None
        if target is None or not target.is_source:
            found.append(None)
        elif target.name not in seen:
            seen.add(target.name)
            source = finder.source(str(target.path))
            if name in source.units:
                return True
            found += [_star_exports(finder, target, unit, name, seen) for unit in source.stars]
    return True if any(found) else None if None in found else False
