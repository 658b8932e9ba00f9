"""Promotion as `vane-dagster store promote` does it."""

from __future__ import annotations

from vane_dagster import FragmentStore
from vane_dagster.storage.promotion import Promoted, Promotion


def promote(branch: FragmentStore, target: FragmentStore, pipeline: str) -> list[Promoted]:
    """Promote a pipeline of a branch."""
    return [*Promotion(branch.open(), target.open(), pipeline).carry_out()]
