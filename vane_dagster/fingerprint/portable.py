"""Functions that travel with each call, so that a warm worker runs each edit of them.

A worker that has imported a module never sees a later edit of it. A function is portable if nothing
that it runs comes from a module of the user's: the function, and everything in the user's modules
that it refers to, is pickled by value, and the code imports none of these modules when it runs.
"""

from __future__ import annotations

import dis
import pickletools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.bundle import pickled_by_value, without_ids
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import MAIN_NAMES, Finder

_MAX_BYTES = 1 << 18
"""A payload is sent with each call; functions that refer to more data are not portable."""
_COMPUTED_IMPORTS = {"import_module", "__import__", "exec", "find_spec", "modules"}
"""Names in code that may import a module by a computed name, or look one up."""
_PROTOCOL = 3
"""The last one that writes the module and the name of what it imports side by side."""


def portable_payload(modules: Iterable[str], obj: Any) -> bytes | None:
    """Pickle functions by value; None if they are not portable."""
    codes: list[types.CodeType] = []
    needed: set[str] = set()
    sent = set(modules).difference(MAIN_NAMES)

    def visit(part: Any) -> None:
        if isinstance(part, types.CodeType):
            codes.append(part)
        elif isinstance(part, types.ModuleType) and part.__name__ not in sent:
            needed.add(part.__name__)

    try:
        payload = pickled_by_value(sent, obj, visit, _PROTOCOL, ids := set[str]())
    except CodeIdentityError:
        return None
    if len(payload) > _MAX_BYTES or any(_COMPUTED_IMPORTS & set(code.co_names) for code in codes):
        return None
    finder = Finder()
    needed.update(name for code in codes for name in _imported(code))
    steps = pickletools.genops(payload)
    needed.update(
        str(argument).partition(" ")[0] for step, argument, _ in steps if step.name == "GLOBAL"
    )
    return None if any(map(finder.is_own, needed)) else _with_own_classes(payload, ids)


def _with_own_classes(payload: bytes, ids: Iterable[str]) -> bytes:
    """Replace cloudpickle's ids of classes, by which an edit would change the class of before."""
    content = combine("classes", without_ids(payload, ids))[:24]
    ordered = sorted((each.encode() for each in ids), key=payload.index)
    for place, id in enumerate(ordered):
        payload = payload.replace(id, f"{content}{place:08}".encode())
    return payload


def _imported(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that code imports when it runs; a dot for a relative import."""
    constants: list[Any] = []
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_CONST":
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            level = constants[-2]  # the names to import follow it
            yield "." if level else str(step.argval)
