"""Indexes of source files in the store: what a scan of unchanged files found before.

``<root>/~indexes/<digest>.json`` has the entries of one partition of a source, by the identity of
the file. It is a cache: a lost index costs the time of another scan. An index in use is written
again each day, so its age tells garbage collection that no plan reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vane_dagster.storage.filesystem import Location

INDEXES = "~indexes"
"""The folder below the store's root; no pipeline has such a name."""
_FORMAT = 1
_DAY = 86_400.0


@dataclass(frozen=True)
class SourceIndex:
    """The index of one partition of a source.

    Attributes:
        root: The store's root.
        name: A digest of the source, the partition, and everything else that entries depend on.
    """

    root: Location
    name: str

    def entries(self) -> dict[str, Any]:
        """Read the entries by file; none if there is no readable index."""
        return self._read()[0]

    def keep(self, entries: Mapping[str, Any]) -> None:
        """Write the entries, unless the same ones were written within a day.

        Raises:
            StoreError: If the store refuses.
        """
        known, written = self._read()
        if known == entries and time.time() - written < _DAY:
            return
        record = {"format": _FORMAT, "written": time.time(), "files": dict(entries)}
        source_indexes(self.root).write(self._file, json.dumps(record).encode())

    @property
    def _file(self) -> str:
        return f"{self.name}.json"

    def _read(self) -> tuple[dict[str, Any], float]:
        try:
            record = json.loads(source_indexes(self.root).read(self._file))
            if record["format"] == _FORMAT:
                return dict(record["files"]), float(record["written"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # none, or one that is damaged
        return {}, 0.0


def source_indexes(root: Location) -> Location:
    """Return the folder of indexes in a store."""
    return root.child(INDEXES)
