"""The order of the packages, which imports follow in one direction, file by file."""

from __future__ import annotations

import ast
from pathlib import Path

import vane_dagster

ROOT = Path(vane_dagster.__file__).parent
ORDER = [
    "_failpoints", "_secrets", "errors", "_home", "_arguments", "_private_folder", "types",
    "providers", "fingerprint", "storage", "sources", "checks", "pipeline", "storage.publish",
    "storage.gc", "planning", "worker", "events", "compute", "engine", "tracing", "orchestration",
    "cli", "testing",
]  # fmt: skip


def layer(module: str) -> str:
    """The entry of `ORDER` that a module belongs to: the longest that its name begins with."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in ORDER), parts[0])


def test_imports_go_one_way():
    wrong = set()
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        own = layer(place.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if own not in ORDER:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vane_"):
                continue
            module = node.module.partition(".")[2]
            for above in [module] if module else [name.name for name in node.names]:
                found = layer(above)
                if found in ORDER and ORDER.index(found) > ORDER.index(own):
                    wrong.add((place, found))
    assert wrong == set()
