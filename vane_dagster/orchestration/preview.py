"""Some rows of a stage, computed without a run, and not stored."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster._private_folder import temporary_folder
from vane_dagster._secrets import errors_masked
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.fragment_state import input_id
from vane_dagster.engine.inference import FirstRows, SchemaInference, calls_models
from vane_dagster.engine.kept_instances import with_kept_instances
from vane_dagster.errors import DefinitionError, VaneError, names
from vane_dagster.events import Event, Noticed, WorkerReady
from vane_dagster.orchestration.partition_order import partition_keys
from vane_dagster.orchestration.progress import PRINTED, log_text
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import Compute, LocalCompute
from vane_dagster.orchestration.run import Connection, RunContext, execute_preview
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.preview import FailedRow, Preview, StageCost
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.planning.definition import superseded
from vane_dagster.planning.forecast import rows_computed, tokens_of
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.sources.file import url_of
from vane_dagster.sources.raw_files import PATH
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store
from vane_dagster.types.sql import quote, referenced_columns

_INPUT = "input of {}"
"""The name of the stage that chooses the rows which a previewed stage reads."""


@contextlib.contextmanager
def previewing(
    pipeline: Pipeline,
    selected: Collection[str],
    partitions: Sequence[str | None],
    store: Store,
    compute: Compute | None,
    show: Callable[[Event], None],
    keep: bool = False,
) -> Iterator[tuple[SchemaInference, Mapping[str, float]]]:
    """Connect to what computes previews of stages; delete what they wrote at the end.

    Yields the inference, and the seconds in which workers loaded models, by stage. `keep` allows
    instances of former code.
    """
    with ExitStack() as stack:
        connection = Connection(LocalCompute() if compute is None else compute, pipeline, selected)
        stack.callback(connection.close)
        run_id, loads = f"preview-{secrets.token_hex(4)}", dict[str, float]()
        show_once = functools.cache(show)

        def listen(event: Event) -> None:
            if isinstance(event, WorkerReady) and not (event.is_function or event.report.warm):
                loads.update(dict.fromkeys(event.stages, event.report.seconds))
            show(event)

        def run(plan: RunPlan) -> tuple[Mapping[str, Sequence[Part]], VaneError | None]:
            checks = CheckRunner(plan.pipeline, store)
            context = RunContext(store, run_id, checks, listen)
            backend = connection.backend()
            if keep:
                plan = with_kept_instances(plan, backend.running(), show_once)
            return execute_preview(context, plan, backend)

        inference = SchemaInference(
            store, run, run_id, show, selected, partitions, False, connection.connect
        )
        yield stack.enter_context(inference), loads


def preview(
    pipeline: Pipeline,
    stage: str,
    rows: int,
    partition: str | None,
    ids: Sequence[Any] | None,
    where: str | None,
    reload: bool,
    store: Any,
    compute: Compute | None,
) -> Preview:
    """Implement `Stage.preview`."""
    location = f"stage '{pipeline.name}/{stage}'"
    positive(location, "rows", rows)
    partitions = partition_keys(pipeline, partition, f"{location}: preview")
    if store is None and not isinstance(compute, (LocalCompute, type(None))):
        raise DefinitionError(
            f"{location}: preview: with a cluster as compute=, pass store= too, for the temporary "
            "results of its workers"
        )
    if pipeline[stage].spec.publishes:
        raise DefinitionError(f"{location}: preview: it publishes; preview the stage that it reads")
    asked = _Asked(location, pipeline, stage, rows, ids, where)
    with ExitStack() as stack:
        stack.enter_context(errors_masked())
        if store is None:
            opened = Store(StoragePath(str(stack.enter_context(temporary_folder("vane-preview-")))))
        else:
            opened = open_store(store, f"{location}: preview")
        show = functools.partial(_show, f"stage '{pipeline.name}/{_INPUT.format(stage)}'")
        selected = with_upstream(pipeline, stage) - {SOURCE} | {_INPUT.format(stage)}
        for text in superseded(pipeline, with_upstream(pipeline, stage) - {SOURCE}):
            show(Noticed(text))
        inference, loads = stack.enter_context(
            previewing(pipeline, selected, partitions, opened, compute, show, keep=not reload)
        )
        return asked.preview(inference, loads)


def _show(input: str, event: Event) -> None:
    """Print an event, except for those of the input: the preview shows which of its rows failed."""
    if not (isinstance(event, Noticed) and event.text.startswith(input)):
        log_text(PRINTED, event)


@dataclass
class _Asked:
    """A preview that was asked for."""

    location: str
    pipeline: Pipeline
    stage: str
    rows: int
    ids: Sequence[Any] | None
    where: str | None
    input: str = field(init=False)

    def __post_init__(self) -> None:
        self.input = _INPUT.format(self.stage)
        if isinstance(self.ids, str):
            raise DefinitionError(f"{self.location}: preview: ids is {self.ids!r}; expected a list")
        if self.ids is not None:
            self.ids = list(dict.fromkeys(map(str, self.ids)))
            self.rows = positive(self.location, "the number of ids", len(self.ids)) or 0
        if self.where is not None:
            referenced_columns(self.where, f"{self.location}: preview: where")

    def preview(self, inference: SchemaInference, loads: Mapping[str, float]) -> Preview:
        """Compute the preview."""
        pipeline = inference.resolve(self.pipeline)._isolating_rows()
        first: FirstRows | None
        if self.ids or self.where:
            first = self._chosen(inference, pipeline)
        else:
            reading = pipeline._with_input(self.stage, self.input, None)
            first = inference.first_rows(reading, self.stage, self.rows)
        if first is None:
            raise DefinitionError(f"{self.location}: preview: no row of the source reaches it")
        table = pa.concat_tables(first.tables).slice(0, self.rows)
        ids = [*self._input_ids(first)]
        id = input_id(first.plan.pipeline, self.stage)
        made = {*table.column(id).to_pylist()}  # with on_error="null" failed rows are among them
        failed = [f for f in self._failed(first) if f.stage != self.stage or f.id not in made]
        if self.ids or self.where:
            asked = {*(self.ids or map(str, ids))}
            failed = [each for each in failed if str(each.id) in asked]
        name = f"{pipeline.name}/{self.stage}"
        return Preview(
            name,
            table,
            failed[: self.rows],
            [*self._costs(first.plan.pipeline, inference.computed, loads)],
            ids,
            id,
        )

    def _chosen(self, inference: SchemaInference, pipeline: Pipeline) -> FirstRows:
        """Compute the stage for the first input rows that `ids` and `where` choose."""
        id = input_id(pipeline, self.stage)
        where = [f"({self.where})"] if self.where else []
        where += [_is_in(id, self.ids)] if self.ids else []
        filtering = pipeline._with_input(self.stage, self.input, " AND ".join(where))
        files = self._files(pipeline)
        read = inference.matching_rows(filtering, self.input, self.rows, files)
        chosen = [] if read is None else [*self._input_ids(read)][: self.rows]
        if read and self.ids:
            chosen += [each.id for each in self._failed(read) if str(each.id) in self.ids]
        if missing := set(self.ids or ()) - {str(each) for each in chosen}:
            asked = f"has no row with {names(sorted(missing))} in its id column {id!r}"
        elif not chosen:
            asked = "has no row"
        else:
            assert read is not None
            reading = pipeline._with_input(self.stage, self.input, _is_in(id, chosen))
            return inference.rows_of(reading, self.stage, read, files)
        asked += f" for which where={self.where!r} is true" * bool(self.where)
        if not files:
            asked += f", among {read.rows_in if read else 0:,} rows"
        if read is not None and calls_models(read.plan):
            asked += ". Stages upstream that are not stored are computed for some rows only"
        raise DefinitionError(f"{self.location}: preview: its input {asked}")

    def _files(self, pipeline: Pipeline) -> Collection[str]:
        """Return the URLs of the files that `ids` are; empty if ids are no paths."""
        base = pipeline[self.stage].spec.base_node(pipeline)
        keys, source = pipeline._key_columns(base), pipeline.source
        is_path = source.names_files and pipeline.id == PATH and not pipeline.id_rule
        return [*map(url_of, self.ids or ())] if is_path and len(keys) == 1 else ()

    def _input_ids(self, first: FirstRows) -> Iterator[Any]:
        for part in first.parts.get(self.input, ()):
            yield from read_part(part.folder, part.info.name).column(0).to_pylist()

    def _failed(self, first: FirstRows) -> Iterator[FailedRow]:
        for stage, parts in first.parts.items():
            for part in parts:
                if part.info.faults and stage in first.plan.needed():
                    columns = ["id", "error", "message"]
                    for row in read_part(part.folder, part.info.faults, columns).to_pylist():
                        shown = SOURCE if stage == self.input else stage
                        yield FailedRow(row["id"], shown, f"{row['error']}: {row['message']}")

    def _costs(
        self,
        pipeline: Pipeline,
        computed: Mapping[str, Sequence[Part]],
        loads: Mapping[str, float],
    ) -> Iterator[StageCost]:
        for stage in sorted(computed.keys() - {self.input}, key=[*pipeline.stages].index):
            usage, parts = pipeline[stage].spec.usage, [part.info for part in computed[stage]]
            used = [usage.used(part.spent) for part in parts] if usage else []
            yield StageCost(
                stage,
                rows_computed(parts),
                sum(part.made.seconds for part in parts if part.made),
                loads.get(stage),
                sum(map(tokens_of, used)) if usage else None,
                sum(map(usage.cost, used)) if usage and usage.prices else None,
            )


def _is_in(id: str, ids: Sequence[Any] | None) -> str:
    """Return an SQL condition on an id."""
    texts = ["'" + str(each).replace("'", "''") + "'" for each in ids or ()]
    return f"CAST({quote(id)} AS VARCHAR) IN ({', '.join(texts)})"
