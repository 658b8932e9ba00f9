"""Rows of sources as runs list, divide and read them, each in a store of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, SourceTable
from vane_dagster.sources.base import ROW_ERROR, Source
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord
from vane_dagster.storage.store import Store

RULE = FragmentRule(1000)


def bound(source: Any, store: Store | None = None) -> Source:
    """The source as a run uses it, in a store of its own if it is bound to none."""
    is_bound = getattr(source, "store", None) and not store
    return source if is_bound else source.bind(store or Store(StoragePath(tempfile.mkdtemp())))


def listed(source: Any, partition: str | None = None) -> tuple[FileRecord, ...]:
    return source.required(source.list_files([partition], "here")[partition], partition, "here")


def split(
    source: Any,
    rule: FragmentRule = RULE,
    partition: str | None = None,
    store: Store | None = None,
) -> SourceTable:
    files = listed(source, partition)
    return bound(source, store).split(files, rule, "here", partition)


def read(
    source: Any,
    rule: FragmentRule = RULE,
    partition: str | None = None,
    store: Store | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The rows of all fragments, in order; verifies their counts."""
    source = bound(source, store)
    table = split(source, rule, partition, store)
    schema = table.schema if columns is None else pa.schema(map(table.schema.field, columns))
    parts = []
    for fragment in table.fragments:
        part = source.for_workers().read(fragment, schema, "here")
        assert part.num_rows == fragment.stop - fragment.start <= rule.rows
        parts.append(part)
    found = parts or [schema.empty_table()]
    return pa.concat_tables(found, promote_options="default")


def rows(source: Any, rule: FragmentRule = RULE) -> list[dict[str, Any]]:
    return read(source, rule).to_pylist()


def types(source: Any) -> dict[str, str]:
    schema = split(source).schema
    return dict(zip(schema.names, map(str, schema.types)))


def refusal(source: Any) -> str:
    with pytest.raises(vd.errors.SourceError) as caught:
        rows(source)
    return str(caught.value)


def misfits(source: Any) -> list[str]:
    """The errors of the rows with values that do not fit."""
    errors = [row.get(ROW_ERROR) for row in rows(source)]
    return [error["message"] for error in errors if error]
