"""Reads the manifests of finished stages, many at a time: the store may be remote."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Union

from vane_dagster.errors import StoreError
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.store import Store

_AHEAD = 64

_Place = tuple[str, Union[str, None], ManifestName]


class ReadAhead:
    """The manifests of a plan's finished stages, in the plan's order."""

    def __init__(self, store: Store, plan: RunPlan) -> None:
        self._store = store
        self._pipeline = plan.pipeline.name
        self._left = iter(
            [
                (stage, partition.key, stage_plan.done)
                for partition in plan.partitions
                for stage, stage_plan in partition.stages.items()
                if stage_plan.done
            ]
        )
        self._read: deque[tuple[str, str | None, Manifest | StoreError]] = deque()

    def next(self, stage: str, partition: str | None) -> Manifest:
        """Return the next manifest."""
        if not self._read:
            self._read.extend(in_threads(self._opened, list(islice(self._left, _AHEAD))))
        *expected, found = self._read.popleft()
        assert expected == [stage, partition]
        if isinstance(found, StoreError):
            raise found
        assert isinstance(found, Manifest)
        return found

    def _opened(self, place: _Place) -> tuple[str, str | None, Manifest | StoreError]:
        stage, partition, name = place
        try:
            return stage, partition, self._store.read(self._pipeline, stage, partition, name)
        except StoreError as error:
            return stage, partition, error
        except Exception as error:  # raised by a file system's driver
            failed = StoreError(
                f"the manifest of {self._pipeline}/{stage} cannot be read: {type(error).__name__}: "
                f"{error}"
            )
            failed.__cause__ = error
            return stage, partition, failed
