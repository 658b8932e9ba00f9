"""The examples of docs/sources.md for rows that are no files, as a reader would run them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import dagster as dg

import vane_dagster as vd
from support.data import read_stage

PAGE = Path(vd.__file__).parents[1] / "docs" / "sources.md"


def example(heading: str, folder: Path) -> ModuleType:
    """The first block of Python below a heading, imported from a file."""
    below = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", below, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE} has no Python below {heading!r}"
    file = folder / "page_definitions.py"
    file.write_text(found[1])
    spec = importlib.util.spec_from_file_location("page_definitions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_in_memory(tmp_path, local, materialize):
    module = example("Rows in memory", tmp_path)
    assert isinstance(module.defs, dg.Definitions)
    assert materialize(module.faq, local).success
    assert read_stage(tmp_path / "store", "faq", "lengths")["length"].to_pylist() == [4, 4, 5]
