"""Where this package keeps state, and a store where none is named. Nothing is imported for it."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """Where this package keeps state of its own.

    It is ``$VANE_DAGSTER_HOME``, else ``$XDG_STATE_HOME/vane_dagster``, else
    ``~/.local/state/vane_dagster``.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    home = os.environ.get("VANE_DAGSTER_HOME") or f"{state}/vane_dagster"
    return Path(home).expanduser().resolve()


def default_root() -> str:
    """A store's root where none is given: ``$VANE_DAGSTER_STORE``, else one in `state_home`."""
    return os.environ.get("VANE_DAGSTER_STORE") or str(state_home() / "store")
