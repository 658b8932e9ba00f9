"""Installed packages and their versions."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable

_OWN = "vane_dagster"


def distributions(imported: Iterable[str]) -> tuple[str, ...]:
    """Return the installed packages that top-level modules belong to.

    A module that is not installed in this process is assumed to be a package of the same name,
    which the workers may have.
    """
    wanted = sorted(set(imported) - {_OWN})  # keys have separate version numbers for our own code
    own = {name: _package_of_its_name(name) for name in wanted}
    known = {} if all(own.values()) else _by_module()  # slow: reads the files of all packages
    names: set[str] = set()
    for module, package in own.items():
        names.update([package] if package else known.get(module, [module]))
    return tuple(sorted(names))


def installed(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the packages that are installed in this process, each "name==version"."""
    versions = ((name, version_of(name)) for name in packages)
    return tuple(f"{name}=={version}" for name, version in versions if version)


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. Cached per process."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _package_of_its_name(module: str) -> str | None:
    """Return the package with a module's name, in its own spelling, if it installed the module."""
    try:
        package = importlib.metadata.distribution(module)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    files = f"\n{package.read_text('RECORD') or ''}"
    named = (package.read_text("top_level.txt") or "").split()
    owns = module in named or f"\n{module}/" in files or f"\n{module}.py," in files
    return package.metadata["Name"] if owns else None


_by_module = functools.cache(importlib.metadata.packages_distributions)
