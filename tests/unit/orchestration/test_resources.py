"""The compute resources, as Dagster sets them up."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import vane_dagster as vd


class Node:
    def __init__(self) -> None:
        self.me = self


def test_unreachable_cycles_are_freed_as_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own collections at the end skip what is frozen, so there is one before."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    compute = vd.LocalCompute()
    context: Any = None  # unused
    compute.setup_for_execution(context)
    compute.teardown_after_execution(context)
    node = Node()
    freed = weakref.ref(node)
    del node
    for hook in at_exit:
        hook()
    assert freed() is None
    assert gc.get_freeze_count() > 100
