"""Stages that call a user's function or class: with batches, rows or columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from vane_dagster._arguments import list_of_names, mapping, one_of, positive
from vane_dagster._lazy import duckdb
from vane_dagster.errors import DefinitionError, SchemaError, names
from vane_dagster.fingerprint.local_file import check_local_files
from vane_dagster.pipeline.contracts import (
    BatchCall,
    ColumnsCall,
    DeclaredCall,
    RowResult,
    columns_call,
    row_call,
)
from vane_dagster.pipeline.decorators import ON_ERROR
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.options import AUTO, BatchFormat
from vane_dagster.pipeline.records import (
    Children,
    CodeArguments,
    StageArguments,
    StageOptions,
    parse_options,
    refuse_for_prompts,
)
from vane_dagster.pipeline.udf import Udf, called_function, check_calls, make_udf
from vane_dagster.types.annotations import arrow_type, element_of, has_fields, hints, is_stream
from vane_dagster.types.callables import qualname, unwrapped
from vane_dagster.types.schema import INFER, SchemaLike, parse_schema, sql_type

if TYPE_CHECKING:
    from typing import Unpack

    from vane_dagster.pipeline.pipeline import Pipeline, Stage

_IN_FLIGHT = 16


class MapRows:
    """Rows that a stage with a user's function can read."""

    pipeline: Pipeline
    _node: str

    @adds_stage
    def map_batches(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike | Literal["infer"],
        columns: Sequence[str] | None = None,
        batch_format: BatchFormat = "pyarrow",
        batch_size: int | Literal["auto"] | None = None,
        cardinality: Literal["one_to_one", "filter"] | Children = "one_to_one",
        **options: Unpack[CodeArguments],
    ) -> Stage:
        """Add a stage that applies a function, or a class constructed once per worker, to batches.

        Each call receives a copy of its batch, and its results are copied before the next call: a
        function may write into its batch and reuse its buffers. If the results omit the id, their
        rows must be in the order of the batch, and a pandas data frame must have the index 0, 1,
        2, ...

        Results are cast to the schema if the cast changes no value, except for floating-point
        precision: numbers to numbers if they fit (``1.5`` is not a BIGINT), dates to timestamps at
        midnight, UTF-8 bytes to text, and dataclasses, pydantic models and named tuples to structs.
        Time zones are neither guessed nor dropped; numpy's times are in UTC. Fields that a dict
        lacks are null. None, masked elements of numpy and NaN of pandas become null; NaN of numpy,
        torch and polars stays NaN. Types are stored as they are, without dictionaries and views.

        With ``schema="infer"``, the first 16 rows that reach the stage are computed on the run's
        own workers, from up to four partitions if files are small. Upstream stages without stored
        results compute these rows too, and again in the run, so an upstream prompt is paid twice
        for them. The run is refused if a column has only nulls or empty lists, which have no type,
        or if later results have another column or type. Until the schema is inferred,
        `Stage.schema` raises. After an edit of the stage or of an upstream stage, the schema is
        inferred again. Pasting the logged schema recomputes nothing.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm); or
                another method of the class, such as ``Model(path="m").score`` under `vd.cls`, or
                ``Model.score`` with the constructor's arguments beside it. Either may return,
                yield, or be async. The result is a table in any form that exports Arrow streams
                (``__arrow_c_stream__``: pyarrow, polars, DuckDB, nanoarrow), a pandas data frame,
                or a dict of column to array.
            schema: Output columns: a mapping of name to SQL type, or a `pyarrow.Schema`. If the id
                is omitted, it has the input's type. Columns that `fn` returns beyond the schema are
                dropped. "infer": the first run infers the schema from the first rows, pins it in
                the store, and logs it as code to paste; columns beyond it are refused.
            columns: Input columns that `fn` receives, in this order. The id is among them only if
                it is named, or `reuse` is not "rows". Default: all.
            include_columns: Input columns to pass through, in addition to those that `fn` returns;
                True for all. They keep the input's values. Columns in the schema come from `fn`.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays), "torch" (dict of
                tensors; lists for non-numeric columns), "pandas" or "polars". A pandas
                frame that `fn` returns without the id has the default index.
            batch_size: Maximum rows per call. The last batch of a worker's task may be smaller, and
                so may all batches of the last fragment, whose rows are shared evenly. "auto":
                workers double it as long as throughput rises. Default: all rows of a worker's task,
                whose number depends on the worker's speed and so differs between runs.
            cardinality: "one_to_one": every row must be returned; "filter": rows may be dropped;
                `vd.Children`: each row becomes any number of rows.
            fn_kwargs: Passed to each call after the batch. In this and the following arguments, if
                a path names a local file or folder, its content is part of fragment keys, except
                for folders whose content runs change: those with the pipeline's source, target,
                store or code. `vd.local_file(path)` sends the content to workers that cannot read
                the path.
                A server, such as `vd.VLLMServer`, is passed with the attributes of `ServerHandle`:
                ``llm.url``, ``llm.model``, ``llm.headers``.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            concurrency: Workers: a number; (min, max) depending on the cluster's free resources;
                "auto" for as many as fit on its GPUs, or on its CPUs if it has none; or
                `vd.Workers`, which also sets what each worker reserves and how it runs. Default: 1
                for a class, "auto" for a function.
            gpus: GPUs that a worker reserves; with a fraction, workers share a GPU. Only for a
                class. Default: the value of `vd.cls`, else none; this applies to all arguments that
                decorators accept.
            on_error: "raise" (default), "quarantine" or "null"; or `vd.Failures`, with the rate of
                errors, retries and time limits.
            reuse: "rows", "fragments" or "none"; or `vd.Reuse`. Default: "rows" if possible.
            asset: Additional attributes of the stage's Dagster asset: `vd.Asset`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If `fn` is an instance, or an argument is invalid.
            SchemaError: If a type is unknown.
        """
        location = self.pipeline._location(name)
        udf, parsed = self._parse(location, fn, options)
        contract = BatchCall(one_of(location, "batch_format", batch_format, get_args(BatchFormat)))
        if not isinstance(cardinality, Children):
            expected = ("one_to_one", "filter", 'vd.Children("<column of the new id>")')
            one_of(location, "cardinality", cardinality, expected)
        if "is_batch" in udf.options:
            raise DefinitionError(
                f"{location}: {udf.name} expects an array for each column, because of @batch; use "
                f"map({name!r}, ...), which passes the columns that its parameters name"
            )
        declared = None if _is_inferred(schema) else parse_schema(schema, location)
        read = list_of_names(location, "columns", columns)
        return self._add_udf_stage(
            "map_batches", name, udf, parsed, contract, declared, read, cardinality, batch_size
        )

    @adds_stage
    def map(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike | str | pa.DataType | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        output_column: str | None = None,
        batch_size: int | Literal["auto"] | None = None,
        **options: Unpack[CodeArguments],
    ) -> Stage:
        """Add a stage that calls a function, or an instance of a class, for each row.

        Each parameter receives the column with its name. A parameter with a default keeps the
        default, unless `columns` names it. A single parameter that is called ``row``, or is
        annotated as a dict, mapping or TypedDict, receives the whole row as a dict. `fn` may be
        async, or a generator that yields one value. None is null in each column of the result. An
        error fails only its row.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function, or a class with ``__call__`` that is constructed once per worker, or
                another method of it; see `map_batches`. Under `vd.method.batch` or `vd.func.batch`
                it is called with an array for each column.
            schema: The type of the result as an SQL string or Arrow type; or several columns, as a
                mapping of name to type or a `pyarrow.Schema`. Default: the return annotation, a
                scalar, ``list[...]``, dataclass, TypedDict, NamedTuple or pydantic model. "infer":
                the first run infers it, see `map_batches`.
            columns: For a function of a whole row, the columns in its dict; default: all. For other
                functions, a mapping of parameter to column, for parameters that are not named after
                their column.
            output_column: The name of a single result column. Default: for a single value, the
                stage's name; for a dict, dataclass or model, each field becomes a column.
            include_columns: Input columns to pass on beside the results; True for all.
            batch_size: Rows per call of a function under ``.batch``; see `map_batches`.
            fn_kwargs: Passed to each call; see `map_batches`.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            concurrency: Workers; see `map_batches`. With an async `fn`, ``max_concurrency`` of
                `vd.Workers` is the number of rows in flight in one worker.
            gpus: GPUs that a worker reserves; see `map_batches`.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If a parameter matches no column, the result's type is unknown, or an
                argument is invalid.
            SchemaError: If a type is unknown.
        """
        return self._add_row_stage(
            "map", name, fn, options, columns, "one_to_one", schema, output_column, batch_size
        )

    @adds_stage
    def flat_map(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        id: str,
        schema: SchemaLike | str | pa.DataType | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        output_column: str | None = None,
        **options: Unpack[CodeArguments],
    ) -> Stage:
        """Add a stage that makes any number of rows from each row.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: As in `map`, but it returns a list of values, or yields a value for each new row.
            id: The column of the new id, which identifies the rows in downstream stages. If
                `schema` declares it, every result must have it. Otherwise a row gets the id
                ``<parent id>-<number>``.
            schema: The type of one value; see `map`. Default: the return annotation's element type.
            columns: See `map`.
            output_column: See `map`.
            include_columns: Input columns to pass on to each new row; True for all.
            fn_kwargs: Passed to each call; see `map_batches`.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            concurrency: See `map`.
            gpus: GPUs that a worker reserves; see `map_batches`.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: See `map`.
            SchemaError: If a type is unknown.
        """
        return self._add_row_stage(
            "flat_map", name, fn, options, columns, Children(id), schema, output_column
        )

    @adds_stage
    def filter(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        **options: Unpack[CodeArguments],
    ) -> Stage:
        """Add a stage that keeps the rows for which a function returns True.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: As in `map`; it returns a bool.
            columns: See `map`.
            include_columns: Input columns of the rows that are kept. Default: all.
            fn_kwargs: Passed to each call; see `map_batches`.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            concurrency: See `map`.
            gpus: GPUs that a worker reserves; see `map_batches`.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: See `map`.
        """
        options = {"include_columns": True, **options}
        return self._add_row_stage("filter", name, fn, options, columns, "filter")

    @adds_stage
    def predict_batch(
        self,
        name: str,
        make_predict_fn: Callable[..., Any],
        *,
        columns: Sequence[str],
        return_type: Any,
        batch_size: int | Literal["auto"] | None = None,
        input_tensor_shapes: Sequence[Sequence[int] | None]
        | Mapping[int, Sequence[int]]
        | None = None,
        output_column: str | None = None,
        **options: Unpack[StageArguments],
    ) -> Stage:
        """Add a stage that runs a factory written for Spark's ``predict_batch_udf``.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            make_predict_fn: A function that loads a model and returns ``predict(array, ...)``; with
                arguments, a `functools.partial` of it. It is called once per worker, which keeps
                the model loaded. Pass ``server.host_to_http_url`` or ``server.host_to_grpc_url`` to
                a factory that was written for servers of Spark jobs.
            columns: The input columns, in the order of predict's parameters. Each is a numpy array
                of shape (batch,), or (batch, *shape). A predict function with one parameter
                receives several columns as one array of shape (batch, columns).
            return_type: Spark's type of the result, as a DDL string ("float", "array<float>",
                "a float, b string") or a `pyspark.sql.types.DataType`.
            batch_size: Rows per call; see `map_batches`.
            input_tensor_shapes: The shape of a row of each input, without the batch dimension, by
                position or by index; None for a scalar column. Lists are read as flattened tensors.
                If there is one shape for several inputs, it is the shape of the single array of a
                predict function with one parameter.
            output_column: The name of a single result column. Default: for a single value, the
                stage's name; for a struct, each field becomes a column.
            include_columns: Input columns to pass on beside the results; True for all.
            concurrency: Workers; see `map_batches`.
            gpus: GPUs that a worker reserves; see `map_batches`.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
            SchemaError: If the return type is unknown.
        """
        from vane_dagster.types import spark

        location = self.pipeline._location(name)

        given = list_of_names(location, "columns", columns) or ()
        if not given:
            raise DefinitionError(f"{location}: columns is {columns!r}; expected the input columns")
        kind = spark.parse_return_type(return_type, location)
        fields = list(kind) if pa.types.is_struct(kind) and output_column is None else None
        output = None if fields else output_column or name
        shapes = _tensor_shapes(location, input_tensor_shapes, len(given))
        udf = make_udf(location, make_predict_fn, is_factory=True)
        parsed = parse_options(location, options)
        contract = ColumnsCall(given, "numpy", shapes, output, stacks=True)
        schema = parse_schema(pa.schema(fields or [(output, kind)]), location)
        return self._add_udf_stage(
            "predict_batch", name, udf, parsed, contract, schema, given, "one_to_one", batch_size
        )

    def _parse(self, location: str, fn: Any, given: CodeArguments) -> tuple[Udf, StageOptions]:
        placed, named = given.get("fn_constructor_args", ()), given.get("fn_constructor_kwargs")
        udf = make_udf(location, fn, placed, named, given.get("fn_kwargs"))
        return udf, parse_options(location, given)

    def _add_row_stage(
        self,
        kind: str,
        name: str,
        fn: Any,
        given: CodeArguments,
        columns: Any,
        cardinality: Literal["one_to_one", "filter"] | Children,
        schema: Any = None,
        output_column: str | None = None,
        batch_size: int | Literal["auto"] | None = None,
    ) -> Stage:
        """Add a stage with a row-wise function; the arguments are those of `map`."""
        location = self.pipeline._location(name)
        udf, options = self._parse(location, fn, given)
        call, has_self = called_function(udf.target, udf.method)
        result: RowResult = "values" if isinstance(cardinality, Children) else "value"
        result = "bool" if cardinality == "filter" else result
        declared, output = _result_schema(location, name, udf, call, result, schema, output_column)
        if output in self.pipeline._key_columns(self._node):
            raise DefinitionError(
                f"{location}: the result would have the column {output!r}, which is an id; give "
                "output_column another name"
            )
        inputs = columns if isinstance(columns, Mapping) else None
        by_row = row_call(
            location,
            call,
            None if inputs is None else mapping(location, "columns", inputs),
            udf.kwargs,
            output,
            result,
            has_self,
        )
        is_batch = "is_batch" in udf.options
        contract: DeclaredCall = columns_call(location, call, by_row) if is_batch else by_row
        read = list_of_names(location, "columns", columns) if inputs is None else None
        if by_row.inputs is not None:
            if read is not None:
                raise DefinitionError(
                    f"{location}: a list of columns is only for a function of the whole row; this "
                    f"one reads {names(column for _, column in by_row.inputs)}. To set the column "
                    'of a parameter, write columns={"parameter": "column"}'
                )
            read = tuple(dict.fromkeys(column for _, column in by_row.inputs))
        if contract.by_row and batch_size is not None:
            raise DefinitionError(
                f"{location}: {kind} takes no batch_size: it calls {udf.name} for each "
                "row. For batches, use map_batches"
            )
        return self._add_udf_stage(
            kind, name, udf, options, contract, declared, read, cardinality, batch_size
        )

    def _add_udf_stage(
        self,
        kind: str,
        name: str,
        udf: Udf,
        options: StageOptions,
        contract: DeclaredCall,
        schema: pa.Schema | None,
        columns: tuple[str, ...] | None,
        cardinality: Literal["one_to_one", "filter"] | Children,
        batch_size: int | Literal["auto"] | None,
    ) -> Stage:
        """Add a stage that calls a user's code."""
        location, declared = self.pipeline._location(name), udf.options
        udf = replace(udf, version=options.reuse.version)
        check_calls(location, udf, contract)
        if schema is None and isinstance(contract, ColumnsCall):
            raise DefinitionError(
                f"{location}: {udf.name} receives an array for each column, but schema={INFER!r} "
                "is only for functions of batches or rows. Declare the result, for example "
                '@vd.method.batch(return_dtype="VARCHAR") or schema="VARCHAR"'
            )
        gpus = declared.get("gpus", 0) or 0 if options.gpus is None else options.gpus
        if gpus and not udf.stateful:
            raise DefinitionError(
                f"{location}: gpus={gpus} for the function {udf.name}, which would load its model "
                "for each batch; write a class that loads the model in __init__"
            )
        batch_size = declared.get("batch_size") if batch_size is None else batch_size
        auto = batch_size == AUTO
        on_error, retries = ON_ERROR[declared.get("on_error")], declared.get("max_retries")
        check_local_files(location, udf.local_files, made_later=bool(options.asset.deps))
        refuse_for_prompts(location, options.failures)
        children = cardinality if isinstance(cardinality, Children) else None
        spec = MapBatchesSpec(
            name=name,
            upstream=(self._node,),
            asset=options.asset,
            kind=kind,
            udf=udf,
            schema=pa.schema([]) if schema is None else schema,
            is_inferred=schema is None,
            columns=columns,
            contract=contract,
            batch_size=None if auto else positive(location, "batch_size", batch_size),
            auto_batch=auto,
            cardinality="zero_to_many" if isinstance(cardinality, Children) else cardinality,
            children=children,
            workers=udf.workers(location, gpus, options.workers, _IN_FLIGHT),
            gpus=gpus,
            failures=options.failures._resolved(on_error, 3 if retries is None else retries),
            reuse=options.reuse,
            include=options.include,
        )
        return self.pipeline._add_udf(spec)


