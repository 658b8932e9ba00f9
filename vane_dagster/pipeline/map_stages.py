"""Stages that call a user's function or class: with batches, rows or columns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import duckdb
import pyarrow as pa

from vane_dagster._arguments import (
    environment_variables,
    list_of_names,
    mapping,
    one_of,
    parse_concurrency,
    positional,
    positive,
)
from vane_dagster.errors import DefinitionError, SchemaError, names
from vane_dagster.fingerprint.local_file import check_local_files
from vane_dagster.pipeline.asset_options import asset_options, check_arguments
from vane_dagster.pipeline.contracts import (
    BatchCall,
    ColumnsCall,
    Contract,
    RowResult,
    columns_call,
    row_call,
)
from vane_dagster.pipeline.decorators import NO_OPTIONS, Callee, CallOptions, resolve
from vane_dagster.pipeline.foreign_arguments import StageCall, check_value, stage_call
from vane_dagster.pipeline.options import (
    AUTO,
    BatchFormat,
    Cardinality,
    ExecutionBackend,
    OnError,
    Resources,
    ReuseMode,
    parse_execution_backend,
    parse_failures,
    parse_include,
    parse_lifecycle,
)
from vane_dagster.pipeline.required_arguments import required_arguments
from vane_dagster.pipeline.servers import ModelServer, parse_servers
from vane_dagster.pipeline.specs import MapBatchesSpec
from vane_dagster.pipeline.udf import Udf, called_function, check_callable, make_factory, make_udf
from vane_dagster.types import spark
from vane_dagster.types.annotations import arrow_type, element_of, field_types, hints, is_stream
from vane_dagster.types.callables import qualname, unwrapped
from vane_dagster.types.schema import INFER, SchemaLike, parse_schema, sql_type

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline, Stage

_IN_FLIGHT = 16
_CARDINALITY: Mapping[RowResult, Cardinality] = {
    "value": "one_to_one", "values": "zero_to_many", "bool": "filter",
}  # fmt: skip


@dataclass(frozen=True)
class MapSpec(MapBatchesSpec):
    """A stage that calls a function for each row."""

    kind = "map"


@dataclass(frozen=True)
class FlatMapSpec(MapBatchesSpec):
    """A stage that calls a function for each row, and makes a row of each of its results."""

    kind = "flat_map"


@dataclass(frozen=True)
class FilterSpec(MapBatchesSpec):
    """A stage that keeps the rows for which a function returns True."""

    kind = "filter"


@dataclass(frozen=True)
class PredictBatchSpec(MapBatchesSpec):
    """A stage that calls the function that a factory returns, with an array for each column."""

    kind = "predict_batch"


class MapRows:
    """Rows that a stage with a user's function can read."""

    pipeline: Pipeline
    _node: str

    @required_arguments()
    def map_batches(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike | Literal["infer"],
        columns: Sequence[str] | None = None,
        include_columns: bool | Sequence[str] = (),
        batch_format: BatchFormat = "pyarrow",
        batch_size: int | Literal["auto"] | None = None,
        cardinality: Cardinality = "one_to_one",
        concurrency: int | tuple[int, int] | None = None,
        max_concurrency: int | None = None,
        num_cpus: float = 0,
        gpus: float | None = None,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        execution_backend: ExecutionBackend | None = None,
        servers: Mapping[str, ModelServer] | None = None,
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
        on_error: OnError | None = None,
        max_error_rate: float | None = None,
        max_retries: int | None = None,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        max_rss: int | None = None,
        reuse: ReuseMode | None = None,
        reuse_partitions: int = 1,
        per_row: bool | None = None,
        **asset: Any,
    ) -> Stage:
        """Add a stage that applies a function, or a class constructed once per worker, to batches.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm); or
                another method of the class, as ``Model(path="m").score`` under `vd.cls`, or
                ``Model.score`` with the constructor's arguments beside it. Either may return,
                yield, or be async. The result is a table in any form that exports Arrow streams
                (``__arrow_c_stream__``: pyarrow, polars, DuckDB, nanoarrow), a pandas data frame,
                or a dict of column to array.
            schema: Output columns: a mapping of name to SQL type, or a `pyarrow.Schema`. If the id
                is omitted, it has the input's type. Columns that `fn` returns beyond the schema are
                dropped. "infer": the first run infers the schema from the first rows, pins it in
                the store, and logs it as code to paste; columns beyond it are refused.
            columns: Input columns that `fn` gets, in this order; the id is among them only if it is
                named, or `reuse` is not "rows". Default: all.
            include_columns: Input columns to pass on beside those that `fn` returns; True for all.
                They keep the input's values. A column that the schema declares is the function's.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays), "torch" (dict of
                tensors; lists for columns that are no numbers), "pandas" or "polars". If `fn`
                returns a pandas frame without the id, its rows are matched by the frame's index.
            batch_size: Rows per call. The last batch of a fragment may be smaller. "auto": workers
                double it as long as throughput rises. Default: all rows of a worker's task, a
                number that follows the worker's speed and so differs between runs.
            cardinality: "one_to_one": every row must be returned; "filter": rows may be dropped;
                "one_to_many": each row becomes one or more; "zero_to_many": each row becomes any
                number of rows.
            concurrency: Workers, or (min, max) depending on the cluster's free resources. Default:
                1 for a class, up to the cluster's CPUs for a function.
            max_concurrency: Calls that run at the same time: in one worker if `fn` is async,
                default 16. A worker runs one call of a synchronous `fn` at a time, so there it is
                the number of workers, as `concurrency`.
            num_cpus: CPUs that a worker reserves. Default: none.
            gpus: GPUs that a worker reserves; fractions share one. For a class only. Default: none,
                or what `vd.cls` says; so for all arguments that decorators take.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: The GPU type, as Ray names it.
            resources: Custom cluster resources that a worker reserves.
            execution_backend: Where the workers run: "ray_actor" (a class) or "ray_task" (a
                function) on the Ray cluster; "subprocess_actor" or "subprocess_task" on the machine
                of the run, as subprocesses, while other stages run on the cluster. For code that
                needs a license, device or service of that machine. Default: where the compute
                resource says.
            servers: Servers that `fn` calls, such as ``{"llm": vd.VLLMServer(...)}``. Each is a
                keyword argument of the class, or of the function, with the attributes of
                `ServerHandle`: ``llm.url``, ``llm.model``, ``llm.headers``.
            fn_args: Passed to each call after the batch. In this and the following arguments, the
                path of a local file or folder counts in fragment keys with its content, unless runs
                change that content: a folder that contains the pipeline's source, target, store or
                code. `vd.local_file(path)` sends the content to workers that cannot read the path.
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
            on_error: How a failed batch is handled. "raise", the default, fails the partition.
                "quarantine" halves the batch until the failed rows are isolated, stores those with
                their errors beside the output, and continues. "null" keeps them in the output as
                nulls, with the error in a column "error".
            max_error_rate: The share of a partition's rows that may fail. Beyond it, the partition
                fails, and if all rows fail, unless it is 1. Default: 0.01, or 10 rows if that is
                more.
            max_retries: Retries of a call, with exponential backoff, after a transient error: a
                connection error, a time-out, HTTP 429 or 5xx. Default: 3.
            retry_on: Further exception classes, or their names, to treat as transient.
            timeout_s: Time limit of a call in seconds. A worker that exceeds it is replaced. Rows
                that hang or kill their workers are isolated like rows that raise.
            startup_timeout_s: Time limit in seconds for constructing `fn` in a worker. The error
                says what the worker was executing. Default: 1800.
            max_batches_per_actor: Calls after which a worker is replaced by a new one, for models
                or libraries that leak memory.
            max_rss: Bytes of memory after which a worker is replaced, between two calls. Counts the
                private memory of its processes, without mapped files and shared tables.
            reuse: Which stored results are used again. "rows": a row is computed only if the values
                of `columns`, the code, its arguments or the schema changed. Each output then has to
                depend on its own row alone. "fragments": the rows of a file, or part of it, are
                computed if one of them changed, or anything else in the input. "none": each run
                computes all rows. Default: "rows" if the columns that `fn` reads are known, and it
                cannot mix up rows without the id; else "fragments".
            reuse_partitions: With "rows", the number of preceding partitions in which rows are
                looked up, besides the row's own. 0: its own alone.
            per_row: With "rows", whether each row has a result of its own, as from a function that
                samples. Default: rows with equal `columns` share a result.
            **asset: Arguments of `dg.AssetSpec`; see `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If `fn` is an instance, or an argument is invalid.
            SchemaError: If a type is unknown.
        """
        location = self.pipeline._location(name)
        check_value(location, "batch_format", batch_format)
        contract = BatchCall(one_of(location, "batch_format", batch_format, get_args(BatchFormat)))
        callee = resolve(location, fn, fn_constructor_args, fn_constructor_kwargs)
        callee, fn_kwargs = _with_servers(location, callee, fn_kwargs, servers)
        if callee.options.is_batch:
            raise DefinitionError(
                f"{location}: {callee.name} takes an array for each column, as @batch says; use "
                f"map({name!r}, ...), which passes the columns that its parameters name"
            )
        udf = make_udf(
            location,
            callee.target,
            args=fn_args,
            kwargs=fn_kwargs,
            constructor_args=callee.constructor_args,
            constructor_kwargs=callee.constructor_kwargs,
            version=version,
            method=callee.method,
            contract=contract,
        )
        return self._add_udf_stage(
            MapBatchesSpec,
            name,
            udf,
            contract,
            None if _is_inferred(schema) else parse_schema(schema, location),
            stage_call(self.map_batches),
            callee.options,
            list_of_names(location, "columns", columns),
            include_columns=include_columns,
            batch_size=batch_size,
            cardinality=cardinality,
            concurrency=concurrency,
            max_concurrency=max_concurrency,
            num_cpus=num_cpus,
            gpus=gpus,
            memory=memory,
            accelerator_type=accelerator_type,
            resources=resources,
            execution_backend=execution_backend,
            env_vars=env_vars,
            keyed_env_vars=keyed_env_vars,
            id=id,
            parent_id=parent_id,
            column_lineage=column_lineage,
            on_error=on_error,
            max_error_rate=max_error_rate,
            max_retries=max_retries,
            retry_on=retry_on,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            max_batches_per_actor=max_batches_per_actor,
            max_rss=max_rss,
            reuse=reuse,
            reuse_partitions=reuse_partitions,
            per_row=per_row,
            **asset,
        )

    @required_arguments("_add_row_stage", "_add_udf_stage")
    def map(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike | str | pa.DataType | None = None,
        inputs: Mapping[str, str] | None = None,
        output_column: str | None = None,
        columns: Sequence[str] | None = None,
        include_columns: bool | Sequence[str] = (),
        **options: Any,
    ) -> Stage:
        """Add a stage that calls a function, or an instance of a class, for each row.

        A parameter gets the column of its name; one with a default keeps it, unless `inputs` names
        it. The one parameter of ``fn(row)`` gets the whole row as a dict, if it is called ``row``
        or is annotated as a dict, mapping or TypedDict. `fn` may be async, or a generator that
        yields one value. An error is an error of its row alone, and `timeout_s` is the time limit
        of a row.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function, or a class with ``__call__`` that is constructed once per worker, or
                another method of it; see `map_batches`. Under `vd.method.batch` or `vd.func.batch`
                it is called with an array for each column.
            schema: The type of the result as an SQL string or Arrow type; or several columns, as a
                mapping of name to type or a `pyarrow.Schema`. Default: the return annotation, a
                scalar, ``list[...]``, dataclass, TypedDict, NamedTuple or pydantic model. "infer":
                the first run infers it, see `map_batches`.
            inputs: Columns by parameter, for parameters that are not named after their column.
            output_column: The one column of the results. Default: for a single value, the stage's
                name; a dict, dataclass or model makes a column of each field.
            columns: The columns in the dict that `fn` gets; see `map_batches`. Default: all.
            include_columns: Input columns to pass on beside the results; True for all.
            **options: Further arguments of `map_batches`, except `batch_format`, `batch_size` and
                `cardinality`. With an async `fn`, `max_concurrency` is the number of rows in flight
                in one worker.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If the parameters fit no columns, the result's type is unknown, or an
                argument is invalid.
            SchemaError: If a type is unknown.
        """
        given = (schema, inputs, output_column, columns, include_columns)
        return self._add_row_stage(MapSpec, name, fn, "value", *given, **options)

    @required_arguments("_add_row_stage", "_add_udf_stage")
    def flat_map(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        id: str,
        schema: SchemaLike | str | pa.DataType | None = None,
        inputs: Mapping[str, str] | None = None,
        output_column: str | None = None,
        columns: Sequence[str] | None = None,
        include_columns: bool | Sequence[str] = (),
        **options: Any,
    ) -> Stage:
        """Add a stage that makes any number of rows of each row.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: As in `map`, but it returns a list, or yields, a value for each new row.
            id: The column of the new id, which keys the downstream stages. Unless `schema`
                declares it, which every result then has, a row gets ``<parent id>-<number>``.
            schema: The type of one value; see `map`. Default: the return annotation's element type.
            inputs: See `map`.
            output_column: See `map`.
            columns: See `map`.
            include_columns: Input columns to pass on to each new row; True for all.
            **options: See `map`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: See `map`.
            SchemaError: If a type is unknown.
        """
        given = (schema, inputs, output_column, columns, include_columns)
        return self._add_row_stage(FlatMapSpec, name, fn, "values", *given, id=id, **options)

    @required_arguments("_add_row_stage", "_add_udf_stage")
    def filter(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        inputs: Mapping[str, str] | None = None,
        columns: Sequence[str] | None = None,
        include_columns: bool | Sequence[str] = True,
        **options: Any,
    ) -> Stage:
        """Add a stage that keeps the rows for which a function returns True.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: As in `map`; it returns a bool.
            inputs: See `map`.
            columns: See `map`.
            include_columns: Input columns of the rows that are kept. Default: all.
            **options: See `map`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: See `map`.
        """
        given = (None, inputs, None, columns, include_columns)
        return self._add_row_stage(FilterSpec, name, fn, "bool", *given, **options)

    @required_arguments("_add_udf_stage")
    def predict_batch(
        self,
        name: str,
        make_predict_fn: Callable[..., Any],
        *,
        inputs: Sequence[str],
        return_type: Any,
        batch_size: int | Literal["auto"] | None = None,
        input_tensor_shapes: Sequence[Sequence[int] | None]
        | Mapping[int, Sequence[int]]
        | None = None,
        output_column: str | None = None,
        include_columns: bool | Sequence[str] = (),
        servers: Mapping[str, ModelServer] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        version: str | None = None,
        **options: Any,
    ) -> Stage:
        """Add a stage that runs a factory written for Spark's ``predict_batch_udf``.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            make_predict_fn: A function that loads a model and returns ``predict(array, ...)``. It
                is called once per worker, which keeps the model warm.
            inputs: The input columns, in the order of predict's parameters. Each is a numpy array
                of shape (batch,), or (batch, *shape). A predict function with one parameter gets
                several columns as one array of shape (batch, columns).
            return_type: Spark's type of the result, as a DDL string ("float", "array<float>",
                "a float, b string") or a `pyspark.sql.types.DataType`.
            batch_size: Rows per call; see `map_batches`.
            input_tensor_shapes: The shape of a row of each input, without the batch dimension, by
                position or by index; None for a scalar column. Lists are read as flattened tensors.
                One shape for several inputs is that of the one array of a predict function with one
                parameter.
            output_column: The one column of the results. Default: for a single value, the stage's
                name; a struct makes a column of each field.
            include_columns: Input columns to pass on beside the results; True for all.
            servers: Servers that are passed to the factory by name; see `map_batches`. A factory
                for servers of Spark jobs gets ``server.host_to_http_url`` or
                ``server.host_to_grpc_url`` as an argument.
            fn_constructor_args: Passed to the factory.
            fn_constructor_kwargs: Passed to the factory.
            version: See `map_batches`.
            **options: Further arguments of `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
            SchemaError: If the return type is unknown.
        """
        location = self.pipeline._location(name)
        given = list_of_names(location, "inputs", inputs) or ()
        if not given:
            raise DefinitionError(f"{location}: inputs is {inputs!r}; expected the input columns")
        kind = spark.parse_return_type(return_type, location)
        fields = list(kind) if pa.types.is_struct(kind) and output_column is None else None
        output = None if fields else output_column or name
        contract = ColumnsCall(
            given,
            "numpy",
            _tensor_shapes(location, input_tensor_shapes, len(given)),
            output,
            stacks=True,
        )
        udf = make_factory(
            location,
            make_predict_fn,
            args=fn_constructor_args,
            kwargs=_merged(location, fn_constructor_kwargs, servers),
            version=version,
        )
        return self._add_udf_stage(
            PredictBatchSpec,
            name,
            udf,
            contract,
            parse_schema(pa.schema(fields or [(output, kind)]), location),
            stage_call(self.predict_batch, self._add_udf_stage),
            NO_OPTIONS,
            given,
            include_columns=include_columns,
            batch_size=batch_size,
            **options,
        )

    def _add_row_stage(
        self,
        kind: type[MapBatchesSpec],
        name: str,
        fn: Any,
        result: RowResult,
        schema: Any,
        inputs: Mapping[str, str] | None,
        output_column: str | None,
        columns: Sequence[str] | None,
        include_columns: bool | Sequence[str],
        /,
        *,
        servers: Mapping[str, ModelServer] | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        version: str | None = None,
        **options: Any,
    ) -> Stage:
        """Add a stage with a row-wise function; the arguments are those of `map`."""
        location = self.pipeline._location(name)
        adds = stage_call(getattr(self, kind.kind), self._add_row_stage, self._add_udf_stage)
        check_arguments(location, options, adds)
        callee = resolve(location, fn, fn_constructor_args, fn_constructor_kwargs)
        callee, fn_kwargs = _with_servers(location, callee, fn_kwargs, servers)
        check_callable(location, callee.target, callee.method)
        call, has_self = called_function(callee.target, callee.method)
        if schema is None:
            schema = _return_type(location, callee.options)
        declared, output = _result_schema(location, name, call, result, schema, output_column)
        by_row = row_call(
            location,
            call,
            mapping(location, "inputs", inputs) if inputs is not None else None,
            positional(location, "fn_args", fn_args),
            mapping(location, "fn_kwargs", fn_kwargs),
            output,
            result,
            has_self,
        )
        is_batch = callee.options.is_batch
        contract: Contract = columns_call(location, call, by_row) if is_batch else by_row
        udf = make_udf(
            location,
            callee.target,
            args=fn_args,
            kwargs=fn_kwargs,
            constructor_args=callee.constructor_args,
            constructor_kwargs=callee.constructor_kwargs,
            version=version,
            method=callee.method,
            contract=contract,
        )
        read = list_of_names(location, "columns", columns)
        if by_row.inputs is not None:
            if read is not None:
                raise DefinitionError(
                    f"{location}: columns is for a function that gets the whole row; this one "
                    f"reads {names(column for _, column in by_row.inputs)}"
                )
            read = tuple(dict.fromkeys(column for _, column in by_row.inputs))
        refused = ("cardinality", "batch_size") if contract.by_row else ("cardinality",)
        if wrong := [option for option in refused if option in options]:
            raise DefinitionError(
                f"{location}: {kind.kind} takes no {names(wrong)}: it calls {udf.name} for each "
                "row, and its result makes the rows. For batches, use map_batches"
            )
        return self._add_udf_stage(
            kind,
            name,
            udf,
            contract,
            declared,
            adds,
            callee.options,
            read,
            include_columns=include_columns,
            cardinality=_CARDINALITY[result],
            **options,
        )

    def _add_udf_stage(
        self,
        kind: type[MapBatchesSpec],
        name: str,
        udf: Udf,
        contract: Contract,
        schema: pa.Schema | None,
        call: StageCall,
        declared: CallOptions,
        columns: tuple[str, ...] | None,
        /,
        *,
        include_columns: bool | Sequence[str] = (),
        batch_size: int | Literal["auto"] | None = None,
        cardinality: Cardinality = "one_to_one",
        concurrency: int | tuple[int, int] | None = None,
        max_concurrency: int | None = None,
        num_cpus: float = 0,
        gpus: float | None = None,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        execution_backend: ExecutionBackend | None = None,
        env_vars: Sequence[str] = (),
        keyed_env_vars: Sequence[str] = (),
        id: str | None = None,
        parent_id: str | None = None,
        column_lineage: Mapping[str, Sequence[str]] | None = None,
        on_error: OnError | None = None,
        max_error_rate: float | None = None,
        max_retries: int | None = None,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        max_rss: int | None = None,
        reuse: ReuseMode | None = None,
        reuse_partitions: int = 1,
        per_row: bool | None = None,
        **asset: Any,
    ) -> Stage:
        """Add a stage that calls a UDF; the options are those of `map_batches`.

        A schema of None is inferred.
        """
        location = self.pipeline._location(name)
        if schema is None and isinstance(contract, ColumnsCall):
            raise DefinitionError(
                f"{location}: {udf.name} gets an array for each column, and schema={INFER!r} is "
                "for functions that get batches or rows. Declare what it returns, as "
                '@vd.method.batch(return_dtype="VARCHAR") or schema="VARCHAR"'
            )
        if declared.label:
            udf = replace(udf, label=declared.label)
        if gpus is None:
            gpus = declared.gpus or 0
        if max_concurrency is None and (udf.is_async or concurrency is None):
            max_concurrency = declared.max_concurrency
        if max_retries is None:
            max_retries = 3 if declared.max_retries is None else declared.max_retries
        num_cpus = num_cpus or declared.num_cpus or 0
        batch_size = batch_size or declared.batch_size
        needs = Resources(
            num_cpus, gpus, memory, accelerator_type, mapping(location, "resources", resources)
        )
        needs.validate(location)
        if gpus and not udf.stateful:
            raise DefinitionError(
                f"{location}: gpus={gpus} for function {udf.name}, which would load its model for "
                "each batch; make it a class that loads the model in __init__"
            )
        check_value(location, "on_error", on_error)
        workers = parse_concurrency(location, concurrency)
        in_flight = positive(location, "max_concurrency", max_concurrency)
        if in_flight and not udf.is_async:
            if workers:
                raise DefinitionError(
                    f"{location}: {udf.name} is synchronous, so max_concurrency is the number of "
                    "workers, which concurrency says too; leave one of them out"
                )
            workers = (in_flight, in_flight)
        auto = batch_size == AUTO
        forwarded, keyed = environment_variables(location, env_vars, keyed_env_vars)
        check_local_files(location, udf.local_files, made_later=bool(asset.get("deps")))
        spec = kind(
            name=name,
            upstream=(self._node,),
            asset=asset_options(location, asset, call),
            udf=udf,
            schema=pa.schema([]) if schema is None else schema,
            infers=schema is None,
            columns=columns,
            contract=contract,
            batch_size=None if auto else positive(location, "batch_size", batch_size),
            auto_batch=auto,
            cardinality=one_of(location, "cardinality", cardinality, get_args(Cardinality)),
            concurrency=workers or ((1, 1) if udf.stateful else None),
            max_concurrency=in_flight or _IN_FLIGHT,
            resources=needs,
            execution_backend=parse_execution_backend(
                location, execution_backend, udf.stateful, udf.name
            ),
            env_vars=forwarded,
            keyed_env_vars=keyed,
            children=self._children(location, cardinality, id, parent_id),
            failures=parse_failures(
                location,
                on_error or declared.on_error or "raise",
                max_error_rate,
                max_retries,
                retry_on,
                timeout_s,
            ),
            lifecycle=parse_lifecycle(location, startup_timeout_s, max_batches_per_actor, max_rss),
            reads={
                name: list_of_names(location, f"column_lineage[{name!r}]", listed) or ()
                for name, listed in mapping(location, "column_lineage", column_lineage).items()
            },
            include=parse_include(location, include_columns),
        ).with_reuse(self.pipeline, reuse, reuse_partitions, per_row)
        if not spec.infers:
            spec.check_schema(location)
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


