"""Imports at first use: public names, and libraries that a declaration does not need.

A process that only loads definitions must start fast. `tests/integration/pipeline/test_imports.py`
lists what it must not import.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "duckdb", "fsspec", "http_client", "pc", "pq", "public_names"]


def public_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    The public names of a package, its ``__all__``, are those that it imports for type checkers,
    below ``if TYPE_CHECKING``. Each is imported at its first use.

    Args:
        package: The package's name.
        file: The package's source file.
    """

    @functools.cache
    def home() -> dict[str, str]:
        with open(file, encoding="utf-8") as source:
            blocks = [node for node in ast.parse(source.read()).body if isinstance(node, ast.If)]
        imports = [each for block in blocks for each in block.body]
        return {
            alias.name: each.module or ""
            for each in imports
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
        }

    def get(name: str) -> Any:
        if name == "__all__":
            return [*home()]
        if name == "__version__" and "." not in package:
            return importlib.import_module("importlib.metadata").version(package)
        if name not in home():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home()[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home())


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
