"""The place of a declaration in an interactive session, where it may be made again."""

from __future__ import annotations

import sys
from typing import Any

_CELLS = ("<ipython-input", "<stdin>", "<python-input")


def interactive_place() -> str | None:
    """Return the notebook cell that declares something now; None outside of interactive sessions.

    It is the cell's id if the notebook tells it. In a terminal, all input is one place.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame) == "vane_dagster":
        frame = frame.f_back
    file = frame.f_code.co_filename
    if not file.startswith(_CELLS) and "ipykernel_" not in file:
        return None
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    parent = getattr(shell, "parent_header", None) or {}
    return str(parent.get("metadata", {}).get("cellId", "interactive"))


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
