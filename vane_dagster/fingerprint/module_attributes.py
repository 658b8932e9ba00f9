"""Attributes of loaded modules, read without running code of the module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def module_attribute(module: Any, name: str) -> Any:
    """Return an attribute of a module, or None, without loading a lazy module."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def module_folders(module: Any) -> tuple[str, ...] | None:
    """Return a package's folders; None for anything else, regardless of its attribute access."""
    folders = module_attribute(module, "__path__")
    return tuple(map(str, folders)) if isinstance(folders, Iterable) else None
