"""A folder of a user's modules, packed for a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.edits import Project
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.fingerprint.code import code_identity

DEFS = """
import helpers
from pkg.sub import shared
class Model:
    def __init__(self, n):
        import lazy_part
        from spaced import inside
        self.n = n + lazy_part.ONE + inside.TWO + shared.THREE
    def __call__(self, b):
        return helpers.double(b) + self.n
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "user"
    files = {
        "defs.py": DEFS,
        "helpers.py": "def double(b):\n    return 2 * b\n",
        "lazy_part.py": "ONE = 1\n",
        "spaced/inside.py": "TWO = 2\n",
        "pkg/__init__.py": "",
        "pkg/sub/__init__.py": "",
        "pkg/sub/shared.py": "THREE = 3\n",
        "pkg/unreached.py": "",
        "pkg/data.txt": "not code",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield root
    Project(tmp_path).forget()


def bundle(obj: Any) -> CodeBundle:
    return pack(code_identity(obj).modules, obj)
