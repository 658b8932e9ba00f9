"""The notebooks, executed cell by cell."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
LAST = {"inner_loop": "1 up to date (200 rows", "two_versions": "'refund': 284"}
"""What the last cell of each shows: nothing was left to compute; the rows of the old version."""


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {*LAST}


@pytest.mark.parametrize("name", LAST)
def test_notebooks_run(name, tmp_path):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    texts = [str(output) for output in notebook.cells[-1]["outputs"]]
    assert any(LAST[name] in text for text in texts), texts
