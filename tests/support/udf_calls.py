"""Calls of users' functions as in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster.engine.tasks import operation
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.pipeline.udf import check_calls, make_udf
from vane_dagster.types.schema import parse_schema
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.retry import BatchError
from vane_dagster.worker.udf_caller import UdfCaller

IDS = pa.table({"id": [1, 2, 3], "n": [10, 20, 30]})


def call(
    fn: Any,
    schema: Any,
    table: pa.Table = IDS,
    batch_format: Any = "pyarrow",
    batch_size: int | None = None,
    cardinality: Any = "one_to_one",
    columns: tuple[str, ...] | None = None,
    max_concurrency: int = 16,
    **kwargs: Any,
) -> pa.Table:
    """Return a worker's output for a table, with everything but the process around it."""
    udf = make_udf("here", fn, kwargs=kwargs)
    contract = BatchCall(batch_format)
    check_calls("here", udf, contract)
    declared = parse_schema(schema, "here")
    if "id" not in declared.names:
        declared = pa.schema([table.schema.field("id"), *declared])
    arguments = cloudpickle.dumps(kwargs)
    made = tuple(parse_schema(schema, "here").names)
    op = CallUdf(
        arguments, columns, contract, batch_size, cardinality, max_concurrency, ("id",), made,
        style=udf.style,
    )  # fmt: skip
    work = Work("stage 'docs/m', fragment 0", op, (), declared, "id", None, True)
    caller = UdfCaller(ModelSpec("m", udf.stateful, "", b""), fn() if udf.stateful else fn)
    try:
        computed = caller.call(op, table, work, lambda: False)
    except BatchError as error:
        raise error.cause from None
    assert not computed.report.cancelled
    assert computed.rows.schema == declared
    return computed.rows


def refused(fn: Any, schema: Any, *words: str, **given_: Any) -> str:
    with pytest.raises(vd.errors.UdfError) as raised:
        call(fn, schema, **given_)
    for word in ("stage 'docs/m', fragment 0", *words):
        assert word in str(raised.value)
    return str(raised.value)


def row_stage(method: str, fn: Any, **options: Any) -> vd.Stage:
    """Return a stage named "out" that reads the source of a pipeline."""
    pipeline = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    stage: vd.Stage = getattr(pipeline, method)("out", fn, **grouped(options))
    return stage


def run_stage(
    stage: vd.Stage,
    table: pa.Table,
    revoked: Callable[[], bool] = lambda: False,
    retries: int | None = None,
) -> Any:
    """Return a worker's output of a stage for the rows of the source; None if it was revoked."""
    spec, pipeline = stage.spec, stage.pipeline
    assert spec.runs_udf
    op = operation(spec, pipeline)
    assert isinstance(op, CallUdf)
    policy = op.policy if retries is None else replace(op.policy, max_retries=retries)
    op = replace(op, policy=policy, max_faults=table.num_rows)
    schema = spec.output_schema(pipeline, {"source": table.schema})
    work = Work("stage 'docs/out', fragment 0", op, (), schema, stage.id, None, True)
    udf = spec.udf
    made = udf.target(*udf.constructor_args, **udf.constructor_kwargs) if udf.stateful else None
    caller = UdfCaller(ModelSpec("m", udf.stateful, "", b""), made if udf.stateful else udf.target)
    try:
        computed = caller.call(op, table, work, revoked)
    except BatchError as error:
        raise error.cause from None
    return None if computed.report.cancelled else computed.rows
