"""Copies of the values that users' code returns and may change when it is called again."""

from __future__ import annotations

import copy
import datetime as dt
import enum
import types
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from vane_dagster.types.host_arrays import host_array, is_pandas
from vane_dagster.types.records import fields_or_none

PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of most values; nothing can change a value of them."""
_UNCHANGING = (
    str, int, float, complex, bytes, range, np.generic, Decimal, uuid.UUID,
    dt.date, dt.time, dt.timedelta, dt.tzinfo, type, types.FunctionType,
)  # fmt: skip


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
    if isinstance(value, _UNCHANGING) and not isinstance(value, np.void):  # a view of an array
        return value
    if isinstance(value, tuple):
        items = map(kept, value)
        return kind._make(items) if hasattr(kind, "_make") else tuple(items)
    if isinstance(value, (list, set, frozenset)):
        return [kept(item) for item in value]
    if (fields := fields_or_none(value)) is not None:
        return {name: kept(item) for name, item in fields.items()}
    if hasattr(value, "detach"):
        return value.detach().clone()
    if isinstance(value, memoryview):
        return value.tobytes()
    return _kept_object(value)


def _kept_object(value: Any) -> Any:
    """Return a copy of an object that a column can hold, and any other object itself.

    The conversion refuses the others. They may be as large as a model.
    """
    if is_pandas(value):
        return value.map(kept) if value.ndim == 1 and value.dtype == object else value.copy()
    try:
        array = host_array(value)
        if array is not value:
            return kept(array)
        pa.infer_type([value])
    except Exception:  # raised by the object's own conversion
        return value
    return copy.deepcopy(value)
