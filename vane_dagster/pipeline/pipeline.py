"""`Pipeline`: the DAG of stages that a user builds, call by call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import (
    list_of_names,
    mapping,
    one_of,
    positive,
    selection,
)
from vane_dagster.checks.base import Check
from vane_dagster.checks.reproducible import Reproducible
from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.columns import stage_checks
from vane_dagster.pipeline.keys import Key, Keys, stage_keys
from vane_dagster.pipeline.specs import (
    SOURCE,
    Children,
    JoinHow,
    JoinSpec,
    StageSpec,
    asset_options,
)
from vane_dagster.pipeline.stages import Rows
from vane_dagster.sources import Source, as_source

if TYPE_CHECKING:
    import dagster as dg

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Stage(Rows):
    """A stage of a pipeline, to which others can be added. Made by the methods of `Pipeline`."""

    def __init__(self, pipeline: Pipeline, spec: StageSpec) -> None:
        self.pipeline = pipeline
        self.spec = spec
        self._node = spec.name

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.spec.name

    @property
    def id(self) -> str:
        """The column that identifies the stage's rows."""
        return self.pipeline.keys(self.name)[0].column

    @property
    def key(self) -> dg.AssetKey:
        """Key of the stage's Dagster asset, for the deps of other assets."""
        import dagster as dg

        return dg.AssetKey([self.pipeline.name, self.name])

    def __repr__(self) -> str:
        return f"<Stage {self.pipeline.name}/{self.name} ({self.spec.kind})>"


