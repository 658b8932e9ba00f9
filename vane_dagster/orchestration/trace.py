"""`trace`: follow a row back to its source file, or forward to its results."""

from __future__ import annotations

from typing import Any

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import TraceError
from vane_dagster.orchestration.read import asset_path, open_store
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.tracing.manifest_index import ManifestIndex
from vane_dagster.tracing.steps import Trace
from vane_dagster.tracing.walk import trace_back, trace_forward


@known_keywords("vd.trace")
def trace(
    stage: Any,
    id: Any,
    partition: str | None = None,
    *,
    forward: bool = False,
    store: Any = None,
) -> Trace:
    """Trace a row through each stage back to its source file, or forward to every row made from it.

    A backward trace uses the manifests that each stage was made from. A forward trace uses the
    manifests in force. Both continue in pipelines of the store that read a stage of another one.
    The search selects parts by the id ranges in the manifests, and row groups
    by their statistics, and reads their id columns. For a row that it shows, it also reads the
    other columns of its part, except vectors, tensors and bytes.

    If `stage` is the stage's object, which knows the source, the trace shows the values of the
    source row, also in CSV and JSON files, Iceberg tables and your own sources. With a name, and if
    the first stage filters or does not reuse rows, only the range of rows is known.

    Args:
        stage: As "docs/enriched", or a stage or its asset key. A forward trace also accepts
            "docs/source", "docs" or the pipeline, for a row of the source.
        id: The row's id; a text is converted if the ids are numbers.
        partition: The partition's key; None for an unpartitioned pipeline.
        forward: Whether to trace forward from the row.
        store: A `FragmentStore` or the URL of a store's root. Default: ``$VANE_DAGSTER_STORE``,
            else a folder of this user.

    Returns:
        The trace. Print it, display it in a notebook, or convert it to a dict.

    Raises:
        TraceError: If there is no such stage, partition or row. The message names the stage that
            dropped the row.
        StoreError: If the store cannot be read.
    """
    pipeline = stage if isinstance(stage, Pipeline) else getattr(stage, "pipeline", None)
    path = asset_path(stage.name if isinstance(stage, Pipeline) else stage, "vd.trace")
    if len(path) == 1 and forward:
        path = (*path, SOURCE)
    if len(path) != 2:
        raise TraceError(
            f"vd.trace: stage is {stage!r}; expected pipeline and stage, such as 'docs/embedding', "
            "or 'docs/source' to trace forward from a row of the source"
        )
    source = getattr(pipeline, "source", None)
    manifest_index = ManifestIndex(open_store(store, "vd.trace"), path[0], partition, source)
    walk = trace_forward if forward else trace_back
    return walk(manifest_index, path[1], id)
