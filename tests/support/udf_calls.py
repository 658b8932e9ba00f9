"""Calls of users' functions as in a worker."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.pipeline.udf import make_udf
from vane_dagster.types.schema import parse_schema
from vane_dagster.worker.protocol import CallUdf, ModelSpec, Work
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
    declared = parse_schema(schema, "here")
    if "id" not in declared.names:
        declared = pa.schema([table.schema.field("id"), *declared])
    arguments = cloudpickle.dumps(((), kwargs))
    op = CallUdf(
        arguments, columns, batch_format, batch_size, cardinality, max_concurrency, ("id",)
    )
    work = Work("stage 'docs/m', fragment 0", op, (), declared, "id", None, True)
    caller = UdfCaller(
        ModelSpec("m", udf.stateful, udf.style, "", b""), fn() if udf.stateful else fn
    )
    try:
        computed = caller.call(op, table, work, lambda: False)
    except BatchError as error:
        raise error.cause from None
    assert not computed.cancelled
    assert computed.rows.schema == declared
    return computed.rows


def refused(fn: Any, schema: Any, *words: str, **given_: Any) -> str:
    with pytest.raises(vd.UdfError) as raised:
        call(fn, schema, **given_)
    for word in ("stage 'docs/m', fragment 0", *words):
        assert word in str(raised.value)
    return str(raised.value)
