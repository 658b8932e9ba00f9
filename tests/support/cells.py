"""A notebook whose cells are edited and executed again."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from vane_dagster.fingerprint.code import code_identity

_CONSTANTS = "WORDS = {'a', 'b', 'c'}\nclass Config:\n    SIZE = 1\n"
_FUNCTIONS = """
import dataclasses
@dataclasses.dataclass
class C:
    x: Config
def helper(b):
    return b in {'x', 'y', 'z'}
def udf(b):
    return helper(b), WORDS
def hinted(b):
    return C(b)
class Model:
    def __call__(self, b):
        return udf(b)
class Hinted:
    def __call__(self, b):
        return C(b)
"""
_EDITS = [
    ("", ""),
    ("\ndef helper", "\n\n# a note\ndef helper"),
    ("'b', 'c'", "'b'"),
    ("b in", "b not in"),
    ("SIZE = 1", "SIZE = 2"),
]


@contextmanager
def _as_main() -> Iterator[types.ModuleType]:
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield sys.modules["__main__"]
    finally:
        sys.modules["__main__"] = before


def digests_of_cells(name: str) -> list[list[str]]:
    """Return the digests of `udf`, `Model`, `hinted` and `Hinted` before edits, and after each."""
    found = []
    with _as_main() as main:
        for number, edit in enumerate(_EDITS):
            for part, text in enumerate((_CONSTANTS, _FUNCTIONS)):
                code, file = text.replace(*edit), f"<{name}-input-{number}-{part}>"
                if name:
                    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
                place = file if name else "<string>"
                exec(compile(code, place, "exec", dont_inherit=True), main.__dict__)
            known = [vars(main)[each] for each in ("udf", "Model", "hinted", "Hinted")]
            found.append([code_identity(each).digest for each in known])
    return found
