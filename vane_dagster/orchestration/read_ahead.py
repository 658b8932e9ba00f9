"""Reads the manifests of finished stages, many at a time, and evaluates their checks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.committer import BlockedError
from vane_dagster.errors import StoreError
from vane_dagster.events import Event, Failed, RunPlanned, Unchanged
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import CheckResult, Manifest, ManifestName
from vane_dagster.storage.store import Store

_AHEAD = 64


def with_manifests(
    store: Store, check_runner: CheckRunner, listen: Callable[[Event], None]
) -> Callable[[Event], None]:
    """Return a listener that passes events on, and adds the manifests of finished stages.

    The manifests have the results of today's checks. Finished stages downstream of a failed
    blocking check are withheld: their events are failures.
    """
    done: Iterator[Manifest | StoreError] = iter(())
    pipeline = check_runner.pipeline
    blocked: dict[tuple[str | None, str], tuple[str, CheckResult]] = {}

    def checked(event: Unchanged, manifest: Manifest) -> Event:
        stage, key = event.stage, event.partition
        for upstream in pipeline[stage].spec.upstream:
            if (key, upstream) in blocked:
                origin, failed = blocked[key, stage] = blocked[key, upstream]
                error = BlockedError(origin, failed, event.name)
                return Failed(stage, key, error, None if upstream == origin else upstream)
        results = check_runner.results(manifest)
        for failed in (result for result in results if result.blocks):
            blocked[key, stage] = stage, failed
        return replace(event, manifest=replace(manifest, checks=results))

    def listen_to(event: Event) -> None:
        nonlocal done
        if isinstance(event, RunPlanned):
            done = _read_ahead(store, event.plan)
        elif isinstance(event, Unchanged):
            opened = next(done)  # in the order of the plan, as these events
            if isinstance(opened, StoreError):
                event = Failed(event.stage, event.partition, opened)
            else:
                event = checked(event, opened)
        listen(event)

    return listen_to


def _read_ahead(store: Store, plan: RunPlan) -> Iterator[Manifest | StoreError]:
    """Yield the manifests of a plan's finished stages, or their errors, in the plan's order."""
    pipeline = plan.pipeline.name

    def opened(place: tuple[str, str | None, ManifestName]) -> Manifest | StoreError:
        try:
            return store.read(pipeline, *place)
        except StoreError as error:
            return error

    places = (
        (stage, partition.key, stage_plan.done)
        for partition in plan.partitions
        for stage, stage_plan in partition.stages.items()
        if stage_plan.done
    )
    while some := list(islice(places, _AHEAD)):
        yield from in_threads(opened, some)
