"""The order of the packages, which imports follow in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import vane_dagster

ROOT = Path(vane_dagster.__file__).parent
ORDER = [
    "failpoints", "masking", "errors", "private_folder", "providers", "declare", "commit", "plan",
    "tracing", "execute", "report", "orchestrate",
]  # fmt: skip
# Where a definition becomes Dagster assets: a call, not an import of the module.
ALLOWED = {("declare/pipeline.py", "orchestrate")}


def test_imports_go_one_way():
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        own = place.split("/")[0].removesuffix(".py")
        if own not in ORDER:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vane_"):
                continue
            parts = node.module.split(".")
            above = parts[1] if len(parts) > 1 else node.names[0].name
            if ORDER.index(above) > ORDER.index(own) and (place, above) not in ALLOWED:
                wrong.append(f"{place} imports {node.module}")
    assert wrong == []
