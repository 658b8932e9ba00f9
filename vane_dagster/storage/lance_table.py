"""Access to Lance tables."""

from __future__ import annotations

import re
from typing import Any

from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.table_options import driver_options, driver_url

_GONE = re.compile(r"was not found|not found:|does not exist", re.IGNORECASE)


def open_table(path: StoragePath, version: int | str | None = None) -> Any:
    """Open a table."""
    import lance

    options = driver_options(path)
    try:
        return lance.dataset(driver_url(path), version=version, storage_options=options)
    except (ValueError, OSError) as error:
        if _GONE.search(str(error)):
            return None
        raise
