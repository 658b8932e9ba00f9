"""The notebook cell that declares a stage. Executed again, it replaces the stage."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """An execution of a cell.

    Attributes:
        id: The cell's id. All input without one, such as a terminal's, is one cell.
        execution: IPython's number of the execution.
    """

    id: str
    execution: int


def executing_cell() -> Cell | None:
    """Return the cell that IPython executes; None outside of IPython."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return None
    parent = getattr(shell, "parent_header", None) or {}
    return Cell(str(parent.get("metadata", {}).get("cellId", "")), int(shell.execution_count))