def _declared_type(kind: Any) -> pa.DataType:
    return sql_type(kind) if isinstance(kind, str) else arrow_type(kind)


def _result_schema(
    location: str,
    name: str,
    udf: Udf,
    call: Any,
    result: RowResult,
    schema: Any,
    output_column: str | None,
) -> tuple[pa.Schema | None, str | None]:
    """Return the columns that a row-wise function makes, and the one that its result is.

    The schema is None if it is inferred; a single value then is in the column of the stage's name.
    """
    if result == "bool":
        return pa.schema([]), None
    if _is_inferred(schema):
        return None, output_column
    declared = udf.options.get("return_dtype") if schema is None else schema
    where = f"{'return_dtype' if schema is None else 'schema'} is {declared!r}:"
    kind: pa.DataType  # a struct of the columns, if there are several
    unnests = schema is None and bool(udf.options.get("unnest"))
    are_several = unnests or isinstance(declared, (pa.Schema, Mapping))
    try:
        if isinstance(declared, pa.Schema):
            kind = pa.struct(list(declared))
        elif isinstance(declared, Mapping):
            kind = pa.struct([(column, _declared_type(each)) for column, each in declared.items()])
        elif declared is not None:
            kind = _declared_type(declared)
        else:
            where, returned = f"{qualname(call)} returns", hints(unwrapped(call)).get("return")
            if result == "values" or is_stream(returned):
                returned = element_of(returned)
            if returned is None:
                raise DefinitionError(
                    f"{location}: the result's type is unknown; annotate the result of "
                    f"{qualname(call)}, "
                    'or declare it: schema="VARCHAR" or schema={"label": "VARCHAR", '
                    '"score": "DOUBLE"}; schema="infer" infers it from the first rows'
                )
            are_several, kind = unnests or has_fields(returned), arrow_type(returned)
    except (SchemaError, duckdb.Error) as error:
        raise SchemaError(f"{location}: {where} {error}") from None
    if are_several and not pa.types.is_struct(kind):
        raise DefinitionError(
            f"{location}: unnest=True makes columns of the fields of a struct, but "
            f"return_dtype is {kind}"
        )
    if are_several and (output_column is None or [f.name for f in kind] == [output_column]):
        return parse_schema(pa.schema(list(kind)), location), None
    output = output_column or name
    return parse_schema({output: kind}, location), output


def _is_inferred(schema: Any) -> bool:
    return isinstance(schema, str) and schema == INFER


def _tensor_shapes(location: str, shapes: Any, inputs: int) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shape of each input, None for a scalar; empty if no input has one."""
    listed: Sequence[Any] = shapes or ()
    if isinstance(shapes, Mapping):
        listed = [*map(shapes.get, sorted({*range(inputs), *shapes}))]
    is_stacked = len(listed) == 1 and math.prod(listed[0] or ()) == inputs
    if listed and len(listed) != inputs and not is_stacked:
        raise DefinitionError(
            f"{location}: input_tensor_shapes is {shapes!r} for {inputs} inputs; give each input "
            "the sizes of its shape, without the batch dimension, and None for a scalar "
            f"column, by position or from 0 to {inputs - 1}; or [[{inputs}]] for a predict "
            "function with one parameter, which gets all inputs as one array"
        )
    return tuple(tuple(shape) if shape else None for shape in listed)
