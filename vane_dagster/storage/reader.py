"""Reads of an asset in the store, only through the manifests in force.

An asset is a stage in the folder ``<pipeline>/<stage>``, or an ordinary asset that `asset_writer`
has stored in the folder ``~assets/<its key>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from vane_dagster._arguments import NAME
from vane_dagster._keywords import require_columns
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.store import Store

ASSETS = "~assets"
"""The folder of ordinary assets. No pipeline can have this name."""


class RowsFile(NamedTuple):
    """A file of rows: its file system, its path there, and its partition."""

    fs: Any
    path: str
    partition: str | None


@dataclass(frozen=True)
class StoredRows:
    """Rows of one asset, in the order of its partitions.

    Attributes:
        label: The asset, such as "docs/embedding".
        files: The files. Those of a branch and of its fallback may be on two file systems.
        schema: The rows' schema.
        partition_column: The column of the schema that has the partition's key, and is in no file.
    """

    label: str
    files: tuple[RowsFile, ...]
    schema: pa.Schema
    partition_column: str | None = None

    def select(self, columns: Sequence[str] | None) -> StoredRows:
        """Select columns."""
        if columns is None:
            return self
        if isinstance(columns, str):
            raise StoreError(f"{self.label!r}: columns is {columns!r}; expected a list of names")
        require_columns(repr(self.label), columns, self.schema.names, StoreError)
        schema = pa.schema([self.schema.field(name) for name in dict.fromkeys(columns)])
        return replace(self, schema=schema)

    def with_partition(self, column: str | None) -> StoredRows:
        """Add a column with the partition's key, which is null in an unpartitioned asset."""
        if column is None:
            return self
        if column in self.schema.names:
            raise StoreError(
                f"{self.label!r} has a column {column!r}; give partition_column another name"
            )
        schema = self.schema.append(pa.field(column, pa.string()))
        return replace(self, schema=schema, partition_column=column)


def asset_folder(path: Sequence[str]) -> str:
    """Return the folder of an ordinary asset, below `ASSETS`."""
    return partition_folder("/".join(part.replace("/", "\\/") for part in path))


def find(
    store: Store, path: Sequence[str], partitions: Iterable[str | None] | None
) -> dict[str | None, Manifest]:
    """The manifests in force of an asset, by partition; partitions without one are left out."""
    wanted = None if partitions is None else list(dict.fromkeys(partitions))
    places = [(ASSETS, asset_folder(path))]
    if len(path) == 2 and all(map(NAME.fullmatch, path)):
        places.append((path[0], path[1]))
    opened_places = [opened for place in places if (opened := in_force(store, *place, wanted))]
    # A key may have changed from a stage to an ordinary asset, or the reverse.
    return max(opened_places, key=_newest, default={})


def find_all(
    store: Store, path: Sequence[str], partitions: Sequence[str | None] | None
) -> dict[str | None, Manifest]:
    """As `find`, but raise StoreError for missing partitions, or if there is none."""
    manifests = find(store, path, partitions)
    _require(store, path, partitions or None, manifests, allow_missing=False)
    return manifests


def find_run(store: Store, path: Sequence[str], run: str) -> dict[str | None, Manifest]:
    """The last manifest of each partition of an asset that a run has committed."""
    place = ("/".join(path[:-1]), path[-1])
    history = store.history(*place)
    opened = in_threads(lambda each: store.opened_if_there(*place, each[0], str(each[1])), history)
    made = [each for each in opened if each is not None]
    runs = dict.fromkeys(each.run_id for each in made)
    named = [each for each in runs if each.startswith(run)]
    if len(named) > 1:
        raise StoreError(f"several runs begin with {run!r}; give more of the id")
    if not named:
        raise StoreError(
            f"no run {run!r} has committed rows of {'/'.join(path)!r} in {store.root.url!r}, or "
            f"garbage collection removed them; the runs there are: {names(runs)}"
        )
    return {each.partition: each for each in made if each.run_id == named[0]}


def read(
    store: Store,
    path: Sequence[str],
    partitions: Iterable[str | None] | None,
    allow_missing: bool = False,
    columns: Sequence[str] | None = None,
    run: str | None = None,
) -> StoredRows:
    """Return the rows of an asset, or some columns, each partition as in one manifest.

    It is the manifest in force, or the last one of a run.
    """
    label = "/".join(path)
    wanted = None if partitions is None else list(dict.fromkeys(partitions))
    if run is None:
        manifests = find(store, path, wanted)
    else:
        made = find_run(store, path, run)
        if not allow_missing and (missing := {*(wanted or ())} - made.keys()):
            raise StoreError(f"{label!r}: run {run!r} has not committed {names(missing)}")
        manifests = {key: made[key] for key in wanted or made if key in made}
    _require(store, path, wanted, manifests, allow_missing)
    rows = rows_of(store, label, manifests or find(store, path, None), columns).select(columns)
    return rows if manifests else replace(rows, files=())


