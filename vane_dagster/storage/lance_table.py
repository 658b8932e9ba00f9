"""Access to Lance tables: opening a version, and the types that Lance holds."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.table_options import table_options
from vane_dagster.types.tensors import is_tensor, storage_type

_GONE = re.compile(r"was not found|not found:|does not exist", re.IGNORECASE)


def driver_url(location: Location) -> str:
    """Return a table's URL as Lance's driver takes it."""
    if location.is_local:
        return location.path
    return location.url.rstrip("/").replace("s3a://", "s3://", 1)


def driver_options(location: Location) -> dict[str, str] | None:
    """Return the storage options of Lance's driver."""
    return None if location.is_local else table_options(location)


def open_table(location: Location, version: int | str | None = None) -> Any:
    """Open a table."""
    import lance

    options = driver_options(location)
    try:
        return lance.dataset(driver_url(location), version=version, storage_options=options)
    except (ValueError, OSError) as error:
        if _GONE.search(str(error)):
            return None
        raise


def lance_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which a Lance table holds a column without loss; None if there is none.

    A tensor is a fixed-size list of its elements, in row-major order, as vector search expects.
    """
    if is_tensor(kind):
        return lance_type(storage_type(kind))
    if isinstance(kind, pa.BaseExtensionType):
        return lance_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return lance_type(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        value = lance_type(kind.value_type)
        return value and (pa.list_(value, kind.list_size if _is_fixed(value) else -1))
    if pa.types.is_large_list(kind):
        value = lance_type(kind.value_type)
        return value and pa.large_list(value)
    if pa.types.is_list(kind) or str(kind).startswith(("list_view", "large_list_view")):
        value = lance_type(kind.value_type)
        return value and pa.list_(value)
    if pa.types.is_map(kind):
        key, value = lance_type(kind.key_type), lance_type(kind.item_type)
        return pa.map_(key, value) if key and value else None
    if pa.types.is_struct(kind):
        held = [(field.name, lance_type(field.type)) for field in kind]
        return pa.struct(held) if held and all(type for _, type in held) else None
    if pa.types.is_decimal(kind):
        return kind if kind.bit_width >= 128 else pa.decimal128(kind.precision, kind.scale)
    if kind in _WIDER:
        return _WIDER[kind]
    is_unknown = pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind)
    return None if is_unknown or pa.types.is_interval(kind) else kind


_WIDER = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def _is_fixed(kind: pa.DataType) -> bool:
    """Whether Lance holds fixed-size lists of a type."""
    if pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(pa.types.is_primitive(kind))