def _with_servers(
    location: str,
    callee: Callee,
    fn_kwargs: Mapping[str, Any] | None,
    servers: Mapping[str, ModelServer] | None,
) -> tuple[Callee, Mapping[str, Any]]:
    """Add servers to the arguments of a class's constructor, or of a function's calls."""
    if not inspect.isclass(callee.target):
        return callee, _merged(location, fn_kwargs, servers)
    arguments = _merged(location, callee.constructor_kwargs, servers)
    return replace(callee, constructor_kwargs=arguments), fn_kwargs or {}


def _merged(
    location: str, arguments: Mapping[str, Any] | None, servers: Mapping[str, ModelServer] | None
) -> Mapping[str, Any]:
    """Return keyword arguments with servers among them."""
    if servers is None:
        return arguments or {}
    handles, given = parse_servers(location, servers), mapping(location, "arguments", arguments)
    if twice := sorted(set(handles) & set(given)):
        raise DefinitionError(
            f"{location}: servers and the arguments of the function or class both have {twice[0]!r}"
        )
    return {**given, **handles}


def _return_type(location: str, options: CallOptions) -> SchemaLike | str | pa.DataType | None:
    """Return the type that a decorator declares, as the `schema` of a stage.

    Raises:
        DefinitionError: If the fields of something other than a struct are to be columns.
        SchemaError: If the type is unknown.
    """
    declared = options.return_dtype
    if declared is None or isinstance(declared, pa.Schema):
        return declared
    try:
        if isinstance(declared, Mapping):
            found = {name: _declared_type(kind) for name, kind in declared.items()}
            return pa.schema(list(found.items()))
        kind = _declared_type(declared)
    except (SchemaError, duckdb.Error) as error:
        raise SchemaError(f"{location}: return_dtype is {declared!r}: {error}") from None
    if not options.unnest:
        return kind
    if not pa.types.is_struct(kind):
        raise DefinitionError(
            f"{location}: unnest=True makes columns of the fields of a struct, but return_dtype is "
            f"{kind}"
        )
    return pa.schema(list(kind))


