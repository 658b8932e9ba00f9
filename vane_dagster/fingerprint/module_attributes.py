"""Attributes of loaded modules, read without running code of the module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def module_attribute(module: Any, name: str) -> Any:
    """Returns an attribute of a module, or None; a lazy module is not loaded by asking."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def module_folders(module: Any) -> tuple[str, ...] | None:
    """A package's folders; None for what is no package, whatever it makes of being asked."""
    folders = module_attribute(module, "__path__")
    return tuple(map(str, folders)) if isinstance(folders, Iterable) else None
