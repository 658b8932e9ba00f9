"""Work that calls no code of the user, done in the process of the driver."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from vane_dagster.worker.host import without_code
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Computed


def compute_here(work: Work, tables: Sequence[pa.Table]) -> Computed:
    """Do a task that calls no code of the user; see `worker.host.without_code`."""
    return without_code(work, tables)