def _declared_type(kind: Any) -> pa.DataType:
    return sql_type(kind) if isinstance(kind, str) else arrow_type(kind)


def _result_schema(
    location: str,
    name: str,
    call: Any,
    result: RowResult,
    schema: Any,
    output_column: str | None,
) -> tuple[pa.Schema | None, str | None]:
    """Return the columns that a row-wise function makes, and the one that its result is.

    The schema is None if it is inferred; a single value then is in the column of the stage's name.

    Raises:
        DefinitionError: If the result's type is unknown.
        SchemaError: If a type is unknown.
    """
    if result == "bool":
        return pa.schema([]), None
    if _is_inferred(schema):
        return None, output_column
    output = output_column or name
    if isinstance(schema, (str, pa.DataType)):
        return parse_schema({output: schema}, location), output
    if schema is not None:
        declared = parse_schema(schema, location)
        if output_column is None:
            return declared, None
        return parse_schema({output: pa.struct(list(declared))}, location), output
    returned = hints(unwrapped(call)).get("return")
    if result == "values" or is_stream(returned):
        returned = element_of(returned)
    if returned is None:
        raise DefinitionError(
            f"{location}: the result's type is unknown; annotate what {qualname(call)} returns, or "
            'declare it, as schema="VARCHAR" or schema={"label": "VARCHAR", "score": "DOUBLE"}; '
            'schema="infer" infers it from the first rows'
        )
    try:
        fields = field_types(returned) if output_column is None else None
        found: Any = fields or {output: arrow_type(returned)}
    except SchemaError as error:
        raise SchemaError(f"{location}: {qualname(call)} returns {error}") from None
    return parse_schema(found, location), None if fields else output


