"""Values with named fields, as users' functions return them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def fields_of(value: Any) -> Mapping[str, Any]:
    """Return a mapping, dataclass, pydantic model or named tuple as a mapping."""
    fields = fields_or_none(value)
    if fields is None:
        raise TypeError(
            f"returned {type(value).__name__}; expected a dict, dataclass, pydantic model or named "
            "tuple with a value for each column of the schema, or name the one column by "
            "output_column"
        )
    return fields


def fields_or_none(value: Any) -> Mapping[str, Any] | None:
    """Return what `fields_of` returns; None for a value without named fields."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(model := getattr(type(value), "model_fields", None), Mapping):
        return {name: getattr(value, name) for name in model}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    return None
