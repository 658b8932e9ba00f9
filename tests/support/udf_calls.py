"""Calls of users' functions as in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster.engine.tasks import operation
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.retry import BatchError
from vane_dagster.worker.udf_caller import UdfCaller

IDS = pa.table({"id": [1, 2, 3], "n": [10, 20, 30]})


def call(
    fn: Any, schema: Any, table: pa.Table = IDS, batch_format: Any = "pyarrow", **options: Any
) -> pa.Table:
    """Return a worker's output for a table, with everything but the process around it."""
    stage = row_stage("map_batches", fn, schema=schema, batch_format=batch_format, **options)
    rows = run_stage(stage, table)
    assert rows.schema == stage.spec.output_schema(stage.pipeline, {"source": table.schema})
    return rows


def refused(fn: Any, schema: Any, *words: str, **given_: Any) -> str:
    with pytest.raises(vd.errors.UdfError) as raised:
        call(fn, schema, **given_)
    for word in ("stage 'docs/out', fragment 0", *words):
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
    begun: list[range] | None = None,
) -> Any:
    """Return a worker's output of a stage for the rows of the source; None if it was revoked.

    With a list for the places of its batches, the call is one that may end its worker.
    """
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
    caller = UdfCaller(ModelSpec("m", udf.stateful, b""), made if udf.stateful else udf.target)
    try:
        if begun is None:
            computed = caller.call(op, table, work, revoked)
        else:
            computed = caller.call(op, table, replace(work, alone="1"), revoked, begun.append)
    except BatchError as error:
        raise error.cause from None
    return None if computed.report.cancelled else computed.rows
