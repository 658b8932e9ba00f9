"""Adopts an edit that changes no result: stored rows stay in force under the new definition."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vane_dagster._arguments import positive
from vane_dagster._home import user_name
from vane_dagster._secrets import errors_masked
from vane_dagster._texts import listed
from vane_dagster.checks.base import bound
from vane_dagster.checks.comparison import Difference, compare, described
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.inference import pinned
from vane_dagster.errors import DefinitionError, PlanError, SchemaError
from vane_dagster.orchestration.partition_order import partition_keys
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import RunContext, recomputed
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.causes import changed
from vane_dagster.planning.definition import components, definition_digest
from vane_dagster.planning.sample_plan import plan_sample, spread
from vane_dagster.storage.adoptions import (
    Adoption,
    Adoptions,
    adoptions,
    keep_adoption,
    undo_adoptions,
)
from vane_dagster.storage.manifest import Component, Manifest
from vane_dagster.storage.reader import find_all

_ADOPTABLE = ("code", "value", "argument")
_OPTIONS = ("messages", "model", "provider", "provider_options", "sampling_params", "return_format")
_REQUEST = {f"option {name!r}" for name in _OPTIONS}
"""The options of a provider's model that change its answers, but not which rows there are."""
_SHOWN = 5
_VARY = (
    "\nA model may answer a question differently each time. If the stored answers are as good as "
    "new ones, adopt the edit without a comparison: --sample 0, or rows=0"
)


def adopt(
    pipeline: Pipeline,
    stage: str,
    rows: int | None,
    tolerance: float,
    partitions: Any,
    undo: bool,
    store: Any,
    compute: Any,
) -> Adoption:
    """Implement `Stage.adopt`."""
    location = f"stage '{pipeline.name}/{stage}': adopt"
    if rows is not None:
        positive(location, "rows", rows, least=0)
    keys = None if partitions is None else partition_keys(pipeline, partitions, location)
    opened = open_store(store, location)
    run = RunContext(opened, f"adopt-{secrets.token_hex(4)}", CheckRunner(pipeline, opened))
    compute = LocalCompute() if compute is None else compute
    with errors_masked():
        edit = _Edit.of(pipeline, stage, run, compute, tolerance)
        if undo:
            return edit.undo()
        if (adoption := edit.adopt(rows, keys)) is None:
            raise PlanError(
                f"{location}: nothing to adopt: all stored partitions have the current definition"
            )
        return adoption


def adopt_first(
    run: RunContext, pipeline: Pipeline, compute: Any, options: RunOptions
) -> Sequence[Adoption]:
    """Adopt edits of some stages before a run, upstream first; return what was not adopted yet."""
    named = {pipeline[name].name for name in options.adopt}
    wanted = [stage.name for stage in pipeline if stage.name in named]
    edits = (_Edit.of(pipeline, name, run, compute, options.adopt_tolerance) for name in wanted)
    made = (edit.adopt(options.adopt_rows) for edit in edits)
    return [adoption for adoption in made if adoption is not None]


