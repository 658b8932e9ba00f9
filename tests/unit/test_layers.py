"""The order of the packages, which imports follow in one direction, file by file."""

from __future__ import annotations

import ast
from pathlib import Path

import vane_dagster

ROOT = Path(vane_dagster.__file__).parent
ORDER = [
    "_failpoints", "_secrets", "errors", "_home", "_arguments", "_private_folder", "types",
    "providers", "fingerprint", "storage", "sources", "checks", "pipeline", "planning", "worker",
    "events", "compute", "engine", "tracing", "orchestration", "cli", "testing",
]  # fmt: skip


def test_imports_go_one_way():
    wrong = set()
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        own = place.split("/")[0].removesuffix(".py")
        if own not in ORDER:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vane_"):
                continue
            parts = node.module.split(".")
            for above in [parts[1]] if len(parts) > 1 else [name.name for name in node.names]:
                if above in ORDER and ORDER.index(above) > ORDER.index(own):
                    wrong.add((place, above))
    assert wrong == set()
