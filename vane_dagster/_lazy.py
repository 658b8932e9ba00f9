"""Imports at first use: public names, and libraries that a declaration does not need.

A process that only loads definitions must start fast. `tests/integration/pipeline/test_imports.py`
lists what it must not import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "duckdb", "fsspec", "http_client", "pc", "pq", "public_names"]


def public_names(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: The package's name.
        home: The module below the package that defines each name; "" for a module of the package.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not home[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


class LazyModule:
    """A module that is imported at the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import http.client as http_client

    import duckdb as duckdb
    import fsspec as fsspec
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    duckdb, fsspec = LazyModule("duckdb"), LazyModule("fsspec")
    pc, pq = LazyModule("pyarrow.compute"), LazyModule("pyarrow.parquet")
    http_client = LazyModule("http.client")
