"""The stages that rows can go through: what a pipeline's source and a stage have in common."""

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
    parse_upkeep,
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
                carried along where it is left out, and so are the ids of rows it was made from.
                A column that an expression only names keeps its Arrow type.
            where: SQL condition; rows for which it is not true are filtered out.
            **asset: What `dg.AssetSpec` takes: description, group_name, owners, tags, kinds,
                metadata, deps, automation_condition, freshness_policy.

        Raises:
            DefinitionError: If an expression does not parse, looks beyond its row, or is not a
                function of the row, such as ``now()``.
        """
        culprit = self.pipeline._culprit(name)
        pairs = as_columns(columns, culprit)
        if where is not None:
            referenced_columns(where, f"{culprit}, where")
        ids = [key.column for key in self.pipeline.keys(self._node)]
        for id in ids:
            if not is_column(dict(pairs).get(id, quote(id)), id, culprit):
                raise DefinitionError(
                    f"{culprit}: the id {id!r} is computed, {dict(pairs)[id]!r}; ids pass through "
                    "unchanged, so that each row leads back to the source. Leave it out, and give "
                    "what is computed another name"
                )
        carried = [(id, quote(id)) for id in ids if id not in dict(pairs)]
        pairs = (*carried, *pairs)
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
        """Adds a stage that runs a function, or a class constructed once in a worker, over batches.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm). Either
                may return, yield, or be async. What it returns is a table in any form that
                exports Arrow streams (``__arrow_c_stream__``: pyarrow, polars, DuckDB, nanoarrow),
                a pandas data frame, or a dict of column to array.
            schema: Output columns: name to SQL type, or a `pyarrow.Schema`. The id's type is the
                input's where it is left out. Columns that `fn` returns beyond it are dropped.
            columns: Input columns that `fn` reads; the id comes too. Default: all.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays) or "pandas". Rows of
                a pandas frame that is returned without the id are matched by its index.
            batch_size: Rows a call; the last batch of a fragment may be smaller. "auto": workers
                double it for as long as throughput rises. Default: as many as a worker is given
                at once, which follows its speed and so differs between runs.
            cardinality: "one_to_one", every row must come back; "filter", rows may be dropped;
                "one_to_many", each row becomes one or more, "zero_to_many", perhaps none.
            concurrency: Workers, or (min, max) by what the cluster has. Default: 1 for a class, up
                to the cluster's CPUs for a function.
            max_concurrency: Batches in flight in one worker, for an async `fn`.
            num_cpus: CPUs that a worker reserves. Default: none.
            gpus: GPUs that a worker reserves; fractions share one. For a class only.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: Kind of GPU, as Ray names it.
            resources: Custom resources of the cluster that a worker reserves.
            fn_args: Passed to each call after the batch. Here and below, a path of a local file
                or folder counts in fragment keys with its content, unless runs change it: a folder
                with the pipeline's source, target or store in it, or with its code.
            fn_kwargs: Passed to each call.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            version: Stands for the code in fragment keys, and for the content of files that
                arguments name, in place of their identity: an edit then recomputes nothing until
                the version is raised. Arguments without an identity count by their type.
            env_vars: Names of environment variables whose values go to the worker with each run;
                never stored, keyed or logged.
            keyed_env_vars: The same for variables that change results, as the language of a model:
                another value makes new fragment keys and new workers. Only a digest of the value
                is used, and nothing of it is stored or logged. No secrets: one that is renewed
                would recompute everything.
            id: Where many rows come of one, the column of their new id, by which the stages below
                are keyed. Unless the schema has it, each row gets ``<parent id>-<number>``.
            parent_id: The column that `fn` returns with the id of the row that a row comes from.
                Default: the input's id.
            column_lineage: For output columns, the input columns that they depend on, for Dagster
                to show. Default: all that `fn` reads.
            on_error: What becomes of a batch that fails: "raise" fails the partition; "quarantine"
                halves it until the rows at fault stand alone, keeps those with their errors beside
                the output, and goes on; "null" keeps them in the output as nulls, with the error
                in a column "error".
            max_error_rate: The share of a partition's rows that may fail; with more, the partition
                fails.
            max_retries: How often a call is tried again, after longer and longer waits, when it
                fails by an error that may pass: of a connection, a time-out, HTTP 429 and 5xx.
            retry_on: Further exception classes, or their names, that may pass.
            timeout_s: Seconds that a call may take. A worker that takes longer is replaced. Rows
                that hang or kill their workers are found like those that raise.
            startup_timeout_s: Seconds that `fn` may take to be constructed in a worker. Default:
                half an hour. What it was doing then stands in the error.
            max_batches_per_actor: Calls after which a worker is replaced by a fresh one, where the
                model or a library of its leaks.
            max_rss: Bytes of memory after which a worker is replaced, between two calls: what its
                processes hold for themselves, without mapped files and shared tables.
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
        auto = batch_size == AUTO
        forwarded, keyed = environment_variables(culprit, env_vars, keyed_env_vars)
        spec = MapBatchesSpec(
            name=name,
            upstream=(self._node,),
            asset=asset_options(culprit, asset),
            udf=udf,
            schema=parse_schema(schema, culprit),
            columns=list_of_names(culprit, "columns", columns),
            batch_format=one_of(culprit, "batch_format", batch_format, get_args(BatchFormat)),
            batch_size=None if auto else positive(culprit, "batch_size", batch_size),
            auto_batch=auto,
            cardinality=one_of(culprit, "cardinality", cardinality, get_args(Cardinality)),
            concurrency=workers or ((1, 1) if udf.stateful else None),
            max_concurrency=positive(culprit, "max_concurrency", max_concurrency, 16),
            resources=needs,
            env_vars=forwarded,
            keyed_env_vars=keyed,
            children=self._children(culprit, cardinality, id, parent_id),
            failures=parse_failures(
                culprit, on_error, max_error_rate, max_retries, retry_on, timeout_s
            ),
            upkeep=parse_upkeep(culprit, startup_timeout_s, max_batches_per_actor, max_rss),
            reads={
                name: list_of_names(culprit, f"column_lineage[{name!r}]", listed) or ()
                for name, listed in mapping(culprit, "column_lineage", column_lineage).items()
            },
        )
        takes = spec.children is None and ERROR_COLUMN not in spec.schema.names
        if spec.failures.on_error == "null" and not takes:
            raise DefinitionError(
                f"{culprit}: on_error='null' adds a column {ERROR_COLUMN!r} to a row's own; rename "
                "yours in the schema, and where many rows come of one use 'quarantine'"
            )
        if unknown := [name for name in spec.reads if name not in spec.schema.names]:
            raise DefinitionError(
                f"{culprit}: column_lineage names {names(unknown)}, which the schema does not "
                f"declare; it has {names(spec.schema.names, 20)}"
            )
        return self.pipeline._add(spec)

    def _children(
        self, culprit: str, cardinality: str, id: str | None, parent_id: str | None
    ) -> tuple[str, str] | None:
        """The columns of the new id and the parent's, where a stage makes many rows of one."""
        if cardinality not in ("one_to_many", "zero_to_many"):
            if id is not None or parent_id is not None:
                raise DefinitionError(
                    f"{culprit}: id and parent_id are given, but cardinality is {cardinality!r}; "
                    'they are for "one_to_many" and "zero_to_many", the others keep their id'
                )
            return None
        if not isinstance(id, str) or not id:
            raise DefinitionError(
                f"{culprit}: cardinality={cardinality!r} makes many rows of one, which need an id "
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
        """Adds a stage that publishes the rows: as a plain folder of Parquet, or as a Delta table.

        A partition is replaced as a whole, and files of others in the folder are left alone. Of a
        Delta table it is replaced in one transaction, so that readers see the rows before or those
        after; the files that are no longer in the table stay for Delta's own vacuum.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            url: For "parquet" a folder, as a path or fsspec URL, with ``{partition_key}`` where the
                pipeline is partitioned. For "delta" the table, a local path or ``s3://``, which
                holds all partitions.
            format: "parquet" or "delta", which needs the extra ``vane-dagster[delta]``. A Delta
                table has no unsigned numbers and no fixed sizes: those of at most 32 bits become
                the next larger signed ones, fixed-size lists and bytes become plain ones, and times
                of day with a zone are in UTC.
            storage_options: Options of the fsspec file system. For a Delta table on S3 they are
                given to Delta's own driver too, as far as it knows them: ``key``, ``secret``,
                ``token``, ``anon``, ``endpoint_url``, and ``endpoint_url`` and ``region_name`` of
                ``client_kwargs``. What they leave out it finds in AWS's own environment variables
                and profiles. The server must know conditional puts, as S3 itself does.
            compression: "zstd", "snappy", "lz4", "gzip" or "none".
            target_file_bytes: About how large the files are to be: those of neighbouring fragments
                are written together, larger ones split. Default: a file a fragment.
            partition_column: The column of a Delta table that holds the partition's key.
            **asset: What `dg.AssetSpec` takes; see `project`. Options that only one format takes.

        Raises:
            DefinitionError: If the URL does not tell partitions apart, there is no stage above, or
                Delta Lake is not installed.
        """
        culprit = self.pipeline._culprit(name)
        if self._node == SOURCE:
            raise DefinitionError(
                f"{culprit}: would publish the source as it is; add a project, and write that"
            )
        check_url(culprit, url)
        url, found = url_parts(url)
        publisher = publisher_class(one_of(culprit, "format", format, tuple(PUBLISHERS)))
        if publisher.has_folder_per_partition:
            check_placeholders(culprit, url, self.pipeline.partitions_def)
        codecs = ("zstd", "snappy", "lz4", "gzip", "none")
        declared = Target(
            url=url,
            storage_options=with_options(found, storage_options),
            compression=one_of(culprit, "compression", compression, codecs),
            format=format,
            target_bytes=positive(culprit, "target_file_bytes", target_file_bytes),
            partition_column=partition_column,
            options={name: asset.pop(name, default) for name, default in publisher.options.items()},
        )
        partitioned = self.pipeline.partitions_def is not None
        columns = tuple(self.pipeline.declared_types()[self._node])
        declared = publisher.validate(declared, culprit, partitioned, columns)
        options = asset_options(culprit, asset)
        return self.pipeline._add(WriteSpec(name, (self._node,), options, declared))
