"""The internal dataclasses behave as the standard ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

from vane_dagster import _dataclass


def declared(decorator: Any) -> dict[str, Any]:
    @decorator(frozen=True)
    class Base:
        kind: ClassVar[str] = "base"
        a: int
        b: list[int] = field(default_factory=list, compare=False)

        @functools.cached_property
        def twice(self) -> int:
            return 2 * self.a

    @decorator(frozen=True)
    class Derived(Base):
        c: str = field(default="c", repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "c", self.c.upper())

    @decorator(frozen=True)
    class ByName:
        name: str
        other: int = 0

        def __hash__(self) -> int:
            return hash(self.name)

    @decorator(frozen=True)
    class Unhashed:
        name: str
        options: dict[str, int] = field(hash=False)

    @decorator
    class Changing:
        a: int
        next: Any = None

    return {
        "Base": Base,
        "Derived": Derived,
        "ByName": ByName,
        "Unhashed": Unhashed,
        "Changing": Changing,
    }


STANDARD, OURS = declared(dataclasses.dataclass), declared(_dataclass.dataclass)
CASES = [
    lambda c: repr(c["Base"](1, [2])),
    lambda c: repr(c["Derived"](1, [2], "x")),
    lambda c: c["Derived"](1, [2], "x").c,
    lambda c: c["Base"](1, [2]) == c["Base"](1, [3]),
    lambda c: c["Base"](1) == c["Base"](2),
    lambda c: c["Base"](1) == c["Derived"](1),
    lambda c: c["Base"](1) != 1,
    lambda c: hash(c["Base"](1, [2])),
    lambda c: hash(c["Derived"](1)) == hash(c["Derived"](1, [3])),
    lambda c: hash(c["ByName"]("n", 1)) == hash("n"),
    lambda c: hash(c["Unhashed"]("n", {})),
    lambda c: c["Unhashed"]("n", {}) == c["Unhashed"]("n", {"a": 1}),
    lambda c: c["Changing"].__hash__,
    lambda c: c["Base"](1).twice,
    lambda c: dataclasses.replace(c["Derived"](1, c="x"), a=2).c,
    lambda c: dataclasses.asdict(c["Derived"](1)),
    lambda c: copy.deepcopy(c["Base"](1, [2])).b,
    lambda c: [each.name for each in dataclasses.fields(c["Derived"])],
    lambda c: c["Derived"].__match_args__,
    lambda c: (c["Base"](1).kind, c["Base"].__doc__),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_methods_return_what_the_standard_ones_return(case):
    assert case(OURS) == case(STANDARD)


@pytest.mark.parametrize("classes", [STANDARD, OURS], ids=["standard", "ours"])
@pytest.mark.parametrize("name", ["a", "c", "absent"])
def test_frozen_instances_keep_their_fields(classes, name):
    made = classes["Derived"](1)
    with pytest.raises(FrozenInstanceError, match=name):
        setattr(made, name, 2)
    with pytest.raises(FrozenInstanceError, match=name):
        delattr(made, name)
    changing = classes["Changing"](1)
    changing.a, changing.next = 2, changing
    assert "Changing(a=2, next=...)" in repr(changing)
    with pytest.raises(TypeError, match="unhashable"):
        hash(changing)


@_dataclass.dataclass(frozen=True)
class Sent:
    a: int


def test_instances_are_pickled():
    assert pickle.loads(pickle.dumps(Sent(1))) == Sent(1)
