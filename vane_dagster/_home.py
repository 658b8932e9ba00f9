"""This user's name, and the locations of own state and of the default store."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from vane_dagster.errors import VaneError

HOME = "VANE_DAGSTER_HOME"
"""The environment variable that names the folder for this package's own state."""
STORE_MARK = "_vane_store"
"""The empty file by which a local folder is known as the root of a store."""


def state_home() -> Path:
    """Return the folder for this package's own state.

    It is ``$VANE_DAGSTER_HOME``, else ``$XDG_STATE_HOME/vane_dagster``, else
    ``~/.local/state/vane_dagster``.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    home = os.environ.get(HOME) or f"{state}/vane_dagster"
    try:
        # Symbolic links are kept: verification must see links that belong to other users.
        return Path(os.path.abspath(Path(home).expanduser()))
    except RuntimeError as error:
        raise VaneError(
            f"{home} cannot be resolved: user {os.geteuid()} has no home directory ($HOME is not "
            f"set, and the user has no passwd entry). Set {HOME} to a folder of your own."
        ) from error


def default_root() -> str:
    """Return the default store root: ``$VANE_DAGSTER_STORE``, else a folder in `state_home`."""
    return os.environ.get("VANE_DAGSTER_STORE") or str(state_home() / "store")


def user_name() -> str:
    """Return the user's name, or number if the system has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"user {os.getuid()}"
