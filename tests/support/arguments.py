"""Arguments of stages by the names of their records' fields, for tests that combine them freely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import vane_dagster as vd

_RECORDS: Mapping[str, Any] = {
    "concurrency": vd.Workers,
    "on_error": vd.Failures,
    "reuse": vd.Reuse,
    "asset": vd.Asset,
    "model": vd.Model,
}

_OF_FORMATS = ("catalog", "table")
"""Options of `write` for one format."""


def grouped(given: Mapping[str, Any]) -> dict[str, Any]:
    """Put fields of records into records: ``{"max_retries": 1}`` into ``vd.Failures``."""
    found = dict(given)
    for argument, record in _RECORDS.items():
        first, *others = [each.name for each in fields(record)]
        is_here = argument != "model" or "model" in found  # `write` has options too
        own = {name: found.pop(name) for name in others if is_here and name in found}
        if own:
            plain = {first: found.pop(argument)} if argument in found else {}
            found[argument] = record(**{**plain, **own})
    if own := {name: found.pop(name) for name in _OF_FORMATS if name in found}:
        found["options"] = own
    return found
