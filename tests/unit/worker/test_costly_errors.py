"""What failed rows took is counted, whatever raised it."""

from __future__ import annotations

from types import MappingProxyType

import pyarrow as pa

from vane_dagster.errors import CostlyError
from vane_dagster.retries import Policy
from vane_dagster.worker.retry import Partial, attempt


class Refused(CostlyError):
    used = MappingProxyType({"calls": 3})


def test_errors_that_cost_something_are_added_up():
    batch = pa.table({"id": [1, 2, 3]})
    tried = attempt(batch, Policy("quarantine"), "id", max_faults=2)
    next(tried)
    errors = {1: Refused("no"), 2: ValueError("no")}
    try:
        tried.send(Partial(batch.slice(0, 1), errors, {"calls": 2, "tokens": 1}))
    except StopIteration as stopped:
        outcome = stopped.value
    assert outcome.wasted == {"calls": 5, "tokens": 1}
    assert len(outcome.faults) == 2
