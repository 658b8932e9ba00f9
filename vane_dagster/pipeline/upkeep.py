"""What a stage says of its workers' lives: how long they may start, and when they are made anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vane_dagster._arguments import positive, seconds

STARTUP_SECONDS = 1800.0
"""How long a model may take to be constructed where a stage says nothing of it."""


@dataclass(frozen=True)
class Upkeep:
    """When a worker is given up, or made anew.

    Attributes:
        startup_timeout_s: Seconds that the construction of its model may take.
        max_batches: Batches after which it is replaced.
        max_rss: Bytes of memory of its own after which it is replaced.
    """

    startup_timeout_s: float = STARTUP_SECONDS
    max_batches: int | None = None
    max_rss: int | None = None


def parse_upkeep(
    culprit: str, startup_timeout_s: Any, max_batches_per_actor: Any, max_rss: Any
) -> Upkeep:
    """Validates the arguments.

    Raises:
        DefinitionError: If one does not fit.
    """
    return Upkeep(
        seconds(culprit, "startup_timeout_s", startup_timeout_s) or STARTUP_SECONDS,
        positive(culprit, "max_batches_per_actor", max_batches_per_actor),
        positive(culprit, "max_rss", max_rss),
    )