@dataclass(frozen=True)
class _Edit:
    """The present definition of a stage, beside those of its stored results."""

    pipeline: Pipeline
    stage: str
    run: RunContext
    compute: Any
    tolerance: float
    now: Sequence[Component]
    known: Mapping[str, Adoptions]

    @classmethod
    def of(
        cls, pipeline: Pipeline, stage: str, run: RunContext, compute: Any, tolerance: float
    ) -> _Edit:
        location = f"stage '{pipeline.name}/{stage}': adopt"
        if not pipeline[stage].spec.runs_udf:
            raise DefinitionError(
                f"{location}: only stages with a function or a model can be adopted; materialize it"
            )
        try:
            pipeline = pinned(pipeline, stage, run.store)
        except SchemaError as error:
            raise PlanError(f"{location}: declare its schema, which is inferred") from error
        now = components(pipeline, pipeline[stage].spec)
        known = adoptions(run.store, pipeline.name)
        return cls(pipeline, stage, run, compute, tolerance, now, known)

    @property
    def location(self) -> str:
        return f"stage '{self.pipeline.name}/{self.stage}': adopt"

    @property
    def definition(self) -> str:
        return definition_digest(self.now)

    def undo(self) -> Adoption:
        """Split the class of the present definition; return its latest adoption."""
        known = self.known[self.stage].of(self.definition)
        if not known:
            raise PlanError(
                f"{self.location}: nothing to undo: the current code was not adopted, or its "
                "adoption was undone"
            )
        undo_adoptions(self.run.store, self.pipeline.name, known, self.definition)
        return known[-1]

    def adopt(
        self, rows: int | None, partitions: Sequence[str | None] | None = None
    ) -> Adoption | None:
        """Adopt the edit if no row differs; None if nothing is stored of other definitions."""
        bound(self.location, "tolerance", self.tolerance)
        manifests = self._former()
        if not manifests:
            return None
        stored = max(manifests.values(), key=lambda each: each.committed_at)
        changes = [*changed(stored.components, self.now)]
        kinds = {str(each): each.kind for each in (*stored.components, *self.now)}
        # Other edits decide about rows which a sample may not have.
        if others := [c for c in changes if kinds[c] not in _ADOPTABLE and c not in _REQUEST]:
            raise PlanError(
                f"{self.location}: {listed(others)} changed. Only edits of code, of its "
                f"arguments, and of the {', '.join(_OPTIONS[:-1])} and {_OPTIONS[-1]} of a prompt "
                "can be adopted. Materialize the stage"
            )
        made = self.pipeline[self.stage].spec.made_schema(self.pipeline)
        if any(stored.schema.field(each.name).type != each.type for each in made or ()):
            raise PlanError(
                f"{self.location}: its types changed, so it cannot be adopted; materialize it"
            )
        total = sum(part.rows_in for each in manifests.values() for part in each.parts)
        if partitions is not None:
            manifests = {key: each for key, each in manifests.items() if key in partitions}
        weights = {k: sum(part.rows_in for part in m.parts) for k, m in manifests.items()}
        seed = secrets.randbits(32)
        counts = spread(weights, rows, seed)
        compared = self._compare(manifests, counts, seed) if counts else 0
        if not compared and rows != 0:
            raise PlanError(
                f"{self.location}: there is no stored row to compare with; materialize it"
            )
        adoption = Adoption(
            stage=self.stage,
            definition=self.definition,
            stored=stored.definition,
            components=self.now,
            stored_components=stored.components,
            changes=changes,
            rows=compared,
            is_all=compared >= total,
            partitions=len(counts),
            tolerance=self.tolerance,
            seed=seed,
            user=user_name(),
            at=time.time_ns(),
        )
        keep_adoption(self.run.store, self.pipeline.name, adoption)
        return adoption

    def _former(self) -> Mapping[str | None, Manifest]:
        """Return the partitions of the latest stored definition that does not count as this one."""
        path = self.pipeline[self.stage].key.path
        of, manifests = self.known[self.stage], find_all(self.run.store, path, None)
        others = {
            k: m for k, m in manifests.items() if m.definition not in of.equals(self.definition)
        }
        # Some rows of an older partition may have a definition that was split off since.
        whole = {k: m for k, m in others.items() if {*of.undone_names} <= {*m.undone}}
        if others and not whole:
            raise PlanError(
                f"{self.location}: the stored results are older than the undoing of an adoption, "
                "so some may have rows of both versions. Materialize the stage, which computes the "
                "rows that the current code has not computed. To adopt it again instead, "
                "materialize the stage with the former code first"
            )
        latest = max(whole.values(), key=lambda each: each.committed_at, default=None)
        former = of.equals(latest.definition) if latest else ()
        return {key: each for key, each in whole.items() if each.definition in former}

    def _compare(
        self,
        manifests: Mapping[str | None, Manifest],
        counts: Mapping[str | None, int],
        seed: int,
    ) -> int:
        """Compute some stored rows again; return their number, or raise if one differs."""
        store, stage = self.run.store, self.stage
        chosen = {key: manifests[key] for key in counts}
        largest = max(counts.values())
        sample = plan_sample(self.pipeline, stage, chosen, store, counts, seed, largest)
        for error in sample.plan.failed.values():
            raise error
        plan = replace(sample.plan, components={stage: self.now})  # an edit is then an error
        differences: list[Difference] = []
        compared = 0
        with recomputed(self.run, replace(sample, plan=plan), self.compute) as read:
            for each in (rows for key in chosen for rows in read(key)):
                ids = [id for id in each.ids if id not in each.stored.failed]  # others have results
                compared += len(ids)
                differences += compare(each.stored, each.computed, ids, None, self.tolerance)
        if differences:
            shown = [
                f"{each.id}, {each.column}: {each.before} is stored, now {each.now}"
                for each in differences
            ]
            raise PlanError(
                f"{self.location}: nothing was adopted: "
                f"{described(differences, compared, 'stored rows')}:\n  "
                + listed(shown, _SHOWN, "\n  ")
                + _VARY * (self.pipeline[stage].spec.usage is not None)
            )
        return compared
