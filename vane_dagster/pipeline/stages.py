"""The methods that add stages to a pipeline's source or to another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from vane_dagster._arguments import (
    check_placeholders,
    check_url,
    environment_variables,
    list_of_names,
    mapping,
    one_of,
    parse_concurrency,
    positive,
)
from vane_dagster._secrets import url_parts, with_options
from vane_dagster.checks.builtin import DEFAULT_ERROR_RATE
from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.embeddings import EmbedRows
from vane_dagster.pipeline.labels import LabelRows
from vane_dagster.pipeline.options import (
    AUTO,
    BatchFormat,
    Cardinality,
    OnError,
    Resources,
    asset_options,
    parse_failures,
    parse_lifecycle,
)
from vane_dagster.pipeline.specs import SOURCE, MapBatchesSpec, ProjectSpec, WriteSpec
from vane_dagster.pipeline.udf import make_udf
from vane_dagster.storage.publish.base import PARTITION_COLUMN, Target
from vane_dagster.storage.publish.registry import PUBLISHERS, publisher_class
from vane_dagster.types.schema import ERROR_COLUMN, SchemaLike, parse_schema
from vane_dagster.types.sql import as_columns, is_column, quote, referenced_columns

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline, Stage


class Rows(LabelRows, EmbedRows):
    """A pipeline's source or a stage: anything that a new stage can read."""

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
        """Add a stage of columns and SQL expressions, executed by DuckDB.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            columns: Column names, or a mapping of output column to an SQL expression over one row.
                The id and the ids of the rows that it was made from are added if they are omitted.
                An expression that is just a column name keeps the column's Arrow type.
            where: SQL condition. Rows for which it is not true are dropped.
            **asset: Arguments of `dg.AssetSpec`: description, group_name, owners, tags, kinds,
                metadata, deps, automation_condition, freshness_policy.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an expression does not parse, reads more than its row, or is not a
                function of the row, such as ``now()``.
        """
        location = self.pipeline._location(name)
        pairs = as_columns(columns, location)
        if where is not None:
            referenced_columns(where, f"{location}, where")
        ids = [key.column for key in self.pipeline.keys(self._node)]
        for id in ids:
            if not is_column(dict(pairs).get(id, quote(id)), id, location):
                raise DefinitionError(
                    f"{location}: the id {id!r} is computed, {dict(pairs)[id]!r}; ids pass through "
                    "unchanged, so that each row leads back to the source. Leave it out, and give "
                    "what is computed another name"
                )
        carried = [(id, quote(id)) for id in ids if id not in dict(pairs)]
        pairs = (*carried, *pairs)
        options = asset_options(location, asset)
        return self.pipeline._add(ProjectSpec(name, (self._node,), options, pairs, where))

    def map_batches(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike,
        columns: Sequence[str] | None = None,
        batch_format: BatchFormat = "pyarrow",
        batch_size: int | Literal["auto"] | None = None,
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
        keyed_env_vars: Sequence[str] = (),
        id: str | None = None,
        parent_id: str | None = None,
        column_lineage: Mapping[str, Sequence[str]] | None = None,
        on_error: OnError = "raise",
        max_error_rate: float = DEFAULT_ERROR_RATE,
        max_retries: int = 3,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        max_rss: int | None = None,
        **asset: Any,
    ) -> Stage:
        """Add a stage that applies a function, or a class constructed once per worker, to batches.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm). Either
                may return, yield, or be async. The result is a table in any form that exports Arrow
                streams (``__arrow_c_stream__``: pyarrow, polars, DuckDB, nanoarrow), a pandas data
                frame, or a dict of column to array.
            schema: Output columns: a mapping of name to SQL type, or a `pyarrow.Schema`. If the id
                is omitted, it has the input's type. Columns that `fn` returns beyond the schema are
                dropped.
            columns: Input columns that `fn` reads; the id is always included. Default: all.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays) or "pandas". If `fn`
                returns a pandas frame without the id, its rows are matched by the frame's index.
            batch_size: Rows per call. The last batch of a fragment may be smaller. "auto": workers
                double it as long as throughput rises. Default: all rows of a worker's task, a
                number that follows the worker's speed and so differs between runs.
            cardinality: "one_to_one": every row must be returned; "filter": rows may be dropped;
                "one_to_many": each row becomes one or more; "zero_to_many": each row becomes any
                number of rows.
            concurrency: Workers, or (min, max) depending on the cluster's free resources. Default:
                1 for a class, up to the cluster's CPUs for a function.
            max_concurrency: Batches in flight in one worker, for an async `fn`.
            num_cpus: CPUs that a worker reserves. Default: none.
            gpus: GPUs that a worker reserves; fractions share one. For a class only.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: The GPU type, as Ray names it.
            resources: Custom cluster resources that a worker reserves.
            fn_args: Passed to each call after the batch. In this and the following arguments, the
                path of a local file or folder counts in fragment keys with its content, unless runs
                change that content: a folder that contains the pipeline's source, target, store or
                code.
            fn_kwargs: Passed to each call.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            version: Replaces the identity of the code, and of the content of files that arguments
                name, in fragment keys. An edit then recomputes nothing until the version changes.
                Arguments without an identity count by their type.
            env_vars: Names of environment variables. Their values are sent to the worker with each
                run, and never stored, keyed or logged.
            keyed_env_vars: The same for variables that change results, such as the language of a
                model. A new value makes new fragment keys and new workers. Only a digest of the
                value is used, and nothing of it is stored or logged. Do not name secrets: rotating
                a secret would recompute everything.
            id: For a fan-out, the column of the new id, which keys the downstream stages. Unless
                the schema has it, each row gets ``<parent id>-<number>``.
            parent_id: For a fan-out, the column returned by `fn` with the id of the parent row.
                Default: the input's id.
            column_lineage: The input columns that output columns depend on, shown in Dagster.
                Default: all columns that `fn` reads.
            on_error: How a failed batch is handled. "raise" fails the partition. "quarantine"
                halves the batch until the failed rows are isolated, stores those with their errors
                beside the output, and continues. "null" keeps them in the output as nulls, with the
                error in a column "error".
            max_error_rate: The share of a partition's rows that may fail. Beyond it, the partition
                fails.
            max_retries: Retries of a call, with exponential backoff, after a transient error: a
                connection error, a time-out, HTTP 429 or 5xx.
            retry_on: Further exception classes, or their names, to treat as transient.
            timeout_s: Time limit of a call in seconds. A worker that exceeds it is replaced. Rows
                that hang or kill their workers are isolated like rows that raise.
            startup_timeout_s: Time limit in seconds for constructing `fn` in a worker. The error
                says what the worker was executing. Default: 1800.
            max_batches_per_actor: Calls after which a worker is replaced by a new one, for models
                or libraries that leak memory.
            max_rss: Bytes of memory after which a worker is replaced, between two calls. Counts the
                private memory of its processes, without mapped files and shared tables.
            **asset: Arguments of `dg.AssetSpec`; see `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If `fn` is an instance, or an argument is invalid.
            SchemaError: If a type is unknown.
        """
        location = self.pipeline._location(name)
        udf = make_udf(
            location,
            fn,
            args=fn_args,
            kwargs=fn_kwargs,
            constructor_args=fn_constructor_args,
            constructor_kwargs=fn_constructor_kwargs,
            version=version,
        )
        needs = Resources(
            num_cpus, gpus, memory, accelerator_type, mapping(location, "resources", resources)
        )
        needs.validate(location)
        if gpus and not udf.stateful:
            raise DefinitionError(
                f"{location}: gpus={gpus} for function {udf.name}, which would load its model for "
                "each batch; make it a class that loads the model in __init__"
            )
        workers = parse_concurrency(location, concurrency)
        auto = batch_size == AUTO
        forwarded, keyed = environment_variables(location, env_vars, keyed_env_vars)
        spec = MapBatchesSpec(
            name=name,
            upstream=(self._node,),
            asset=asset_options(location, asset),
            udf=udf,
            schema=parse_schema(schema, location),
            columns=list_of_names(location, "columns", columns),
            batch_format=one_of(location, "batch_format", batch_format, get_args(BatchFormat)),
            batch_size=None if auto else positive(location, "batch_size", batch_size),
            auto_batch=auto,
            cardinality=one_of(location, "cardinality", cardinality, get_args(Cardinality)),
            concurrency=workers or ((1, 1) if udf.stateful else None),
            max_concurrency=positive(location, "max_concurrency", max_concurrency, 16),
            resources=needs,
            env_vars=forwarded,
            keyed_env_vars=keyed,
            children=self._children(location, cardinality, id, parent_id),
            failures=parse_failures(
                location, on_error, max_error_rate, max_retries, retry_on, timeout_s
            ),
            lifecycle=parse_lifecycle(location, startup_timeout_s, max_batches_per_actor, max_rss),
            reads={
                name: list_of_names(location, f"column_lineage[{name!r}]", listed) or ()
                for name, listed in mapping(location, "column_lineage", column_lineage).items()
            },
        )
        takes = spec.children is None and ERROR_COLUMN not in spec.schema.names
        if spec.failures.on_error == "null" and not takes:
            raise DefinitionError(
                f"{location}: on_error='null' adds a column {ERROR_COLUMN!r} to a row's own; "
                "rename yours in the schema, and use 'quarantine' for a one-to-many stage"
            )
        if unknown := [name for name in spec.reads if name not in spec.schema.names]:
            raise DefinitionError(
                f"{location}: column_lineage names {names(unknown)}, which the schema does not "
                f"declare; it has {names(spec.schema.names, 20)}"
            )
        return self.pipeline._add(spec)

    def _children(
        self, location: str, cardinality: str, id: str | None, parent_id: str | None
    ) -> tuple[str, str] | None:
        """Return the columns of the new id and the parent's id for a fan-out."""
        if cardinality not in ("one_to_many", "zero_to_many"):
            if id is not None or parent_id is not None:
                raise DefinitionError(
                    f"{location}: id and parent_id are given, but cardinality is {cardinality!r}; "
                    'they are for "one_to_many" and "zero_to_many", the others keep their id'
                )
            return None
        if not isinstance(id, str) or not id:
            raise DefinitionError(
                f"{location}: cardinality={cardinality!r} makes many rows of one, which need an id "
                'of their own; give its column, as id="chunk_id"'
            )
        return id, parent_id or self.pipeline.keys(self._node)[0].column

    def write(
        self,
        name: str,
        url: str,
        *,
        format: str = "parquet",
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
        target_file_bytes: int | None = None,
        partition_column: str = PARTITION_COLUMN,
        **asset: Any,
    ) -> Stage:
        """Add a stage that publishes the rows: as a plain folder of Parquet, or as a Delta table.

        A partition is replaced as a whole; files of other owners in the folder are left alone. In a
        Delta table a partition is replaced in one transaction, so readers see either the old rows
        or the new rows. Files that are no longer in the table remain until Delta's own vacuum.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            url: For "parquet" a folder, as a path or fsspec URL, with ``{partition_key}`` if the
                pipeline is partitioned. For "delta" the table, a local path or ``s3://``, which
                holds all partitions.
            format: "parquet" or "delta", which requires the extra ``vane-dagster[delta]``. A Delta
                table has no unsigned integers and no fixed sizes. Unsigned integers of at most 32
                bits become the next larger signed type, fixed-size lists and bytes become
                variable-size, and times of day with a zone are stored in UTC.
            storage_options: Options of the fsspec file system. For a Delta table on S3, the options
                that Delta's own driver supports are passed to it too: ``key``, ``secret``,
                ``token``, ``anon``, ``endpoint_url``, and ``endpoint_url`` and ``region_name`` of
                ``client_kwargs``. The driver takes missing ones from AWS's environment variables
                and profiles. The server must support conditional puts, as S3 does.
            compression: "zstd", "snappy", "lz4", "gzip" or "none".
            target_file_bytes: Approximate size of the files in bytes. Neighbouring fragments are
                written together, larger ones are split. Default: one file per fragment.
            partition_column: The column of a Delta table that holds the partition's key.
            **asset: Arguments of `dg.AssetSpec`, see `project`; and options that only one format
                supports.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If the URL does not distinguish partitions, there is no upstream stage,
                or Delta Lake is not installed.
        """
        location = self.pipeline._location(name)
        if self._node == SOURCE:
            raise DefinitionError(
                f"{location}: would publish the source as it is; add a project, and write that"
            )
        check_url(location, url)
        url, found = url_parts(url)
        publisher = publisher_class(one_of(location, "format", format, tuple(PUBLISHERS)))
        if publisher.has_folder_per_partition:
            check_placeholders(location, url, self.pipeline.partitions_def)
        codecs = ("zstd", "snappy", "lz4", "gzip", "none")
        declared = Target(
            url=url,
            storage_options=with_options(found, storage_options),
            compression=one_of(location, "compression", compression, codecs),
            format=format,
            target_bytes=positive(location, "target_file_bytes", target_file_bytes),
            partition_column=partition_column,
            options={name: asset.pop(name, default) for name, default in publisher.options.items()},
        )
        partitioned = self.pipeline.partitions_def is not None
        columns = tuple(self.pipeline.declared_types()[self._node])
        declared = publisher.validate(declared, location, partitioned, columns)
        options = asset_options(location, asset)
        return self.pipeline._add(WriteSpec(name, (self._node,), options, declared))
