"""Installed packages and their versions."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping

_OWN = "vane_dagster"


def distributions(imported: Iterable[str]) -> tuple[str, ...]:
    """The installed packages that top-level modules belong to.

    A module that is not installed here is taken for a package of its own name, which the workers
    may have.
    """
    wanted = sorted(set(imported) - {_OWN})  # whose code has numbers of its own in the keys
    own = {name: _package_of_its_name(name) for name in wanted}
    known = {} if all(own.values()) else _by_module()  # reads what all packages have installed
    found: set[str] = set()
    for module, package in own.items():
        found.update([package] if package else known.get(module, [module]))
    return tuple(sorted(found))


def installed(packages: Iterable[str]) -> tuple[str, ...]:
    """The packages that are installed here, as "name==version"."""
    found = ((name, version_of(name)) for name in packages)
    return tuple(f"{name}=={version}" for name, version in found if version)


@functools.cache
def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed here. Looked up once a process."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _package_of_its_name(module: str) -> str | None:
    """The package of a module's name, as it writes it, if it has installed the module."""
    try:
        package = importlib.metadata.distribution(module)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    files = f"\n{package.read_text('RECORD') or ''}"
    named = (package.read_text("top_level.txt") or "").split()
    owns = module in named or f"\n{module}/" in files or f"\n{module}.py," in files
    return package.metadata["Name"] if owns else None


@functools.lru_cache(maxsize=1)
def _by_module() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
