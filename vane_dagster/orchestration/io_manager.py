"""`FragmentStore`: the storage for results, and an IO manager for other assets.

Dagster inspects the annotations of resources at runtime, so this module does not postpone their
evaluation.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from vane_dagster._arguments import path_text
from vane_dagster._home import default_root
from vane_dagster._secrets import errors_masked
from vane_dagster.errors import StoreError, names
from vane_dagster.orchestration.metadata import column_schema
from vane_dagster.orchestration.read import connected, load
from vane_dagster.orchestration.resource_arguments import DeclaredArguments
from vane_dagster.storage.asset_writer import AssetRun, write_asset
from vane_dagster.storage.dataframes import batches, form_of, form_of_value, known_forms, loaded
from vane_dagster.storage.filesystem import Location, absolute_url
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.reader import read
from vane_dagster.storage.store import Store


class FragmentStore(DeclaredArguments, dg.ConfigurableIOManager):
    """Storage for parts and manifests: a local folder or any fsspec file system.

    It is also an IO manager. A downstream asset or check receives a stage's rows as the type of its
    input annotation: `pyarrow.Table` (also without annotation), `pyarrow.dataset.Dataset`,
    `pyarrow.RecordBatchReader`, `pandas.DataFrame`, `polars.DataFrame`, `polars.LazyFrame`,
    `duckdb.DuckDBPyRelation` or `ray.data.Dataset`. Several partitions form one table, in the order
    of their definition. The metadata of the input selects ``columns`` and can set
    ``allow_missing_partitions``.

    An ordinary asset with this IO manager can return any of these types. The same store keeps its
    rows, and a pipeline can use them as its source.
    """

    root: str | None = Field(
        default=None,
        description="A path or fsspec URL, as 's3://lake/.vane'. Default: $VANE_DAGSTER_STORE, "
        "else a folder of this user.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the fsspec file system. Give secrets as dg.EnvVar('NAME'): what "
        "stands here is shown in Dagster's UI.",
        json_schema_extra={"dagster__is_secret": True},
    )

    def __init__(self, *values: Any, **arguments: Any) -> None:
        if "root" in arguments:
            arguments["root"] = path_text(arguments["root"])
        super().__init__(*values, **arguments)

    def open(self) -> Store:
        """Open the store at the root."""
        root = self.root or default_root()
        return Store(Location(absolute_url(root), _resolved(self.storage_options)))

    def dataset(self, stage: str, partition: str | None = None) -> Any:
        """Return the committed rows of a stage; each partition is complete or absent.

        Args:
            stage: Pipeline and stage, as "docs/embedding".
            partition: The partition's key. Default: the unpartitioned rows, or those of all
                partitions.

        Returns:
            A `pyarrow.dataset.Dataset`, readable by DuckDB, Polars and pandas too.

        Raises:
            StoreError: If the stage was never materialized.
        """
        import pyarrow.dataset as ds

        return load(stage, partition, as_=ds.Dataset, store=self)

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the rows of an asset as the type of the input's annotation.

        Raises:
            StoreError: If the type is not supported, or a partition was never materialized.
        """
        with errors_masked():
            return self._loaded(context)

    def _loaded(self, context: dg.InputContext) -> Any:
        if not context.has_asset_key:
            raise StoreError(_ASSETS_ALONE)
        wanted = context.dagster_type.typing_type
        form = "pyarrow.Table" if wanted is Any else form_of(wanted)
        if form is None:
            raise StoreError(
                f"input {context.name!r} is annotated with {wanted}; expected one of "
                f"{known_forms()}, or no annotation for a pyarrow.Table"
            )
        asked: Mapping[str, Any] = context.definition_metadata or {}
        rows = read(
            self.open(),
            context.asset_key.path,
            _partitions(context) if context.has_asset_partitions else None,
            bool(asked.get("allow_missing_partitions", False)),
        )
        return loaded(connected(rows.select(asked.get("columns")), form), form)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store the rows that an ordinary asset returned.

        Args:
            context: The context of the output.
            obj: The rows, or a dict of partition key to rows.

        Raises:
            StoreError: If `obj` is not rows, or lacks the rows of a partition of the run.
        """
        with errors_masked():
            self._keep(context, obj)

    def _keep(self, context: dg.OutputContext, obj: Any) -> None:
        if obj is None and context.dagster_type.typing_type is type(None):
            return
        if not context.has_asset_key:
            raise StoreError(_ASSETS_ALONE)
        label = f"asset {context.asset_key.to_user_string()!r}"
        store = self.open()
        asset = AssetRun(context.asset_key.path, context.run_id)
        manifests: list[Manifest] = []
        urls: list[str] = []
        for partition, value in _by_partition(context, obj, label).items():
            where = label if partition is None else f"{label}, partition {partition!r}"
            made, url = write_asset(store, asset, partition, batches(value, where))
            manifests.append(made)
            urls.append(url)
        context.add_output_metadata(_metadata(context, manifests, urls))
        # The step's own context reads this version after its IO manager returns.
        step = context.step_context
        if not step.has_data_version(context.asset_key):
            version = "-".join(manifest.content for manifest in manifests[:4])
            step.set_data_version(context.asset_key, dg.DataVersion(version))


def _resolved(value: Any) -> Any:
    """Resolve the `dg.EnvVar` values in options; Dagster does not resolve them inside a dict."""
    if isinstance(value, Mapping):
        if set(value) != {"env"} or not isinstance(value["env"], str):
            return {name: _resolved(item) for name, item in value.items()}
        value = dg.EnvVar(value["env"])
    if not isinstance(value, dg.EnvVar):
        return value
    if (found := os.environ.get(value.env_var_name)) is None:
        raise StoreError(
            f"FragmentStore: storage_options names the variable {value.env_var_name!r}, which is "
            "not in the environment of the run; set it there"
        )
    return found


_ASSETS_ALONE = (
    "FragmentStore keeps the rows of assets; this is an output of an op that is none. Give that "
    "output another io_manager_key"
)


def _partitions(context: dg.InputContext | dg.OutputContext) -> Sequence[str | None]:
    """Return the partitions of a run or an input in their order of definition.

    Dagster returns them in no particular order.
    """
    keys = list(context.asset_partition_keys)
    if len(keys) > 1:
        defined = context.asset_partitions_def.get_partition_keys(
            dynamic_partitions_store=context.step_context.instance
        )
        place = {key: index for index, key in enumerate(defined)}
        keys.sort(key=lambda key: (place.get(key, len(place)), key))
    return keys


def _by_partition(context: dg.OutputContext, obj: Any, label: str) -> dict[str | None, Any]:
    """Return the returned rows by partition of the run."""
    values: dict[str | None, Any]
    if not context.has_asset_partitions:
        values = {None: obj}
    elif isinstance(obj, dict):
        values = obj
    else:
        values = dict.fromkeys(_partitions(context), obj)
        if len(values) != 1:
            raise StoreError(
                f"{label} returned a {type(obj).__name__} for {len(values)} partitions, "
                f"{names(values)}; expected a dict of partition key to rows, or give the asset "
                "backfill_policy=dg.BackfillPolicy.multi_run()"
            )
    if context.has_asset_partitions and set(values) != set(context.asset_partition_keys):
        raise StoreError(
            f"{label} returned rows of the partitions {names(values)}; the run is for "
            f"{names(_partitions(context))}"
        )
    for value in values.values():
        if form_of_value(value) is None:
            kind = type(value)
            hint = (
                ". Annotate a function that returns nothing with -> None" if value is None else ""
            )
            raise StoreError(
                f"{label} returned a {kind.__module__}.{kind.__qualname__}; expected one of "
                f"{known_forms()}{hint}"
            )
    return values


def _metadata(
    context: dg.OutputContext, manifests: list[Manifest], urls: list[str]
) -> dict[str, Any]:
    """Return metadata for the materialization; Dagster adds it to every partition of the run."""
    if not manifests:
        return {}
    rows = sum(manifest.rows for manifest in manifests)
    found = {
        "dagster/column_schema": column_schema(manifests[-1].schema, ""),
        "bytes": sum(manifest.size for manifest in manifests),
        "files": sum(len(manifest.parts) for manifest in manifests),
    }
    if not context.has_asset_partitions:
        return {"dagster/row_count": rows, "dagster/uri": urls[0], **found}
    if len(manifests) == 1:
        return {"dagster/partition_row_count": rows, "dagster/uri": urls[0], **found}
    return {"rows": rows, "partitions": len(manifests), **found}
