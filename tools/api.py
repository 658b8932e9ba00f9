"""Print the public names with their parameters and fields, and fail beyond the limits of the API.

    python tools/api.py [--check]

What a name takes counts: the parameters of a function, of a constructor and of each public method,
without ``self``, and each key of a TypedDict; the fields of a record or a Dagster resource.
``**options: Any`` of a class is beyond every limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import vane_dagster as vd

MAX_NAMES = 45
MAX_PARAMETERS = 16
MAX_FIELDS = 12


def public_names() -> list[str]:
    """Return the exported names, without those of Python's own protocols."""
    return sorted(name for name in vd.__all__ if not name.startswith("__"))


def parameters(function: Any) -> list[str]:
    """Return the parameters of a function; the keys of a TypedDict in place of its ``**kwargs``."""
    found = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_KEYWORD and hasattr(each.annotation, "__args__"):
            found += [*get_type_hints(each.annotation.__args__[0])]
        elif each.kind is each.VAR_KEYWORD and each.annotation in ("Any", Any):
            found.append(f"**{each.name}")
        elif each.name not in ("self", "cls"):
            found.append(each.name)
    return found


def signatures(name: str, value: Any) -> Iterator[tuple[str, list[str], int]]:
    """Yield what can be called or declared: its name, what it takes, and the limit."""
    fields = getattr(value, "model_fields", None)
    if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    if fields is not None or dataclasses.is_dataclass(value):
        own = fields or value.__dataclass_fields__
        yield name, [each for each in own if not each.startswith("_")], MAX_FIELDS
    elif callable(value):
        yield name, parameters(value), MAX_PARAMETERS
    members = value if inspect.isclass(value) else type(value)
    if not members.__module__.startswith("vane_dagster"):
        return
    for each, member in inspect.getmembers(members, inspect.isfunction):
        if not each.startswith("_") and member.__module__.startswith("vane_dagster"):
            yield f"{name}.{each}", parameters(member), MAX_PARAMETERS


def main(check: bool) -> int:
    """Print the API.

    Args:
        check: Whether to return 1 if a limit is exceeded.
    """
    names, beyond = public_names(), 0
    print(f"{len(names)} names, at most {MAX_NAMES}")
    beyond += len(names) > MAX_NAMES
    for name in names:
        for shown, taken, limit in signatures(name, getattr(vd, name)):
            is_hidden = inspect.isclass(getattr(vd, name)) and "**" in "".join(taken)
            is_beyond = len(taken) > limit or is_hidden
            beyond += is_beyond
            print(f"{'!' if is_beyond else ' '} {len(taken):2} {shown}({', '.join(taken)})")
    return 1 if check and beyond else 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail beyond the limits")
    sys.exit(main(arguments.parse_args().check))
