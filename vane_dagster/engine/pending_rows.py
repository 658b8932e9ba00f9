"""Fragments with rows that wait for the answers of batches, and the submission of these batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vane_dagster.engine.stage_batches import StageBatches, stage_batches
from vane_dagster.errors import BudgetError, VaneError
from vane_dagster.events import Event, Submitted
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.batch_records import ProviderBatch, Recorded
from vane_dagster.storage.store import Store


class PendingRows:
    """The fragments of a run that wait for answers.

    A partition of a stage with such a fragment is not committed by this run, nor are the selected
    stages downstream of it. Nor has it failed: `submit` puts its requests into batches.

    Attributes:
        batches: The batches of each stage to compute that uses them.
    """

    def __init__(
        self, plan: RunPlan, store: Store, run_id: str, emit: Callable[[Event], None]
    ) -> None:
        self._plan, self._store, self._run_id, self._emit = plan, store, run_id, emit
        self._fragments: dict[tuple[int, str], set[int]] = {}
        self._asked: dict[str, dict[int, list[str]]] = {}
        self.batches: dict[str, StageBatches] = {}

    def refresh(self, stages: Sequence[str]) -> dict[str, VaneError]:
        """Look at the batches in flight of some stages; return the errors of those that fail."""
        failed: dict[str, VaneError] = {}
        asked = () if self._plan.is_sample else stages
        for batches in stage_batches(self._plan.pipeline, self._store, asked):
            self.batches[batches.stage] = batches
            try:
                batches.refresh()
            except VaneError as error:
                failed[batches.stage] = error
        return failed

    def add(self, index: int, stage: str, fragment: int, recorded: Sequence[Recorded]) -> set[str]:
        """Record that a fragment waits; return the stages that cannot be computed for it."""
        asked = self._asked.setdefault(stage, {}).setdefault(index, [])
        asked += [each.name for each in recorded if each.name]
        waiting = self._plan.with_downstream(stage)
        for name in waiting:
            self._fragments.setdefault((index, name), set()).add(fragment)
        return waiting

    def __contains__(self, place: tuple[int, str]) -> bool:
        """Whether a stage waits in a partition, given by its index."""
        return place in self._fragments

    def has(self, index: int, stage: str, fragment: int) -> bool:
        """Whether a stage waits for a fragment."""
        return fragment in self._fragments.get((index, stage), ())

    def submit(
        self, failed: Mapping[tuple[int, str], VaneError]
    ) -> dict[tuple[int, str], VaneError]:
        """Submit what workers have recorded; return the errors of partitions without batches.

        The requests of partitions that have failed are left out, unless a budget is the reason.
        """
        plan, refused = self._plan, dict[tuple[int, str], VaneError]()
        keys = [partition.key for partition in plan.partitions]
        stages = tuple(s for s in plan.selected if any(name == s for _, name in self._fragments))
        for stage, asked in self._asked.items():
            batches = self.batches[stage]
            wanted = {
                keys[i]: names
                for i, names in asked.items()
                if isinstance(failed.get((i, stage)), (BudgetError, type(None)))
            }
            record = ProviderBatch(
                batches.model,
                0.0,
                self._run_id,
                0,
                (),
                stages,
                plan.forced,
                plan.retried,
            )
            lost = batches.submit(wanted, record, self._emit)
            refused |= {(i, stage): lost[keys[i]] for i in asked if keys[i] in lost}
        for index, stage in self._fragments:
            above = [
                s for s in self._asked
                if index in self._asked[s] and stage in plan.with_downstream(s)
            ]  # fmt: skip
            if (index, stage) in failed or any((index, s) in refused for s in above):
                continue
            expected = max(self.batches[s].expected(keys[index]) for s in above)
            because = None if stage in above else above[0]
            self._emit(Submitted(stage, keys[index], expected, because))
        return refused
