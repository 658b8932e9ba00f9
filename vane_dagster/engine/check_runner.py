"""What a stage's checks find in a partition, and whether what lies below may be committed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from vane_dagster.checks.context import Subject
from vane_dagster.checks.runner import evaluate, verdicts
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.damage import verified
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.reader import places
from vane_dagster.storage.store import Store

_LOOKED_BACK = 64

Earlier = Callable[[str], Iterable[str]]
"""The partitions before one, the nearest first."""


def _nothing(partition: str) -> Iterable[str]:
    return ()


class Judge:
    """Evaluates the checks of a pipeline's stages.

    Args:
        pipeline: The pipeline.
        store: Where the rows are.
        earlier: Partitions before one, for checks that compare with the one before. Default: none
            are known.
        run_id: The run, whose own parts tell what its workers have.
    """

    def __init__(
        self, pipeline: Pipeline, store: Store, earlier: Earlier = _nothing, run_id: str = ""
    ) -> None:
        self._pipeline, self._store, self._earlier = pipeline, store, earlier
        self._run_id = run_id

    def results(self, manifest: Manifest) -> tuple[CheckResult, ...]:
        """What the checks of the manifest's stage find.

        Found before by a check that is still the same, it stands in the manifest and counts.
        """
        checks = self._pipeline.checks(manifest.stage)
        known = verdicts(checks, manifest)
        subject = Subject(
            manifest=manifest,
            id=self._pipeline[manifest.stage].id,
            dataset=lambda: self._dataset(manifest),
            previous=lambda: self._previous(manifest),
            run_id=self._run_id,
        )
        new = evaluate([check for check in checks if check.name not in known], subject)
        known |= {result.name: result for result in new}
        return tuple(known[check.name] for check in checks)

    def _previous(self, manifest: Manifest) -> tuple[str, Any] | None:
        """The nearest earlier partition that was materialized, and its rows."""
        if manifest.partition is None:
            return None
        keys = list(itertools.islice(self._earlier(manifest.partition), _LOOKED_BACK))
        found = self._store.latest(manifest.pipeline, manifest.stage, keys)
        for key in keys:
            if key in found:
                name = found[key]
                earlier = self._store.read(manifest.pipeline, manifest.stage, key, name)
                return key, self._dataset(earlier)
        return None

    def _dataset(self, manifest: Manifest) -> Any:
        import pyarrow.dataset as ds

        folder, names = places(self._store, manifest)
        if not names:
            return ds.dataset(manifest.schema.empty_table())
        files = [folder.file(name) for name in names]
        return ds.dataset(files, schema=manifest.schema, filesystem=folder.fs, format=verified())
