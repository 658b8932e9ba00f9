"""Parts with the records of a run."""

from __future__ import annotations

from typing import Any

import dagster as dg

from vane_dagster.storage.manifest import PartInfo, PartProvenance


def table(evaluation: dg.AssetCheckEvaluation) -> list[dict[str, Any]]:
    return [dict(record.data) for record in evaluation.metadata["differences"].records]


def value(evaluation: dg.AssetCheckEvaluation, name: str) -> Any:
    return evaluation.metadata[name].value


# Versions of packages


def part(run_id: str, *packages: str) -> PartInfo:
    made = PartProvenance(run_id, ("w",), 1.0, 2.0, packages)
    return PartInfo("0" * 40, "1" * 16, 1, 1, rows_in=1, made=made)
