"""The results of stages that the pipeline no longer has, for stages that were renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from vane_dagster.errors import VaneError
from vane_dagster.events import Event, Noticed
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.store import Store


class RenamedStages:
    """Finds the manifest in force of a partition under the former name of a stage.

    Args:
        plan: The plan.
        store: The store.
        before: The partitions before one, in which a stage looks rows up, the nearest first.
        emit: Receives the manifests that could not be opened.
    """

    def __init__(
        self,
        plan: RunPlan,
        store: Store,
        before: Callable[[int, str], Sequence[str]],
        emit: Callable[[Event], None],
    ) -> None:
        self._plan, self._store, self._before, self._emit = plan, store, before, emit
        self.in_force = cache(self._in_force)
        self._dropped = cache(self._dropped_stages)

    def _in_force(self, to: str, key: str | None, known: frozenset[str]) -> Manifest | None:
        """Open the latest manifest of a partition of the stages that the pipeline no longer has.

        Of those with one of the row definitions: a stage that was renamed copies its rows.
        """
        found = [
            manifest
            for stage, latest in self._dropped(to, known)
            if (name := latest.get(key)) and (manifest := self._read(stage, key, name))
        ]
        alike = (each for each in found if each.row_definition in known)
        return max(alike, key=lambda each: each.committed_at, default=None)

    def _dropped_stages(
        self, to: str, known: frozenset[str]
    ) -> Sequence[tuple[str, Mapping[str | None, ManifestName]]]:
        """The manifests in force of stages that the pipeline no longer has, by partition.

        Of those whose first or last one has one of the row definitions.
        """
        store, name = self._store, self._plan.pipeline.name
        own = {each.name for each in self._plan.pipeline}
        keys = dict.fromkeys(
            key
            for index, each in enumerate(self._plan.partitions)
            for key in (each.key, *self._before(index, to))
        )
        found: list[tuple[str, Mapping[str | None, ManifestName]]] = []
        try:
            for stage in store.stages(name):
                latest = {} if stage in own else store.latest(name, stage, keys)
                ends = [*latest.items()][:: max(1, len(latest) - 1)]
                if any(
                    m and m.row_definition in known for m in (self._read(stage, *e) for e in ends)
                ):
                    found.append((stage, latest))
        except VaneError as error:
            self._emit(_unread(error))
        return found

    def _read(self, stage: str, key: str | None, name: ManifestName) -> Manifest | None:
        read = partial(self._store.read, self._plan.pipeline.name, stage, key, name)
        return opened(read, self._emit)


def opened(read: Callable[[], Manifest | None], emit: Callable[[Event], None]) -> Manifest | None:
    """Open a manifest in which rows are looked up; None if that fails, which is reported."""
    try:
        return read()
    except VaneError as error:
        emit(_unread(error))
        return None


def _unread(error: VaneError) -> Event:
    return Noticed(f"rows could not be looked up, so they are computed: {error}")
