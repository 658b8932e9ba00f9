"""Rows of sources whose files are converted into a store, each in a store of its own."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, ReadContext, SourceTable
from vane_dagster.sources.base import ROW_ERROR, Source
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

CONTEXT = ReadContext("here")
RULE = FragmentRule(1000)


def bound(source: Any) -> Source:
    """The source as a run uses it, unless it is bound to a store."""
    is_bound = getattr(source, "root", None)
    return source if is_bound else source.bind(Store(Location(tempfile.mkdtemp())))


def split(source: Any, rule: FragmentRule = RULE) -> SourceTable:
    source = bound(source)
    files = source.required(source.list_files([None], "here")[None], None, "here")
    return source.split(files, rule, "here")


def rows(source: Any, rule: FragmentRule = RULE) -> list[dict[str, Any]]:
    """The rows of all fragments, in order; verifies their counts."""
    source = bound(source)
    table = split(source, rule)
    found: list[dict[str, Any]] = []
    for fragment in table.fragments:
        read = source.for_workers().read(fragment, table.schema, CONTEXT)
        assert read.num_rows == fragment.stop - fragment.start <= rule.rows
        found += read.to_pylist()
    return found


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
