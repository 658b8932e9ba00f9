"""The private modules of libraries that the package uses are those of the architecture page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vane_dagster
from support.paths import REPOSITORY

ROOT = Path(vane_dagster.__file__).parent
LIBRARIES = ("ray.", "dagster.", "pyiceberg.")
PRIVATE = re.compile(r"_compression|(?:ray|dagster|pyiceberg)(?:\.\w+)*?\._(?!_)\w+(?:\.\w+)*")


def private_modules(path: Path) -> Iterator[str]:
    """The private modules that a file imports, or names in its literals as code to run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            private = [each.name for each in node.names if each.name.startswith("_")]
            if PRIVATE.fullmatch(node.module) or (private and node.module.startswith(LIBRARIES)):
                yield node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            if PRIVATE.fullmatch(text := ast.unparse(node)):
                yield text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            imported = re.findall(r"from (ray\._\w+) import (\w+)", node.value)
            yield from (".".join(each) for each in imported)
            if PRIVATE.fullmatch(node.value):
                yield node.value


def test_the_list_of_private_modules_is_complete():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    listed = {}
    for line in page.partition("## Private APIs of libraries")[2].splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]]
        if len(cells) == 2 and cells[0]:
            for module in cells[0]:
                listed.setdefault(module.removesuffix(".*"), set()).update(cells[1])
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for module in private_modules(path):
            known = [each for each in listed if module == each or module.startswith(f"{each}.")]
            found.setdefault(*(known or [module]), set()).add(str(path.relative_to(ROOT)))
    assert found == listed
