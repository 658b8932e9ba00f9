"""Annotations that are text, as under ``from __future__ import annotations``."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NewType, Required, TypedDict

import pyarrow as pa
import pytest
import typing_extensions as te

from vane_dagster.errors import SchemaError
from vane_dagster.types.annotations import (
    arrow_type,
    element_of,
    hints,
)

if TYPE_CHECKING:
    from PIL.Image import Image


def described(image: Image, size: int | None) -> list[str]:
    return [str(image), str(size)]


def opened(path: str) -> Image:
    raise FileNotFoundError(path)


def of_local_class() -> Callable[..., Any]:
    class Local(TypedDict):
        x: int

    def result(n: int) -> Iterator[Local]:
        yield Local(x=n)

    return result


def of_local_fields() -> type:
    @dataclasses.dataclass
    class Inner:
        x: int

    @dataclasses.dataclass
    class Outer:
        inner: Inner

    return Outer


def test_a_name_that_only_type_checkers_import_leaves_the_others_alone():
    found = hints(described)
    assert found["return"] == list[str]
    assert found["size"] == int | None
    assert found["image"] == "Image"


def test_a_class_of_the_function_around_is_found():
    found = arrow_type(element_of(hints(of_local_class())["return"]))
    assert found == pa.struct([("x", pa.int64())])


@pytest.mark.parametrize("annotation", [hints(opened)["return"], of_local_fields()])
def test_a_name_that_is_not_found_is_named(annotation):
    with pytest.raises(SchemaError, match=r"'(Image|Inner)', with a name that cannot be looked up"):
        arrow_type(annotation)


UserId = NewType("UserId", int)


class Qualified(TypedDict, total=False):
    a: Required[int]
    b: te.NotRequired[list[UserId]]
    c: te.ReadOnly[float | None]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (UserId, pa.int64()),
        (list[UserId | None], pa.list_(pa.int64())),
        (defaultdict[str, int], pa.map_(pa.string(), pa.int64())),
        (OrderedDict[str, float], pa.map_(pa.string(), pa.float64())),
        (te.TypeAliasType("Score", float), pa.float64()),
    ],
)
def test_annotations_of_one_type(annotation, expected):
    assert arrow_type(annotation) == expected


def test_qualifiers_of_keys_are_no_part_of_their_types():
    kinds = [("a", pa.int64()), ("b", pa.list_(pa.int64())), ("c", pa.float64())]
    assert arrow_type(Qualified) == pa.struct(kinds)
