"""The declared target of a `write` stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTITION_COLUMN = "partition_key"
"""The default name of a table's column with the partition's key."""


@dataclass(frozen=True)
class Target:
    """The declared target of a `write` stage.

    Attributes:
        url: A folder with placeholders for the partition's key, or a table.
        storage_options: Options of the fsspec file system; never part of a key.
        compression: Codec of the Parquet files.
        format: The name of the format, such as "parquet"; see `registry`.
        target_bytes: Approximate size of a file; None for one file per fragment.
        partition_column: The table's column with the partition's key; None without one.
        options: The arguments that only this format takes; see `Publisher.options`.
        connection: How to reach what the table is registered in, such as the properties of a
            catalog; never part of a key.
    """

    url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    compression: str
    format: str = "parquet"
    target_bytes: int | None = None
    partition_column: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    connection: Mapping[str, Any] = field(default_factory=dict, repr=False)
