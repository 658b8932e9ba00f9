"""Helpers for the results of Dagster runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg

Run = Callable[..., dg.ExecuteInProcessResult]


def metadata(result: dg.ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    """Return metadata of the materialization of a stage, as plain values."""
    found = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.materialization.asset_key.path[-1] == stage
    ]
    assert len(found) == 1, f"{len(found)} materializations of {stage}"
    return {name: value.value for name, value in found[0].metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> str:
    """Return the description of the failed step's error."""
    assert not result.success
    data = next(event.step_failure_data for event in result.all_events if event.is_step_failure)
    description = data.user_failure_data.description if data.user_failure_data else None
    return description or str(data.error)
