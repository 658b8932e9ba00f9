"""The driver's client of the pool manager."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from vane_dagster.compute import client


def test_each_method_that_drivers_call_exists_in_the_pool_manager() -> None:
    """Read as text, as importing the pool manager imports Ray."""
    text = Path(client.__file__).with_name("pool_manager.py").read_text()
    methods = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.AsyncFunctionDef)}
    assert set(get_args(client.PoolManagerMethod)) <= methods
