"""What the distribution holds: its entry points, its types, its dependencies."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import vane_dagster
from support.paths import TESTS

ROOT = Path(vane_dagster.__file__).parent
OPTIONAL = {
    *("PIL", "aiohttp", "anthropic", "deltalake", "lance", "openai", "pyiceberg"),
    *("sentence_transformers", "torch", "transformers", "vllm"),
}


def test_the_package_is_typed():
    assert (ROOT / "py.typed").is_file()


def test_what_is_imported_is_declared():
    lines = (ROOT.parent / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", lines, re.MULTILINE | re.DOTALL)
    declared = {re.match(r'\s*"([\w-]+)', line)[1] for line in block[1].splitlines()}
    known = packages_distributions()
    missing = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for top in {module.split(".")[0] for module in modules}:
                standard = top in sys.stdlib_module_names or top in {"vane_dagster", *OPTIONAL}
                if not standard and not declared & {d.lower() for d in known.get(top, ["?"])}:
                    missing.add((file.relative_to(ROOT).as_posix(), top))
    assert not missing


def test_files_of_tests_have_unique_names():
    """Pytest collects no two modules of one name."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
