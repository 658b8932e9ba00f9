"""The stages that rows can go through: what a pipeline's source and a stage have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster.declare.arguments import (
    list_of_names,
    mapping,
    one_of,
    parse_concurrency,
    positive,
)
from vane_dagster.declare.schema import SchemaLike, parse_schema
from vane_dagster.declare.source import ParquetSource, check_url
from vane_dagster.declare.sql import as_columns, is_column, quote, referenced_columns
from vane_dagster.declare.stage import (
    SOURCE,
    AssetOptions,
    BatchFormat,
    Cardinality,
    MapBatchesSpec,
    ProjectSpec,
    Resources,
    WriteSpec,
)
from vane_dagster.declare.udf import make_udf
from vane_dagster.errors import DefinitionError, names

if TYPE_CHECKING:
    from vane_dagster.declare.pipeline import Pipeline, Stage

_FORMATS = ("pyarrow", "numpy", "pandas")
_CARDINALITIES = ("one_to_one", "filter")


class Rows:
    """What stages can be added to: a pipeline's source, or a stage."""

    pipeline: Pipeline
    _node: str

    def project(
        self,
        name: str,
        columns: Mapping[str, str] | Sequence[str],
        *,
        where: str | None = None,
        **asset: Any,
    ) -> Stage:
        """Adds a stage of columns and SQL expressions, run by DuckDB.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            columns: Column names, or output column to SQL expression over one row. The id is
                carried along where it is left out.
            where: SQL condition; rows for which it is not true are filtered out.
            **asset: What `dg.AssetSpec` takes: description, group_name, owners, tags, kinds,
                metadata, deps, automation_condition, freshness_policy.

        Raises:
            DefinitionError: If an expression does not parse or looks beyond its row.
        """
        culprit = self.pipeline._culprit(name)
        pairs = as_columns(columns, culprit)
        if where is not None:
            referenced_columns(where, f"{culprit}, where")
        id = self.pipeline.id
        if not is_column(dict(pairs).get(id, quote(id)), id, culprit):
            raise DefinitionError(
                f"{culprit}: the id {id!r} is computed, {dict(pairs)[id]!r}; ids pass through "
                "unchanged, so that each row leads back to the source. Leave it out, and give what "
                "is computed another name"
            )
        if id not in dict(pairs):
            pairs = ((id, quote(id)), *pairs)
        options = asset_options(culprit, asset)
        return self.pipeline._add(ProjectSpec(name, (self._node,), options, pairs, where))

    def map_batches(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike,
        columns: Sequence[str] | None = None,
        batch_format: BatchFormat = "pyarrow",
        batch_size: int | None = None,
        cardinality: Cardinality = "one_to_one",
        concurrency: int | tuple[int, int] | None = None,
        max_concurrency: int = 16,
        num_cpus: float = 0,
        gpus: float = 0,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        version: str | None = None,
        env_vars: Sequence[str] = (),
        **asset: Any,
    ) -> Stage:
        """Adds a stage that runs a function, or a class constructed once in a worker, over batches.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm). Either
                may return, yield, or be async.
            schema: Output columns: name to SQL type, or a `pyarrow.Schema`. The id's type is the
                input's where it is left out. Columns that `fn` returns beyond it are dropped.
            columns: Input columns that `fn` reads; the id comes too. Default: all.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays) or "pandas".
            batch_size: Rows a call; the last batch of a fragment may be smaller. Default: as many
                as a worker is given at once, which follows its speed and so differs between runs.
            cardinality: "one_to_one", every row must come back, or "filter", rows may be dropped.
            concurrency: Workers, or (min, max) by what the cluster has. Default: 1 for a class, up
                to the cluster's CPUs for a function.
            max_concurrency: Batches in flight in one worker, for an async `fn`.
            num_cpus: CPUs that a worker reserves. Default: none.
            gpus: GPUs that a worker reserves; fractions share one. For a class only.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: Kind of GPU, as Ray names it.
            resources: Custom resources of the cluster that a worker reserves.
            fn_args: Passed to each call after the batch. Here and below, a path of a local file
                or model folder counts in fragment keys with its content.
            fn_kwargs: Passed to each call.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            version: Stands for the code in fragment keys, in place of its identity: an edit then
                recomputes nothing until the version is raised.
            env_vars: Names of environment variables whose values go to the worker with each run;
                never stored, keyed or logged.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If `fn` is an instance, or an argument does not fit.
            SchemaError: If a type is unknown.
        """
        culprit = self.pipeline._culprit(name)
        udf = make_udf(
            culprit,
            fn,
            args=fn_args,
            kwargs=fn_kwargs,
            constructor_args=fn_constructor_args,
            constructor_kwargs=fn_constructor_kwargs,
            version=version,
        )
        needs = Resources(
            num_cpus, gpus, memory, accelerator_type, mapping(culprit, "resources", resources)
        )
        needs.validate(culprit)
        if gpus and not udf.stateful:
            raise DefinitionError(
                f"{culprit}: gpus={gpus} for function {udf.name}, which would load its model for "
                "each batch; make it a class that loads the model in __init__"
            )
        workers = parse_concurrency(culprit, concurrency)
        spec = MapBatchesSpec(
            name=name,
            upstream=(self._node,),
            asset=asset_options(culprit, asset),
            udf=udf,
            schema=parse_schema(schema, culprit),
            columns=list_of_names(culprit, "columns", columns),
            batch_format=one_of(culprit, "batch_format", batch_format, _FORMATS),
            batch_size=positive(culprit, "batch_size", batch_size),
            cardinality=one_of(culprit, "cardinality", cardinality, _CARDINALITIES),
            concurrency=workers or ((1, 1) if udf.stateful else None),
            max_concurrency=positive(culprit, "max_concurrency", max_concurrency, 16),
            resources=needs,
            env_vars=list_of_names(culprit, "env_vars", env_vars) or (),
        )
        return self.pipeline._add(spec)

    def write(
        self,
        name: str,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
        **asset: Any,
    ) -> Stage:
        """Adds a stage that publishes the rows as a plain folder of Parquet.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            url: A folder, as a path or fsspec URL, with ``{partition_key}`` where the pipeline is
                partitioned. Files of others in it are left alone.
            storage_options: Options of the fsspec file system.
            compression: "zstd", "snappy", "lz4", "gzip" or "none".
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If the URL does not tell partitions apart, or there is no stage above.
        """
        culprit = self.pipeline._culprit(name)
        if self._node == SOURCE:
            raise DefinitionError(
                f"{culprit}: would publish the source as it is; add a project, and write that"
            )
        check_url(culprit, url)
        self.pipeline._check_placeholders(culprit, ParquetSource(url))
        codecs = ("zstd", "snappy", "lz4", "gzip", "none")
        spec = WriteSpec(
            name=name,
            upstream=(self._node,),
            asset=asset_options(culprit, asset),
            url=url,
            storage_options=dict(storage_options or {}),
            compression=one_of(culprit, "compression", compression, codecs),
        )
        return self.pipeline._add(spec)


def asset_options(culprit: str, options: dict[str, Any]) -> AssetOptions:
    """What a stage's asset is given, from the arguments that the stage itself does not know.

    Raises:
        DefinitionError: If there is no such argument.
    """
    try:
        return AssetOptions(**options)
    except TypeError:
        unknown = sorted(set(options) - set(AssetOptions.__dataclass_fields__))
        raise DefinitionError(
            f"{culprit}: unknown argument {names(unknown)}; beside its own arguments a stage takes "
            f"{', '.join(AssetOptions.__dataclass_fields__)}"
        ) from None
