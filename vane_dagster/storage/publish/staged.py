"""What is staged in the targets of `write` stages, found by the pattern of their URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vane_dagster.storage.filesystem import Location, Stored
from vane_dagster.storage.publish.parquet import STAGING

_FIELD = re.compile(r"\{[^{}]*\}")


def staged_parts(pattern: str, options: Mapping[str, Any]) -> dict[str, Stored]:
    """All files that workers have staged below a target, by URL.

    Where the pattern has placeholders, everything below its literal beginning is listed.

    Args:
        pattern: The target's URL, as `write` was given it.
        options: Options of the fsspec file system.

    Raises:
        StoreError: If it cannot be listed.
    """
    pattern = pattern.rstrip("/")
    field = _FIELD.search(pattern)
    if field is None:
        folder = Location(f"{pattern}/{STAGING}", options)
        return {folder.file_url(path): stored for path, stored in folder.entries().items()}
    literal, _, begun = pattern[: field.start()].rpartition("/")
    rest = begun + pattern[field.start() :]
    wanted = "[^/]+".join(map(re.escape, _FIELD.split(rest)))
    staged = re.compile(f"{wanted}/{STAGING}/[^/]+")
    folder = Location(literal or "/", options)
    return {
        folder.file_url(path): stored
        for path, stored in folder.entries().items()
        if staged.fullmatch(path)
    }
