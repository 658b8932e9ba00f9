"""The formats that `write` can publish. A new format is one file, and one line in this module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vane_dagster.errors import StoreError, names
from vane_dagster.storage.publish.target import Target

if TYPE_CHECKING:
    from vane_dagster.storage.publish.base import Publisher

PUBLISHERS = {
    "parquet": "vane_dagster.storage.publish.parquet:FolderPublisher",
    "delta": "vane_dagster.storage.publish.delta:DeltaPublisher",
    "lance": "vane_dagster.storage.publish.lance:LancePublisher",
    "iceberg": "vane_dagster.storage.publish.iceberg:IcebergPublisher",
}
"""Module and class of each format, imported on first use. Manifests contain the names."""


def publisher_class(format: str) -> type[Publisher]:
    """Return the class that publishes a format."""
    if format not in PUBLISHERS:
        raise StoreError(
            f"no publisher is registered for format {format!r}; expected one of "
            f"{names(PUBLISHERS, 20)}. A newer release may know it"
        )
    module, _, name = PUBLISHERS[format].partition(":")
    publisher: type[Publisher] = getattr(importlib.import_module(module), name)
    return publisher


def open_publisher(declared: Target, partition: str | None) -> Publisher:
    """Return the publisher of one partition of a declared target."""
    return publisher_class(declared.format)(declared, partition)
