"""Rows of assets, as `FragmentStore` loads and stores them for steps.

Only a step imports this module: definitions need the resource, and not what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from vane_dagster._texts import in_partition
from vane_dagster.errors import StoreError, names
from vane_dagster.orchestration.metadata import column_schema
from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.orchestration.read import connected
from vane_dagster.storage.asset_writer import write_asset
from vane_dagster.storage.dataframes import batches, form_of, known_forms, loaded
from vane_dagster.storage.manifest import Manifest, content_digest
from vane_dagster.storage.reader import read

if TYPE_CHECKING:
    from vane_dagster.orchestration.io_manager import FragmentStore


def load_rows(store: FragmentStore, context: dg.InputContext) -> Any:
    """Load the rows of an asset as the type of the input's annotation."""
    wanted = context.dagster_type.typing_type
    form = "pyarrow.Table" if wanted is Any else form_of(wanted)
    if form is None:
        raise StoreError(
            f"input {context.name!r} is annotated with {wanted}; expected one of "
            f"{known_forms()}, or no annotation for a pyarrow.Table"
        )
    asked: Mapping[str, Any] = context.definition_metadata or {}
    keys, allow_missing = _input_partitions(context)
    allow_missing |= bool(asked.get("allow_missing_partitions", False))
    columns = asked.get("columns")
    rows = read(store.open(), context.asset_key.path, keys, allow_missing, columns)
    return loaded(connected(rows, form), form)


def keep_rows(store: FragmentStore, context: dg.OutputContext, obj: Any) -> None:
    """Store the rows that an ordinary asset returned."""
    if obj is None and context.dagster_type.typing_type is type(None):
        return
    label = f"asset {context.asset_key.to_user_string()!r}"
    opened = store.open()
    path, run_id = context.asset_key.path, context.run_id
    values = _by_partition(context, obj, label)
    rows = {key: batches(value, f"{label}{in_partition(key)}") for key, value in values.items()}
    written = (write_asset(opened, path, run_id, key, given) for key, given in rows.items())
    manifests, urls = zip(*written)
    context.add_output_metadata(_metadata(context, manifests, urls))
    # The step's own context reads this version after its IO manager returns.
    step = context.step_context
    if not step.has_data_version(context.asset_key):
        version = content_digest([part for manifest in manifests for part in manifest.parts])
        step.set_data_version(context.asset_key, dg.DataVersion(version))


def _input_partitions(context: dg.InputContext) -> tuple[Sequence[str | None] | None, bool]:
    """Return the partitions of an input, and whether missing ones are left out.

    Dagster maps a check without partitions to all partitions of the asset. Here the check reads
    the partitions of the run, or, in a run without partitions, all that are materialized.
    """
    if not context.has_asset_partitions:
        return None, False
    keys, step = _partitions(context), context._step_context  # None in `load_asset_value`
    if not step or not step.assets_def or step.assets_def.keys or step.assets_def.partitions_def:
        return keys, False
    if step.has_partitions and {*(edges := step.partition_key_range)} <= {*keys}:
        with dg.partition_loading_context(dynamic_partitions_store=step.instance):
            of_run = {*context.asset_partitions_def.get_partition_keys_in_range(edges)}
        return [key for key in keys if key in of_run], False
    return keys, True


def _partitions(context: dg.InputContext | dg.OutputContext) -> Sequence[str | None]:
    """Return the partitions of a run or an input in their order of definition.

    Dagster returns them in no particular order.
    """
    keys = list(context.asset_partition_keys)
    if len(keys) == 1:
        return keys
    holder = context if isinstance(context, dg.InputContext) else context.step_context
    return DagsterOrder(context.asset_partitions_def, holder.instance).sorted(keys)


def _by_partition(context: dg.OutputContext, obj: Any, label: str) -> dict[str | None, Any]:
    """Return the returned rows by partition of the run."""
    keys = _partitions(context) if context.has_asset_partitions else [None]
    is_dict = isinstance(obj, dict) and context.has_asset_partitions
    values: dict[str | None, Any] = obj if is_dict else dict.fromkeys(keys[:1], obj)
    if set(values) != set(keys):
        given = f"a dict of {names(values)}" if is_dict else f"a {type(obj).__name__}"
        raise StoreError(
            f"{label} returned {given}; expected a dict of partition key to rows, of "
            f"{names(keys)}, or give the asset backfill_policy=dg.BackfillPolicy.multi_run()"
        )
    return values


def _metadata(
    context: dg.OutputContext, manifests: Sequence[Manifest], urls: Sequence[str]
) -> dict[str, Any]:
    """Return metadata for the materialization; Dagster adds it to every partition of the run."""
    rows = sum(manifest.rows for manifest in manifests)
    statistics = {
        "dagster/column_schema": column_schema(manifests[-1].schema, ""),
        "bytes": sum(manifest.size for manifest in manifests),
    }
    if len(manifests) > 1:
        return {"rows": rows, "partitions": len(manifests), **statistics}
    counted = "dagster/partition_row_count" if context.has_asset_partitions else "dagster/row_count"
    return {counted: rows, "dagster/uri": urls[0], **statistics}
