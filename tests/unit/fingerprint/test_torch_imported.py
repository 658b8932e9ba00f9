"""With torch imported, whose `torch.classes` answers to any attribute, `__path__` too."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.module_attributes import module_folders
from vane_dagster.worker.user_code import activate


class _Anything(types.ModuleType):
    """A module that has every attribute, none of which is what it should be."""

    __path__ = object()  # type: ignore[assignment]  # no package has such a path
    __file__ = "_classes.py"


@pytest.fixture
def strange() -> Iterator[types.ModuleType]:
    module = sys.modules["strange_classes"] = _Anything("strange_classes")
    yield module
    del sys.modules["strange_classes"]


def test_a_module_without_real_folders_stops_neither_keys_nor_workers(strange, tmp_path):
    before = list(sys.path)
    try:
        activate(tmp_path / "code" / "digest")
    finally:
        sys.path[:] = before

    assert module_folders(strange) is None
    assert code_identity(test_a_module_without_real_folders_stops_neither_keys_nor_workers).digest
