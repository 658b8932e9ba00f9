"""Partition keys, with what placeholders can name: dimensions, and the bounds of a time window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vane_dagster._arguments import time_windows
from vane_dagster.errors import SourceError


class PartitionKey(str):
    """A partition's key, as text. Other processes get the text alone.

    Attributes:
        keys_by_dimension: The keys of a multi-partition, by the names of its dimensions.
    """

    keys_by_dimension: Mapping[str, str]
    _partitions_def: Any

    def __new__(cls, key: str, partitions_def: Any) -> PartitionKey:
        """Parse a key."""
        made = super().__new__(cls, key)
        made._partitions_def = partitions_def
        parsed = getattr(partitions_def, "get_partition_key_from_str", None)
        made.keys_by_dimension = parsed(key).keys_by_dimension if parsed else {}
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def bound(self, name: str, form: str) -> str:
        """Return the "start" or the "end" of the time window, in the format of `strftime`."""
        dimension, definition = next(iter(time_windows(self._partitions_def).items()))
        key = self.keys_by_dimension[dimension] if dimension else str(self)
        try:
            moment = getattr(definition.time_window_for_partition_key(key), name)
        except ValueError as error:
            raise SourceError(
                f"{key!r} is no key of the pipeline's time windows: {error}"
            ) from error
        return str(moment.strftime(form) if form else moment.isoformat())
