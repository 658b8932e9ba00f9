"""Objects with attributes beside what they are equal by, and objects that cannot be read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from support.values import function
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.objects import value_digest


class Scaled:
    """A function object, as `functools.update_wrapper` makes it."""

    def __init__(self, function: Any, factor: int) -> None:
        functools.update_wrapper(self, function)
        self.factor = factor

    def __call__(self) -> None:
        """Do nothing."""


def test_what_a_value_holds_beside_its_text_counts() -> None:
    time = pd.Timestamp("2020-01-01")
    values = [
        *(time.as_unit(unit) for unit in ("s", "ns")),
        *(np.zeros(1, np.dtype("i4", metadata={"k": n})) for n in (1, 2)),
        *(Scaled(function, factor) for factor in (1, 2)),
        *(functools.cache(functools.partial(function, n)) for n in (1, 2)),
    ]
    assert len({value_digest(value) for value in values}) == len(values)


class Raising:
    """An object that raises for each attribute that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hidden")


class Anything:
    """An object that has each attribute."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "value",
    [Raising(), Anything(), np.frompyfunc(abs, 1, 1)],
    ids=lambda each: type(each).__mro__[0].__name__,
)
def test_an_object_that_cannot_be_read_is_refused(value: Any) -> None:
    with pytest.raises(
        CodeIdentityError, match=r"^kwargs.*(without a|so it has no) stable identity"
    ) as info:
        value_digest(value, "kwargs")
    assert "hidden" not in str(info.value)


class Stored:
    """An object that pickle writes without one of its attributes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = object()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.path,)


StoredRecord = dataclasses.make_dataclass("StoredRecord", [], bases=(Stored,), init=False)


def test_a_record_counts_by_what_pickle_writes() -> None:
    one, again, two = (StoredRecord(path) for path in "aab")
    assert value_digest(one) == value_digest(again) != value_digest(two)


@dataclasses.dataclass
class Cached:
    """An object with a property that is computed once."""

    language: str = "en"

    @functools.cached_property
    def words(self) -> set[str]:
        return {"the"}


def test_what_a_cached_property_holds_counts():
    """A worker gets it with the object."""
    found = set()
    for word in ("foo", "bar"):
        cached = Cached()
        cached.words.add(word)
        found.add(value_digest(cached))
    assert len(found) == 2
