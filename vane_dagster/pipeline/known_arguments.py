"""Checks of the arguments of methods that add a stage."""

from __future__ import annotations

from typing import Any

from vane_dagster._keywords import F, full_signature, known_keywords
from vane_dagster.pipeline.records import RECORDS

_INFER = 'Declare the columns, such as schema={"label": "VARCHAR"}, or write schema="infer"'


def adds_stage(function: F) -> F:
    """Decorate a method that adds a stage so that it describes missing and unknown arguments."""
    taken = list(full_signature(function).parameters)
    fields = {
        field: f"write {argument}={record}({field}=...)"
        for argument, (record, listed) in RECORDS.items()
        if argument in taken
        for field in listed
        if field not in taken
    }
    provider = "; those of its provider go into model=vd.Model(..., options={...})"

    def where(rows: Any, *args: Any, **kwargs: Any) -> str:
        return f"{rows.pipeline._location(kwargs.get('name', next(iter(args), '?')))}: "

    return known_keywords(
        function.__name__,
        {"schema": _INFER, **fields},
        provider if "model" in taken else "",
        where,
    )(function)
