"""Copies of the values that users' code returns and may change when it is called again."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from vane_dagster.types.host_arrays import host_array, is_pandas
from vane_dagster.types.records import fields_or_none

PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of most values; nothing can change a value of them."""


def kept(value: Any) -> Any:
    """Return a result as it is now, whatever the user's code does with the object later.

    Lists, sets and dicts of any class become plain lists and dicts, and objects with fields become
    dicts of them, and members of an enum their values, which convert to the same columns.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        plain = PLAIN.issuperset(map(type, value))
        return value.copy() if plain else [kept(item) for item in value]
    if kind is dict or isinstance(value, Mapping):
        return {name: v if type(v) in PLAIN else kept(v) for name, v in value.items()}
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value) if value.dtype.hasobject else value.copy()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        items = map(kept, value)
        return kind._make(items) if hasattr(kind, "_make") else tuple(items)
    if isinstance(value, (list, set, frozenset)):
        return [kept(item) for item in value]
    if (fields := fields_or_none(value)) is not None:
        return {name: kept(item) for name, item in fields.items()}
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, np.void) or is_pandas(value):  # a row of a structured array is a view
        return value.copy()
    array = host_array(value)
    return value if array is value else kept(array)
