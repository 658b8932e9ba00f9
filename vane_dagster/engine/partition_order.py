"""The order of a pipeline's partitions, as a run asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class PartitionOrder(Protocol):
    """The partitions of a pipeline in order. Called from several threads."""

    def before(self, partition: str) -> Iterable[str]:
        """Return the partitions before one, the nearest first."""


class NoOrder:
    """An order in which no partition precedes another."""

    def before(self, partition: str) -> Iterable[str]:
        """See `PartitionOrder`."""
        return ()