class Pipeline(Rows):
    """A DAG of stages over one partitioned source, keyed by one id column.

    Args:
        name: First part of the stages' asset keys.
        source: Where the rows come from: `parquet` files, a stage of another pipeline, an ordinary
            asset whose rows are in the store, or `stored` with the key of one.
        id: A column that is unique and not null inside a partition; every stage keeps it.
        partitions_def: A Dagster partitions definition; none for an unpartitioned pipeline.
        backfill_policy: How Dagster cuts a backfill into runs. Default: one run for all
            partitions, which share their warm models.
        fragment_rows: Rows of a fragment, at most. Default: from the stages' batch sizes, decided
            in the first run and kept in the store.
        group_name: Dagster group of the stages that name none.
        pool: Dagster concurrency pool of the step.
        retry_policy: Dagster retry policy of the step.
        op_tags: Dagster tags of the step.

    Raises:
        DefinitionError: If an argument does not fit.
    """

    def __init__(
        self,
        name: str,
        *,
        source: Source | Stage | dg.AssetsDefinition | dg.AssetKey,
        id: str,
        partitions_def: dg.PartitionsDefinition[Any] | None = None,
        backfill_policy: dg.BackfillPolicy | None = None,
        fragment_rows: int | None = None,
        group_name: str | None = None,
        pool: str | None = None,
        retry_policy: dg.RetryPolicy | None = None,
        op_tags: Mapping[str, str] | None = None,
    ) -> None:
        culprit = f"pipeline {name!r}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DefinitionError(
                f"{culprit}: a name has letters, digits and '_', and does not begin with a digit"
            )
        source = as_source(culprit, source)
        if not isinstance(id, str) or not id:
            raise DefinitionError(f"{culprit}: id is {id!r}; expected the name of the id column")
        source.validate(culprit, partitions_def)
        self.name = name
        self.source: Source = source
        self.id = id
        self.partitions_def = partitions_def
        self.backfill_policy = backfill_policy
        self.fragment_rows: int | None = positive(culprit, "fragment_rows", fragment_rows)
        self.group_name = group_name
        self.pool = pool
        self.retry_policy = retry_policy
        self.op_tags = dict(op_tags or {})
        self.pipeline = self
        self._node = SOURCE
        self._stages: dict[str, Stage] = {}
        self._keys: dict[str, Keys] = {SOURCE: (Key(id, SOURCE),)}
        self._checks: dict[str, tuple[Check, ...]] = {}

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages by name, in the order in which they were added, upstream first."""
        return MappingProxyType(self._stages)

    def __getitem__(self, name: str) -> Stage:
        return self._stages[name]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {', '.join(self._stages) or 'no stages'}>"

    def keys(self, node: str) -> Keys:
        """The columns that identify the rows of a stage or the source, the id first."""
        return self._keys[node]

    def checks(self, stage: str) -> tuple[Check, ...]:
        """The checks of a stage that are evaluated when a partition is committed."""
        return tuple(check for check in self._checks[stage] if check.at_commit)

    def reproducible(self, stage: str) -> tuple[Reproducible, ...]:
        """The checks of a stage that compute rows again, whenever they are executed."""
        return tuple(check for check in self._checks[stage] if isinstance(check, Reproducible))

    def join(
        self,
        name: str,
        *stages: Stage,
        how: JoinHow = "inner",
        columns: Mapping[str, Sequence[str] | Mapping[str, str]] | None = None,
        source_columns: Sequence[str] = (),
        children: Children | None = None,
        **asset: Any,
    ) -> Stage:
        """Adds a stage that puts stages side by side by id, fragment by fragment, with no shuffle.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            *stages: Stages of this pipeline, two or more, or one with `source_columns`. Rows keep
                the order of the first.
            how: "inner" keeps rows that every stage has; "left" keeps the rows of the first, with
                nulls where another stage has none.
            columns: What to take of a stage, by its name: columns, or output column to column.
                Default: all. Columns of one name from two stages are refused, so rename them here.
            source_columns: Columns of the source to carry along.
            children: Where a stage has many rows for one of another: "rows", one row for each of
                them, with the other's columns repeated; "list", one row for each of the other,
                with a list of structs named after the stage. A parent without children is dropped
                by an inner join and has an empty list in a left one. The list is null where there
                are none because rows were quarantined: the parent itself, or all of its children.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If a stage is of another pipeline, there are too few, or their rows
                have no id in common.
        """
        culprit = self._culprit(name)
        for stage in stages:
            if not isinstance(stage, Stage) or stage.pipeline is not self:
                raise DefinitionError(
                    f"{culprit}: {stage!r} is not a stage of pipeline {self.name!r}; only stages "
                    "of one pipeline share its fragments and id"
                )
        upstream = tuple(dict.fromkeys(stage.name for stage in stages))
        carried = list_of_names(culprit, "source_columns", source_columns) or ()
        if len(upstream) + bool(carried) < 2 or len(upstream) != len(stages) or not upstream:
            raise DefinitionError(
                f"{culprit}: joins {names(s.name for s in stages)}; expected two or more different "
                "stages, or one and source_columns"
            )
        chosen = {
            node: selection(f"{culprit}, columns[{node!r}]", listed)
            for node, listed in mapping(culprit, "columns", columns).items()
        }
        if unknown := [node for node in chosen if node not in upstream]:
            raise DefinitionError(
                f"{culprit}: columns names {names(unknown)}; the stages joined are "
                f"{names(upstream)}"
            )
        if carried:
            upstream = (*upstream, SOURCE)
            chosen[SOURCE] = tuple((column, column) for column in carried)
        one_of(culprit, "how", how, ("inner", "left"))
        if children is not None:
            one_of(culprit, "children", children, ("rows", "list"))
        options = asset_options(culprit, asset)
        return self._add(JoinSpec(name, upstream, options, how, children, chosen))

    def build_assets(self) -> dg.AssetsDefinition:
        """The pipeline as one Dagster `multi_asset`, any subset of whose stages can be selected.

        Its resources are ``compute`` (`RayCompute` or `LocalCompute`) and ``store``
        (`FragmentStore`).

        Raises:
            DefinitionError: If there are no stages, or code has no identity.
        """
        from vane_dagster.orchestration.assets import build_assets

        return build_assets(self)

    def build_source(self, **asset: Any) -> dg.AssetsDefinition:
        """The source as a Dagster asset, ``<pipeline>/source``, that is observed.

        An observation lists the source once and reports each partition whose files are new, gone or
        changed, from which Dagster knows what is outdated and automation conditions know what to
        run. A run of the pipeline reports what it finds too.

        Args:
            **asset: What `dg.AssetSpec` takes; see `project`. An ``automation_condition`` such as
                ``AutomationCondition.on_cron`` says when to observe.

        Raises:
            DefinitionError: If the source is another asset, or names the one that writes it:
                that one reports itself.
        """
        culprit = self._culprit(SOURCE)
        if self.source.asset:
            raise DefinitionError(
                f"{culprit}: the asset {self.source.asset!r} writes the source and reports its own "
                "versions; observe that one, or declare vd.parquet without asset="
            )
        from vane_dagster.orchestration.assets import build_source

        return build_source(self, asset_options(culprit, asset))

    def _culprit(self, name: str) -> str:
        return f"stage '{self.name}/{name}'"

    def _add(self, spec: StageSpec) -> Stage:
        culprit = self._culprit(spec.name)
        if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
            raise DefinitionError(
                f"{culprit}: a name has letters, digits and '_', and does not begin with a digit"
            )
        if spec.name == SOURCE:
            raise DefinitionError(f"{culprit}: {SOURCE!r} is the name of the pipeline's source")
        if spec.name.lower() in map(str.lower, self._stages):
            raise DefinitionError(
                f"{culprit}: there is a stage of that name already, or one that differs only in "
                "case; give it another name"
            )
        writes = [n for n in spec.upstream if n != SOURCE and self[n].spec.kind == "write"]
        if writes:
            raise DefinitionError(
                f"{culprit}: reads {writes[0]!r}, which publishes and ends a branch; add it to the "
                "stage that is published"
            )
        above = {node: self._keys[node] for node in spec.upstream}
        self._keys[spec.name] = stage_keys(spec, above, culprit)
        self._checks[spec.name] = stage_checks(self, spec, culprit)
        self._stages[spec.name] = stage = Stage(self, spec)
        return stage
