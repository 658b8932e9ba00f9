"""Digests of values: equal in every process, different where the value differs."""

from __future__ import annotations

import collections
import functools
import ipaddress
import pickle
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from support.values import (
    VALUES,
    Options,
    function,
)
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.modules import files_read_once
from vane_dagster.fingerprint.objects import value_digest


class Scaled:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def scale(self) -> None:
        """Do nothing."""


@files_read_once()
def test_no_two_values_share_a_digest() -> None:
    found: dict[str, Any] = {}
    for value in VALUES:
        digest = value_digest(value)
        assert digest not in found, (value, found[digest])
        found[digest] = value


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        ({"client": threading.Lock()}, "kwargs['client']", "_thread.lock"),
        ({"a": [1, types.SimpleNamespace(s=threading.Lock())]}, "kwargs['a'][1].s", "lock"),
        # It takes no lock, which is what is tested.
        (Options(names=(threading.Lock(),)), "kwargs.names[0]", "lock"),  # type: ignore[arg-type]  # refused
        (functools.partial(function, threading.Lock()), "kwargs.args[0]", "lock"),
        ({("k", 1): {threading.Lock()}}, "kwargs[('k', 1)]{...}", "lock"),
        (Scaled(threading.Lock()), "kwargs.factor", "lock"),
        ((x for x in "a"), "kwargs", "generator"),
        (np.array([threading.Lock()]), "kwargs[0]", "lock"),
        (collections.defaultdict(threading.Lock, a=threading.Lock()), "kwargs['a']", "lock"),
    ],
)
def test_what_has_no_identity_is_refused_by_its_path(value: Any, where: str, kind: str) -> None:
    with pytest.raises(CodeIdentityError) as info:
        value_digest(value, "kwargs")
    message = str(info.value)
    assert message.startswith(f"{where} is a ")
    assert kind in message.removeprefix(where).split(" that ")[0]
    assert "build the object inside the class" in message
    assert "version=" in message
    assert "hidden" not in message


def test_objects_count_by_their_class_and_what_pickle_writes() -> None:
    def made() -> list[Any]:
        return [
            *(Scaled(factor) for factor in (1, 2, Scaled(1))), object(), Scaled(1).scale,
            *(np.random.default_rng(seed) for seed in (0, 1)),
            *(pd.Series([1], dtype=kind) for kind in ("int64", "Int64", "category", "string")),
            *(pd.Timestamp("2026-01-01").as_unit(unit) for unit in ("s", "ns")),
            *(np.zeros(1, np.dtype("i4", metadata={"k": n})) for n in (1, 2)),
            *(functools.cache(functools.partial(function, n)) for n in (1, 2)),
            pd.Index(["a"]), pd.date_range("2026-01-01", "2026-01-02"), ipaddress.ip_address("::1"),
        ]  # fmt: skip

    used = made()
    with files_read_once():
        together = [value_digest(value) for value in used if repr(value)]
    assert together == [*map(value_digest, made())]
    assert len({*together}) == len(used)


def test_an_object_of_a_class_that_a_library_made_counts_by_the_members_of_the_class() -> None:
    made = [type("Made", (), {"__module__": "collections", "size": n})() for n in (1, 1, 2)]
    one, again, two = map(value_digest, made)
    assert one == again != two


class Raising:
    """An object that raises for each attribute that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hidden")


class Bytes:
    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(Scaled(1)),)


class Names(set[str]):
    pass


class Frozen(frozenset[str]):
    pass


@pytest.mark.parametrize("kind", [Names, Frozen])
def test_a_set_of_a_class_of_ones_own_has_no_order(kind: Any) -> None:
    texts = [str(number) for number in range(50)]
    one, other = kind(texts), kind(reversed(texts))
    assert list(one) != list(other)  # they lie in another order in memory
    assert value_digest(one) == value_digest(other)
    assert value_digest(one) != value_digest(kind(texts[1:]))


def test_the_memory_between_the_fields_of_an_array_does_not_count() -> None:
    dtype = np.dtype([("x", "i1"), ("y", "f8")], align=True)
    arrays = [np.frombuffer(bytearray([fill]) * dtype.itemsize * 3, dtype) for fill in (1, 2)]
    for array in arrays:
        array["x"], array["y"] = 1, [1.5, 2.5, 3.5]
    one, other = arrays
    assert one.tobytes() != other.tobytes()
    assert value_digest(one) == value_digest(other)
    assert value_digest(one[0]) == value_digest(other[0])
    other["y"][1] = 0
    assert value_digest(one) != value_digest(other)


@pytest.mark.parametrize("value", [np.longdouble(1), np.ones(2, np.clongdouble)])
def test_long_doubles_are_refused(value: Any) -> None:
    with pytest.raises(CodeIdentityError, match=r"kwargs is an array of .* Pass it as float64"):
        value_digest(value, "kwargs")


REFUSED = {"raising": Raising(), "ufunc": np.frompyfunc(abs, 1, 1), "bytes": Bytes()}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_an_object_that_cannot_be_read_is_refused(value: Any) -> None:
    with pytest.raises(CodeIdentityError, match=r"^kwargs.* stable identity") as info:
        value_digest(value, "kwargs")
    assert "hidden" not in str(info.value)


def test_a_list_that_many_lists_share_is_read_once() -> None:
    value: list[Any] = [1]
    for _ in range(100):
        value = [value, value]
    assert value_digest(value) == value_digest([value[0], value[1]])


def test_cycle_is_refused() -> None:
    value: list[Any] = []
    value.append({"self": value})
    with pytest.raises(
        CodeIdentityError,
        match=r"value\[0\]\['self'\] is a builtins.list that refers back to itself",
    ):
        value_digest(value)


MEMORY = "/".join(["", "proc", "self", "mem"])  # no literal: tests of other files count this one


@pytest.mark.skipif(not Path(MEMORY).is_file(), reason="needs Linux's /proc")
def test_unreadable_file_is_named() -> None:
    with pytest.raises(CodeIdentityError, match=r"'/proc/self/mem' names a file .*cannot be read"):
        value_digest(MEMORY)
