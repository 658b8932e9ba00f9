"""Access to Lance tables."""

from __future__ import annotations

import re
from typing import Any

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.table_options import table_options

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
