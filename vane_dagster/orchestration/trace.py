"""`trace`: where a row came from, and what was made of it."""

from __future__ import annotations

from typing import Any

from vane_dagster.errors import TraceError
from vane_dagster.orchestration.read import asset_path, open_store
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.tracing.manifest_index import Book
from vane_dagster.tracing.steps import Trace
from vane_dagster.tracing.walk import trace_back, trace_forward


def trace(
    stage: Any,
    id: Any,
    partition: str | None = None,
    *,
    forward: bool = False,
    store: Any = None,
) -> Trace:
    """Follows a row through each stage back to the source file, or on to all that was made of it.

    Back, it goes by the manifests that each stage was really made from. Forward, it goes by those
    in force. Parts are chosen by the manifests' ranges of ids, row groups by their statistics, and
    of these the ids alone are read.

    Args:
        stage: As "docs/enriched", or a stage or its asset key. Forward also "docs/source", or
            "docs", for a row of the source.
        id: The row's id; a text is converted where ids are numbers.
        partition: The partition's key; none for an unpartitioned pipeline.
        forward: Whether to go from the row to what was made of it.
        store: A `FragmentStore` or the URL of a store's root. Default: ``$VANE_DAGSTER_STORE``,
            else a folder of this user.

    Returns:
        The steps; print it, show it in a notebook, or take it as a dict.

    Raises:
        TraceError: If there is no such stage, partition or row; it says where a row was left out.
        StoreError: If the store cannot be read.
    """
    path = asset_path(stage, "vd.trace")
    if len(path) == 1 and forward:
        path = (*path, SOURCE)
    if len(path) != 2:
        raise TraceError(
            f"vd.trace: stage is {stage!r}; expected pipeline and stage, as 'docs/embedding', or "
            "'docs/source' to trace forward from a row of the source"
        )
    key = None if partition is None else str(partition)
    source = getattr(getattr(stage, "pipeline", None), "source", None)
    book = Book(open_store(store, "vd.trace"), path[0], key, source)
    return trace_forward(book, path[1], id) if forward else trace_back(book, path[1], id)
