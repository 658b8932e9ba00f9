"""Prefetches the manifests of finished stages before they are reported: the store may be remote."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Union

from vane_dagster.errors import StoreError
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import IO_THREADS
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.store import Store

_AHEAD = 64

_Place = tuple[str, Union[str, None], ManifestName]


class ReadAhead:
    """Prefetches the manifests of a plan's finished stages."""

    def __init__(self, store: Store, plan: RunPlan) -> None:
        self._store = store
        self._pipeline = plan.pipeline.name
        self._threads = ThreadPoolExecutor(max_workers=IO_THREADS, thread_name_prefix="vane-read")
        self._left: Iterator[_Place] = iter(
            [
                (stage, partition.key, stage_plan.done)
                for partition in plan.partitions
                for stage, stage_plan in partition.stages.items()
                if stage_plan.done
            ]
        )
        self._reading: deque[tuple[str, str | None, Future[Manifest]]] = deque()

    def next(self, stage: str, partition: str | None) -> Manifest:
        """Return the next manifest in the plan's order."""
        while len(self._reading) < _AHEAD and (place := next(self._left, None)):
            self._reading.append((*place[:2], self._threads.submit(self._read, *place)))
        *expected, future = self._reading.popleft()
        assert expected == [stage, partition]
        try:
            return future.result()
        except StoreError:
            raise
        except Exception as error:  # raised by a file system's driver
            raise StoreError(
                f"the manifest of {self._pipeline}/{stage} cannot be read: {type(error).__name__}: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, stage: str, partition: str | None, name: ManifestName) -> Manifest:
        return self._store.read(self._pipeline, stage, partition, name)
