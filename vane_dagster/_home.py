"""Where this package keeps state, and a store where none is named. Nothing is imported for it."""

from __future__ import annotations

import os
from pathlib import Path

from vane_dagster.errors import VaneError

HOME = "VANE_DAGSTER_HOME"
"""The environment variable that names the folder for this package's own state."""


def state_home() -> Path:
    """Where this package keeps state of its own.

    It is ``$VANE_DAGSTER_HOME``, else ``$XDG_STATE_HOME/vane_dagster``, else
    ``~/.local/state/vane_dagster``.

    Raises:
        VaneError: The user has no home directory and the variable is not set.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    home = os.environ.get(HOME) or f"{state}/vane_dagster"
    try:
        # Symbolic links are kept, so that those of other users are found when it is verified.
        return Path(os.path.abspath(Path(home).expanduser()))
    except RuntimeError as error:
        raise VaneError(
            f"{home} cannot be resolved: user {os.geteuid()} has no home directory ($HOME is not "
            f"set, and the user has no passwd entry). Set {HOME} to a folder of your own."
        ) from error


def default_root() -> str:
    """A store's root where none is given: ``$VANE_DAGSTER_STORE``, else one in `state_home`."""
    return os.environ.get("VANE_DAGSTER_STORE") or str(state_home() / "store")