def _is_inferred(schema: Any) -> bool:
    return isinstance(schema, str) and schema == INFER


def _tensor_shapes(location: str, shapes: Any, inputs: int) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shape of each input, None for a scalar; empty if no input has one."""
    if isinstance(shapes, Mapping):
        if wrong := [index for index in shapes if index not in range(inputs)]:
            raise DefinitionError(
                f"{location}: input_tensor_shapes has {names(wrong)}; expected the position of an "
                f"input, from 0 to {inputs - 1}"
            )
        shapes = [shapes.get(index) for index in range(inputs)]
    listed = list(shapes or ())
    for shape in listed:
        if shape and not all(type(size) is int and size > 0 for size in shape):
            raise DefinitionError(
                f"{location}: input_tensor_shapes has {shape!r}; expected a list of sizes from 1 "
                "up, without the batch dimension"
            )
    is_stacked = len(listed) == 1 and math.prod(listed[0] or ()) == inputs
    if listed and len(listed) != inputs and not is_stacked:
        raise DefinitionError(
            f"{location}: input_tensor_shapes is {shapes!r} for {inputs} inputs; give each input "
            f"its shape, None for a scalar column, or [[{inputs}]] for a predict function with one "
            "parameter, which gets all inputs as one array"
        )
    return tuple(tuple(shape) if shape else None for shape in listed)
