"""A cluster that grows: the keeper's requests to the autoscaler, and what it knows of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vane_dagster.compute import autoscaler
from vane_dagster.compute.admission import Bundle, fits
from vane_dagster.compute.api import NodeType
from vane_dagster.compute.demand import Demand, Verdict, listed
from vane_dagster.compute.pool_state import Books

_LOOK_SECONDS = 0.25
_VERDICT_SECONDS = 45.0


class Growth:
    """Asks the autoscaler for what leases wait for, and takes the request back.

    Nothing is asked while the nodes that are there suffice.

    Args:
        books: The keeper's books.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._demand = Demand()
        self._wanted: list[Bundle] = []
        self._autoscaler = autoscaler.of_cluster()
        self._lock = asyncio.Lock()

    def kinds(self) -> tuple[NodeType, ...] | None:
        """See `Capacity.growth`."""
        return self._autoscaler.growth()

    def step(self, nodes: Mapping[str, Bundle]) -> None:
        """Brings what is asked for in line with what waits."""
        if self._lock.locked():
            return
        if not self._books.queue or self.kinds() == ():
            self._demand, self._wanted = Demand(), []
        else:
            seen = Verdict.UNSEEN
            if self._wanted and self._wanted == self._autoscaler.asked:
                seen = self._autoscaler.verdict(list(nodes.values()))
            self._wanted = self._demand.step(self._books, nodes, time.monotonic(), seen)
        self._autoscaler.ask(self._wanted)

    async def beyond(
        self, bundles: Sequence[Bundle], nodes: Callable[[], Mapping[str, Bundle]]
    ) -> str | None:
        """Why the cluster can never hold some bundles together; None if it does, or will.

        It asks for them alone: the nodes that others use count as if they were free.
        """
        until = time.monotonic() + _VERDICT_SECONDS
        async with self._lock:
            if fits(list(nodes().values()), bundles) or time.monotonic() > until:
                return None  # too many ask; the lease finds out
            self._autoscaler.ask(bundles)
            while (seen := self._autoscaler.verdict(list(nodes().values()))) is Verdict.UNSEEN:
                if time.monotonic() > until:
                    return f"its autoscaler has not answered for {_VERDICT_SECONDS:g} s"
                await asyncio.sleep(_LOOK_SECONDS)
        return "its autoscaler has no nodes to add for that" if seen is Verdict.BEYOND else None

    def told(self, id: str) -> dict[str, Any]:
        """What a request that waits is to know: what was asked for it, and whether in vain."""
        asked = ""
        if id in self._demand.asked_for():
            asked = listed(self._autoscaler.asked)
            if doing := self._autoscaler.under_way():
                asked += f" ({doing})"
        return {"asked": asked, "hopeless": id in self._demand.hopeless}
