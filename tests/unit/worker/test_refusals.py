"""What to return in place of values that Arrow cannot hold."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from vane_dagster.errors import UdfError
from vane_dagster.worker.results import from_result

TEXT, FLOAT, BLOB = pa.string(), pa.float32(), pa.binary()
FLOATS = pa.list_(pa.float32())


@dataclasses.dataclass
class Record:
    x: int = 1


def refusal(values: Any, kind: pa.DataType) -> str:
    schema = pa.schema([("y", kind)])
    with pytest.raises(UdfError) as caught:
        from_result({"y": values}, schema, (), "id", "stage 'docs/m'")
    message = str(caught.value)
    assert message.startswith(f"stage 'docs/m': column 'y': expected {kind}, found ")
    return message


CASES: list[tuple[Any, pa.DataType, str]] = [
    ([None, Image.new("L", (5, 4))], FLOATS, "a Image has no type in Arrow. Return numbers, text"),
    ([{"x": 1}], FLOATS, "or declare {'y': 'STRUCT(\"x\" BIGINT)'}"),
    ([1, "a"], TEXT, "rows have different types: int, str"),
    (np.zeros(2, complex), FLOAT, "ndarray of complex128, shape (2,): Unsupported numpy type"),
    (np.ones((2, 2)), FLOAT, 'a vector a row. Declare vd.tensor("'),
    (None, FLOAT, "a single value, not one for each row. Return a list or an array"),
    ({"a": 1}, FLOAT, "Return one of its values, or a list with a dict for each row"),
    ([2**70], pa.int64(), "too large"),
    # columns that Arrow holds, of another type
    ([{1, 2}], TEXT, "Convert them in the function, or declare {'y': 'BIGINT[]'} in the schema"),
    ([2.5], pa.int64(), "Return values that fit, and None for missing ones, or declare {'y':"),
]


@pytest.mark.parametrize(("values", "kind", "words"), CASES, ids=range(len(CASES)))
def test_the_message_has_the_type_and_what_to_return(values, kind, words):
    assert words in refusal(values, kind)


def test_a_message_holds_no_value():
    secret = SimpleNamespace(password="hunter2")
    assert "hunter2" not in refusal([secret], TEXT)
    assert "hunter2" not in refusal(["a", Record(x="hunter2")], TEXT)  # type: ignore[arg-type]  # a value that is easy to find
    assert "hunter2" not in refusal([[1], "hunter2"], pa.list_(pa.int64()))
