"""Promotion as `vane-dagster store promote` does it."""

from __future__ import annotations

from vane_dagster import FragmentStore
from vane_dagster.storage import promotion


def promote(branch: FragmentStore, target: FragmentStore, pipeline: str) -> None:
    """Promote a pipeline of a branch."""
    list(promotion.promote(branch.open(), target.open(), pipeline))
