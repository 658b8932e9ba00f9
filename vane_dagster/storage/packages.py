"""Versions of installed packages, as parts record them and as they are now."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vane_dagster.storage.manifest import PartInfo

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


@dataclass(frozen=True)
class Changed:
    """A package that has another version than rows were computed with.

    Attributes:
        name: The package.
        then: Its versions then, without those that are there now.
        now: Its version now; several if workers differ.
        parts: How many parts were computed then.
    """

    name: str
    then: Sequence[str]
    now: Sequence[str]
    parts: int


def changed(parts: Sequence[PartInfo], run_id: str) -> list[Changed]:
    """The packages that parts were computed with in another version than there is now.

    Now is what the workers have of the run that asks, as its own parts tell; without any, what is
    installed here. A package that is not installed here is left out.

    Args:
        parts: The parts of a partition.
        run_id: The run that asks.
    """
    workers = versions(part for part in parts if part.made and part.made.run_id == run_id)
    found = []
    for name, then in versions(parts).items():
        here = version_of(name)
        now = workers.get(name) or ([here] if here else [])
        if now and (former := [version for version in then if version not in now]):
            texts = {f"{name}=={version}" for version in former}
            count = sum(not texts.isdisjoint(part.made.packages) for part in parts if part.made)
            found.append(Changed(name, former, now, count))
    return found


def versions(parts: Iterable[PartInfo]) -> Mapping[str, list[str]]:
    """The packages that parts were computed with, each in all its versions."""
    found: dict[str, list[str]] = {}
    for text in sorted({text for part in parts if part.made for text in part.made.packages}):
        name, _, version = text.partition("==")
        found.setdefault(name, []).append(version)
    return found


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