def rows_of(
    store: Store,
    label: str,
    manifests: Mapping[str | None, Manifest],
    columns: Sequence[str] | None = None,
) -> StoredRows:
    """Return the rows of some manifests of an asset; `columns` must agree in type, or all do."""
    stored = in_threads(lambda manifest: with_rows(store, manifest), manifests.values())
    files: list[RowsFile] = []
    for key, each in zip(manifests, stored):
        folder, span = places(store, each)
        fs = folder.fs
        files += (RowsFile(fs, folder.file(name), key) for name in span)
    schema = _common_schema(label, stored, columns) if stored else pa.schema([])
    return StoredRows(label, tuple(files), schema)


def with_rows(store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest whose parts have the rows.

    A `write` stage has those of its upstream stage, whose manifest garbage collection keeps.
    """
    while manifest.kind == "write":
        (stage,) = manifest.reads
        place = (manifest.pipeline, stage, partition_folder(manifest.partition))
        upstream = store.opened_if_there(*place, manifest.upstream[stage])
        if upstream is None:
            raise StoreError(
                f"'{manifest.pipeline}/{manifest.stage}': the manifest of {stage!r} that it was "
                "made from is gone. Materialize it again"
            )
        manifest = upstream
    return manifest


def places(store: Store, manifest: Manifest) -> tuple[StoragePath, list[str]]:
    """Return the folder and names of the parts of a manifest of `with_rows` that have rows."""
    return store.parts_of(manifest), [part.name for part in manifest.parts if part.rows]


def _newest(manifests: Mapping[str | None, Manifest]) -> float:
    return max(manifest.committed_at for manifest in manifests.values())


def in_force(
    store: Store, pipeline: str, stage: str, partitions: Sequence[str | None] | None
) -> dict[str | None, Manifest]:
    """Open the manifests in force of a stage, or of the folder of an asset, by partition."""
    if partitions is not None:
        names = store.latest(pipeline, stage, partitions)
        order = [key for key in partitions if key in names]
        read = in_threads(lambda key: store.read(pipeline, stage, key, names[key]), order)
        return dict(zip(order, read))
    listed = store.latest_of_all(pipeline, stage).items()
    every = in_threads(lambda each: store.opened(pipeline, stage, each[0], str(each[1])), listed)
    by_key = {each.partition: each for each in every}
    single = by_key.pop(None, None)
    # An asset that gained or lost its partitions has both: the latest materialization wins.
    if single is not None and (not by_key or single.committed_at >= _newest(by_key)):
        return {None: single}
    return dict(sorted(by_key.items(), key=lambda item: str(item[0])))


def _require(
    store: Store,
    path: Sequence[str],
    wanted: Sequence[str | None] | None,
    manifests: Mapping[str | None, Manifest],
    allow_missing: bool,
) -> None:
    """Raise StoreError for missing partitions, or if no partition defines the columns."""
    missing = [key for key in wanted or () if key not in manifests]
    if not missing and (manifests or wanted is not None):
        return
    asset, root = "/".join(path), store.described
    if not manifests and (wanted is None or not find(store, path, None)):
        raise StoreError(
            f"{asset!r} was never materialized into {root}; materialize it first, with this store"
        )
    if missing and not allow_missing:
        several = len(missing) > 1
        is_range = any(".." in str(key) for key in missing)
        raise StoreError(
            f"{asset!r}: partition{'s' * several} {names(missing)} {'were' if several else 'was'} "
            f"never materialized into {root}. Materialize first; vd.load and inputs can also "
            "leave them out, with allow_missing_partitions"
            + ". A range is no key: pass a list of all keys"
            * is_range
        )


def _common_schema(
    label: str, manifests: Sequence[Manifest], columns: Sequence[str] | None
) -> pa.Schema:
    """Return the schema of all manifests, for any order of columns in each.

    The first manifest with rows defines it; those without rows may have columns of nulls. Of
    others than `columns`, if they are given, manifests may differ.
    """
    first = next((m for m in manifests if m.rows), manifests[0])
    for manifest in manifests:
        for name in dict.fromkeys(columns or [*first.schema.names, *manifest.schema.names]):
            one, other = (_type(m.schema, name) for m in (first, manifest))
            if one != other and (manifest.rows or "no such column" in (one, other)):
                raise StoreError(
                    f"{label!r}: column {name!r} is {one} in partition {first.partition!r}, but "
                    f"{other} in partition {manifest.partition!r}. Read them apart, or materialize "
                    "again the one that is out of date"
                )
    return first.schema


def _type(schema: pa.Schema, name: str) -> str:
    index = schema.get_field_index(name)
    return str(schema.field(index).type) if index >= 0 else "no such column"
