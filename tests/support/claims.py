"""Claims of several runs in one table, without a pool manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, Claims, ClaimTable


class TableClaims(Claims):
    """Claims that expire 30 s after the last call of their run."""

    def __init__(
        self, table: ClaimTable, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table, self._run_id, self._clock = table, run_id, clock

    def ask(
        self, wanted: Sequence[Sequence[str]], release: Sequence[str] = (), age: float = 0.0
    ) -> Sequence[ClaimAnswer]:
        self._table.expire(self._clock())
        request = ClaimRequest(self._run_id, self._run_id, 30.0, wanted, release, age)
        return self._table.ask(request, self._clock())

    def close(self) -> None:
        self._table.end(self._run_id, self._clock())
