"""`load` and `quarantine`: read the store from a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vane_dagster._home import default_root
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import StoreError
from vane_dagster.storage.dataframes import NEEDS_RAY, form_of, known_forms, loaded
from vane_dagster.storage.filesystem import StoragePath, absolute_url
from vane_dagster.storage.quarantine import PARTITION, concat_faults, read_failed, read_faults
from vane_dagster.storage.reader import StoredRows, find, find_all, read
from vane_dagster.storage.store import Store


@known_keywords("vd.load")
def load(
    stage: Any,
    partitions: str | Sequence[str] | None = None,
    *,
    as_: Any = pa.Table,
    columns: Sequence[str] | None = None,
    store: Any = None,
    allow_missing_partitions: bool = False,
    partition_column: str | None = None,
    run: str | None = None,
) -> Any:
    """Load the stored rows of a stage, or of an ordinary asset.

    Each partition is either complete, as its last commit has left it, or absent. Datasets, lazy
    frames, relations and readers open files when they are used, so use them soon: superseded files
    are deleted some days later.

    Args:
        stage: As "docs/embedding", or a stage, an asset or an asset key.
        partitions: One partition key or several. Default: all materialized partitions, sorted by
            key, or the rows of an unpartitioned stage.
        as_: `pyarrow.Table`, `pyarrow.dataset.Dataset`, `pyarrow.RecordBatchReader`,
            `pandas.DataFrame`, `polars.DataFrame`, `polars.LazyFrame`, `duckdb.DuckDBPyRelation` or
            `ray.data.Dataset`.
        columns: The columns to read; all by default. Each must have one type in all partitions.
        store: A `FragmentStore` or the URL of a store's root. Default: ``$VANE_DAGSTER_STORE``,
            else a folder of this user.
        allow_missing_partitions: Whether to skip partitions that were never materialized.
        partition_column: A name for an additional column with each row's partition key; it is the
            last one. Default: none.
        run: Load the rows that a run has committed, and not those in force: the beginning of its
            id. Former versions are kept until garbage collection removes them.

    Raises:
        StoreError: If the stage was never materialized, or not by the run, lacks a column, has one
            with the name of `partition_column`, partitions differ in a column, or `as_` is not
            supported.
    """
    form = form_of(as_)
    if form is None:
        raise StoreError(f"vd.load: as_ is {as_!r}; expected one of the classes {known_forms()}")
    partitions = [partitions] if isinstance(partitions, str) else partitions
    rows = read(
        open_store(store, "vd.load"),
        asset_path(stage, "vd.load"),
        partitions,
        allow_missing_partitions,
        columns,
        run,
    )
    return loaded(connected(rows.with_partition(partition_column), form), form)


@known_keywords("vd.quarantine")
def quarantine(
    stage: Any,
    partitions: str | Sequence[str] | None = None,
    *,
    store: Any = None,
) -> pa.Table:
    """Load the quarantined rows of a stage with their errors.

    If a later run gave up a partition, the first rows that failed in that run are included.

    Args:
        stage: As for `load`.
        partitions: As for `load`.
        store: As for `load`.

    Returns:
        One row per quarantined row: its id in the stage's input, ``parents`` (the ids of the rows
        that it was made from, if any), ``partition``, ``stage``, ``fragment``, ``error`` (the
        exception's class), ``message``, ``traceback``, ``attempts`` (how many calls failed with the
        row, or how many workers it ended), ``transient`` (whether the error is transient),
        ``run_id``, ``model``, ``worker``, ``at``, and ``committed`` (false for the rows of a run
        that gave the partition up).

    Raises:
        StoreError: If the stage was never materialized.
    """
    opened, path = open_store(store, "vd.quarantine"), asset_path(stage, "vd.quarantine")
    partitions = [partitions] if isinstance(partitions, str) else partitions
    tables = []
    failed = read_failed(opened, path[0], path[1], partitions) if len(path) == 2 else {}
    manifests = find(opened, path, partitions)
    if not (manifests or failed) or {*(partitions or ())} - manifests.keys() - failed.keys():
        find_all(opened, path, partitions)  # raises
    for key, manifest in manifests.items():
        rows = read_faults(opened.parts_of(manifest), manifest)
        rows = rows.append_column(PARTITION, pa.array([key] * len(rows), pa.string()))
        tables.append(rows.append_column("committed", pa.array([True] * len(rows), pa.bool_())))
    for rows in failed.values():
        tables.append(rows.append_column("committed", pa.array([False] * len(rows), pa.bool_())))
    return concat_faults(tables)


def connected(rows: StoredRows, form: str) -> StoredRows:
    """Connect to Ray if the form needs it and the process is not connected.

    The cluster is the one that ``$RAY_ADDRESS`` names, else the local one, as for `RayCompute`.
    """
    if form == NEEDS_RAY:
        import ray

        from vane_dagster.orchestration.resources import RayCompute

        if not ray.is_initialized():
            RayCompute(address=os.environ.get("RAY_ADDRESS") or None)._connect(start=True)
    return rows


def open_store(store: Any, caller: str) -> Store:
    """Open a store."""
    if isinstance(store, Store):
        return store
    if store is None or isinstance(store, (str, os.PathLike)):
        root = os.fspath(store) if store is not None else default_root()
        return Store(StoragePath(absolute_url(root)))
    if not hasattr(store, "open"):
        raise StoreError(
            f"{caller}: store is a {type(store).__name__}; expected a FragmentStore or a URL"
        )
    opened = store.open()
    assert isinstance(opened, Store)
    return opened


def asset_path(stage: Any, caller: str) -> Sequence[str]:
    """Return the path of an asset key."""
    if isinstance(stage, str) and stage.strip("/"):
        return stage.strip("/").split("/")
    path = getattr(getattr(stage, "key", stage), "path", stage)
    if not path or not isinstance(path, (list, tuple)):
        raise StoreError(
            f"{caller}: stage is {stage!r}; expected pipeline and stage, such as 'docs/embedding', "
            "or an asset or its key"
        )
    return list(path)
