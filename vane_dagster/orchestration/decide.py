"""Records what people decide about rows of a stage: waivers, patches, and what undoes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.engine.inference import pinned
from vane_dagster.errors import StoreError, names
from vane_dagster.orchestration.read import asset_path, open_store, quarantine
from vane_dagster.pipeline.pipeline import Stage
from vane_dagster.storage import decisions
from vane_dagster.storage.decisions import Decision
from vane_dagster.storage.reader import find_all
from vane_dagster.types.schema import type_name
from vane_dagster.types.to_arrow import to_arrow


def waive(
    stage: Any, partitions: Sequence[str] | None, ids: Sequence[str], reason: str, store: Any
) -> list[Decision]:
    """Accept the failure of rows, given by the texts of their ids, wherever they are quarantined.

    Raises:
        StoreError: If an id is not quarantined, or its stage has no row keys.
    """
    path = asset_path(stage, "waive")
    location = f"stage '{'/'.join(path)}': waive"
    if not reason.strip():
        raise StoreError(f"{location}: the reason is empty; say why the rows may be missing")
    failed = quarantine(stage, partitions, store=store).filter(pc.field("committed"))
    by_partition: dict[str | None, list[Any]] = {}
    for id, key in zip(failed["id"].to_pylist(), failed["partition"].to_pylist()):
        if str(id) in ids:
            by_partition.setdefault(key, []).append(id)
    known = {str(id) for listed in by_partition.values() for id in listed}
    if missing := [id for id in ids if id not in known]:
        raise StoreError(
            f"{location}: rows {names(missing)} are not quarantined in a committed partition; "
            "vane-dagster quarantine lists the ids that can be waived"
        )
    opened = open_store(store, location)
    manifests = find_all(opened, path, [*by_partition])
    return [
        decisions.waive(opened, manifests[key], listed, reason, location)
        for key, listed in by_partition.items()
    ]


def undo(
    stage: Any, partitions: Sequence[str] | None, ids: Sequence[str], store: Any
) -> list[Decision]:
    """Undo the waivers and patches of rows, given by the texts of their ids.

    Raises:
        StoreError: If an id has neither a waiver nor a patch.
    """
    path = asset_path(stage, "undo")
    matching: list[tuple[Decision, set[Any]]] = []
    opened, known = open_store(store, "undo"), set[str]()
    by_partition = decisions.decisions(opened, path[0], path[1:])
    for each in (each for listed in by_partition.values() for each in listed):
        named = {id for id in each.ids if str(id) in ids}
        if named and not each.undoes and (partitions is None or each.partition in partitions):
            known |= {str(id) for id in named}
            matching.append((each, named))
    if missing := [id for id in ids if id not in known]:
        raise StoreError(
            f"stage '{'/'.join(path)}': undo: rows {names(missing)} have neither a waiver nor a "
            "patch in this store; vane-dagster quarantine lists waivers, and trace shows patches"
        )
    return [decisions.undo(opened, path[0], each, named) for each, named in matching]


def patch(stage: Stage, partition: str | None, rows: pa.Table, store: Any) -> Decision:
    """Supply outputs of rows of a partition.

    Args:
        stage: A stage with one output row for each input row.
        partition: The partition's key; None for an unpartitioned pipeline.
        rows: The id of each input row, and all columns that the stage makes. The usage of a prompt
            may be left out.
        store: The store.

    Raises:
        StoreError: If the rows do not fit the stage, or an id is not in the partition.
    """
    opened = open_store(store, "patch")
    pipeline = pinned(stage.pipeline, stage.name, opened)
    spec, where = pipeline[stage.name].spec, "" if partition is None else f", {partition!r}"
    location = f"stage '{pipeline.name}/{stage.name}'{where}: patch"
    made = spec.made_columns(pipeline) if spec.runs_udf else ()
    if not spec.runs_udf or not made or spec.makes_rows:
        raise StoreError(
            f"{location}: a patch has one output row for each input row, of a stage whose function "
            f"makes columns; this is a {spec.kind}"
            + (" that makes several rows of one" if spec.makes_rows else "")
        )
    id = pipeline._keys_of(stage.name)[0].column
    usage = None if spec.usage is None else spec.usage.column
    if usage in made and usage not in rows.column_names:
        field = spec.schema.field(usage)
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    if {*rows.column_names} != {id, *made} or len(rows.column_names) != 1 + len(made):
        raise StoreError(
            f"{location}: the file has columns {names(rows.column_names, 20)}; expected the id and "
            f"all columns that the stage makes: {names([id, *made], 20)}"
        )
    ids = rows.column(id)
    if ids.null_count or len(pc.unique(ids)) != len(ids):
        raise StoreError(f"{location}: an id of {id!r} is null or repeated; give each row once")
    columns = pa.schema([spec.schema.field(name) for name in made])
    values = []
    for field in columns:
        column = rows.column(field.name)
        try:
            values.append(to_arrow(column, field.type))
        except (TypeError, ValueError, pa.ArrowException) as error:
            problem = f"{column.type}, and has values that are not {type_name(field.type)}: {error}"
            raise StoreError(f"{location}: column {field.name!r} is {problem}") from None
        if column.null_count and not field.nullable:
            raise StoreError(f"{location}: column {field.name!r} has nulls, and may have none")
    keys = None if partition is None else [partition]
    manifests = find_all(opened, stage.key.path, keys)
    if partition not in manifests:
        raise StoreError(f"{location}: the stage is partitioned; name one, of {names(manifests)}")
    table = pa.Table.from_arrays(values, schema=columns)
    return decisions.patch(opened, manifests[partition], ids, table, location)
