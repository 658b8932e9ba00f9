"""How functions and classes of installed packages are named in keys."""

from __future__ import annotations

import sys
from typing import Any

import vane_dagster

_PUBLIC = ("vane_dagster.checks", "vane_dagster.providers.base", "vane_dagster.testing")


def library_name(obj: Any, module: str) -> tuple[str, str]:
    """Module and name of a package's object; of ours those by which users import it.

    So a class of ours counts as the same after it was moved to another file.

    Args:
        obj: The function, class or other object of code.
        module: The module that it says it is from.
    """
    own = vane_dagster.__name__
    if module.partition(".")[0] == own:
        for name, home in vane_dagster._HOME.items():
            if getattr(sys.modules.get(f"{own}.{home}"), name, None) is obj:
                return own, name
        for public in _PUBLIC:
            for name, value in vars(sys.modules.get(public, object)).items():
                if value is obj:
                    return public, name
    return module, getattr(obj, "__qualname__", type(obj).__qualname__)
