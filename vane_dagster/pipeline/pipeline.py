"""Pipeline declarations: the DAG of stages that a user builds, call by call."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vane_dagster._arguments import (
    check_name,
    list_of_names,
    mapping,
    one_of,
    positive,
    selection,
)
from vane_dagster._keywords import known_keywords
from vane_dagster.checks.base import Check
from vane_dagster.checks.builtin import ErrorRate, defaults_for, findings_of, merge
from vane_dagster.checks.compared import Compared
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.modules import count_as_own
from vane_dagster.pipeline.keys import IdColumn, Keys
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.options import JoinChildren, JoinHow
from vane_dagster.pipeline.partition_key import PartitionKey
from vane_dagster.pipeline.preview import Preview
from vane_dagster.pipeline.records import Asset, as_asset
from vane_dagster.pipeline.specs import JoinSpec, ProjectSpec, StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE, Table, check_id, with_upstream
from vane_dagster.pipeline.stages import Rows
from vane_dagster.sources import Source
from vane_dagster.sources.row_ids import IdLike, IdRule, as_id
from vane_dagster.types.schema import check_column_names
from vane_dagster.types.sql import quote

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.adoptions import Adoption


class Stage(Rows):
    """A stage of a pipeline, created by methods of `Pipeline`. Its methods add further stages."""

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
        return self.pipeline._key_columns(self.name)[0]

    @property
    def key(self) -> dg.AssetKey:
        """The key of the stage's Dagster asset, for the deps of other assets."""
        import dagster as dg

        return dg.AssetKey([self.pipeline.name, self.name])

    @property
    def schema(self) -> pa.Schema:
        """The columns and types of the stage's rows.

        If the declarations do not determine all types, this reads the footer of one source file.

        Raises:
            SchemaError: If the stages do not fit the source's columns.
            SourceError: If there is no file with a readable footer.
            DefinitionError: If the types depend on another asset's rows, in a store.
        """
        return self.pipeline._schema_of(self.name)

    @known_keywords("Stage.preview")
    def preview(
        self,
        rows: int = 10,
        *,
        partition: str | None = None,
        ids: Sequence[Any] | None = None,
        where: str | None = None,
        reload: bool = False,
        store: Any = None,
        compute: Any = None,
    ) -> Preview:
        """Compute some rows of the stage, without Dagster.

        This stage and its upstream stages compute the first rows of the source; stored upstream
        rows are read instead. Nothing is stored, and no schema is pinned. A failed row is shown
        with its error, regardless of `on_error`. For each stage with ``schema="infer"`` the schema
        is printed as code to paste.

        After an edit of a class that does not change its constructor or the arguments, a loaded
        instance is used with the methods of the edited class, and a line says so.

        Args:
            rows: The number of input rows, and the largest number of rows returned. More input is
                read if a filter drops the first rows.
            partition: The partition. Default: the first one with rows.
            ids: The ids of the stage's input rows to compute, instead of the first ones.
            where: An SQL condition on the columns of the stage's input; the first rows for which it
                is true are computed. If an upstream model has stored nothing, at most 64 times as
                many rows are examined. The input of a join is the stage whose rows it keeps.
            reload: Whether to construct models again that were constructed from other code.
            store: A `FragmentStore` whose stored rows and pinned schemas are used instead of being
                computed. Needed if the source is another asset's rows. A preview writes only copies
                of a `local_file` there, until ``vane-dagster store gc`` removes them.
            compute: A `RayCompute`, on whose warm workers the preview runs and keeps its models
                loaded; it needs a `store`. Or a `LocalCompute`. Default: subprocesses, which this
                process keeps for its next preview or run.

        Returns:
            The rows as a table that includes failed rows, and the time of each stage.

        Raises:
            DefinitionError: If an argument is invalid, or no row has an id or meets the condition.
            VaneError: If the rows cannot be computed.
        """
        return self.pipeline._preview(
            self.name, rows, partition, ids, where, reload, store, compute
        )

    @known_keywords("Stage.adopt")
    def adopt(
        self,
        rows: int | None = 200,
        *,
        tolerance: float = 0.0,
        partitions: Any = None,
        undo: bool = False,
        store: Any = None,
        compute: Any = None,
    ) -> Adoption:
        """Keep the stored rows in force after an edit of code or arguments that changes no result.

        A random sample of stored rows is computed again with the edited code. If all are equal, the
        store records that both definitions count as one: the results of either are in force for
        both, and no run computes the stage, or its downstream stages, because of this edit.
        Otherwise nothing changes. This is evidence, not a proof: if n rows are equal, then with 95%
        confidence at most 3/n of all rows differ.

        The latest results of another definition are compared, and adopted in all partitions. The
        rows are computed from the inputs that they were made from, even if an upstream stage was
        edited. The messages, the model with its options, sampling_params and return_format of a
        prompt count as arguments.

        Args:
            rows: The size of the sample, over all partitions. None: every stored row. 0: the edit
                is adopted without a comparison, for example if a model's answers vary.
            tolerance: The largest difference of floating-point numbers, also inside of other
                values, relative to one plus their magnitude. All other values must be equal.
            partitions: The partitions to sample, as in `Pipeline.plan`. Default: all.
            undo: Whether to end all adoptions of this definition. Each result is then in force only
                for the definition that computed it.
            store: A `FragmentStore` or the URL of a store's root. Default:
                ``$VANE_DAGSTER_STORE``, else a folder of this user.
            compute: A `RayCompute`, or a `LocalCompute`, the default.

        Returns:
            What was compared.

        Raises:
            PlanError: If a row differs, or something other than code or arguments changed.
            VaneError: If a row cannot be computed.
        """
        return self.pipeline._adopt(self.name, rows, tolerance, partitions, undo, store, compute)

    def __repr__(self) -> str:
        return f"<Stage {self.pipeline.name}/{self.name} ({self.spec.kind})>"


class Pipeline(Rows):
    """The declared part of `vane_dagster.Pipeline`, which has the same arguments."""

    @known_keywords("vd.Pipeline", more=". All others are arguments of its stages")
    def __init__(
        self,
        name: str,
        *,
        source: Source | Stage | dg.AssetsDefinition | dg.AssetKey,
        id: IdLike | None = None,
        partitions_def: dg.PartitionsDefinition[Any] | None = None,
        backfill_policy: dg.BackfillPolicy | None = None,
        fragment_rows: int | None = None,
        group_name: str | None = None,
        pool: str | None = None,
        retry_policy: dg.RetryPolicy | None = None,
        op_tags: Mapping[str, str] | None = None,
    ) -> None:
        location = f"pipeline {name!r}"
        check_name(location, name)
        if not isinstance(source, Source):
            from vane_dagster.sources.stored import as_source

            source = as_source(location, source)
        source = source.of_pipeline(name, partitions_def)
        source.validate(location, partitions_def)
        given = as_id(location, source.default_id if id is None else id)
        self.id_rule: IdRule | None = given if isinstance(given, IdRule) else None
        if self.id_rule is not None:
            self.id_rule.check(source, location)
        self.name = name
        self.source: Source = source
        self.id = given.name if isinstance(given, IdRule) else given
        self.partitions_def = partitions_def
        self.backfill_policy = backfill_policy
        self.fragment_rows: int | None = positive(location, "fragment_rows", fragment_rows)
        self.group_name = group_name
        self.pool = pool
        self.retry_policy = retry_policy
        self.op_tags = dict(op_tags or {})
        self.pipeline = self
        self._node = SOURCE
        self._stages: dict[str, Stage] = {}
        self._keys: dict[str, Keys] = {SOURCE: (IdColumn(self.id, SOURCE),)}
        self._checks: dict[str, tuple[Check, ...]] = {}
        self._executions: dict[str, int | None] = {}

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages by name, in the order of declaration, upstream first."""
        return MappingProxyType(self._stages)

    def __getitem__(self, name: str) -> Stage:
        if name not in self._stages:
            has = f"it has {names(self._stages)}"
            raise DefinitionError(f"pipeline {self.name!r} has no stage {name!r}; {has}")
        return self._stages[name]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {', '.join(self._stages) or 'no stages'}>"

    def _partition(self, key: str | None) -> str | None:
        """Return a partition's key with what placeholders can name of it, from its text."""
        return None if key is None else PartitionKey(str(key), self.partitions_def)

    def _keys_of(self, node: str) -> Keys:
        """Return the columns that identify the rows of a stage or the source, the id first."""
        return self._keys[node]

    def _key_columns(self, node: str) -> tuple[str, ...]:
        """Return the names of these columns."""
        return tuple(key.column for key in self._keys[node])

    def _tables(self) -> dict[str, Table]:
        """Return the columns of each node, as far as they are known without the source."""
        tables = {SOURCE: Table(dict.fromkeys(self.source._fixed_columns), is_complete=False)}
        for stage in self:
            inputs = {name: tables[name] for name in stage.spec.upstream}
            tables[stage.name] = stage.spec.outputs(self, inputs)
        return tables

    def _schema_of(self, stage: str) -> pa.Schema:
        """See `Stage.schema`."""
        if (declared := self._tables()[stage].schema) is not None:
            return declared
        needed = with_upstream(self, stage)
        return self._resolve_schemas(needed, {SOURCE: self.source_schema()})[stage]

    def source_schema(self, store: Any = None) -> pa.Schema:
        """Return the source's columns and types; `vane_dagster.Pipeline` reads them."""
        raise NotImplementedError

    def _preview(self, stage: str, *given: Any) -> Preview:
        """See `Stage.preview`; `vane_dagster.Pipeline` computes the rows."""
        raise NotImplementedError

    def _adopt(self, stage: str, *given: Any) -> Adoption:
        """See `Stage.adopt`; `vane_dagster.Pipeline` compares the rows."""
        raise NotImplementedError

    def _resolve_schemas(
        self, stages: Collection[str], known: Mapping[str, pa.Schema]
    ) -> dict[str, pa.Schema]:
        """The output schemas of the source and of `stages`, validated from the source down."""
        schemas = dict(known)
        if SOURCE in schemas:
            check_id(f"source of pipeline {self.name!r}", self.id, schemas[SOURCE])
        for stage in self:
            if stage.name in stages:
                inputs = {name: schemas[name] for name in stage.spec.upstream}
                made = schemas[stage.name] = stage.spec.output_schema(self, inputs)
                for check in self._checks[stage.name]:
                    check.fit(made, self._location(stage.name))
        return schemas

    def _with_spec(self, spec: StageSpec) -> Pipeline:
        """Return a copy of the pipeline in which a stage is replaced."""
        return self._of_specs(spec if each.name == spec.name else each.spec for each in self)

    def _isolating_rows(self) -> Pipeline:
        """Return a copy of the pipeline in which a row that fails leaves the others alone."""
        other: Pipeline = self
        for stage in self:
            if stage.spec.runs_udf and not stage.spec.isolates_rows:
                failures = replace(stage.spec.failures, on_error="quarantine")
                other = other._with_spec(replace(stage.spec, failures=failures))
        return other

    def _with_input(self, stage: str, name: str, where: str | None) -> Pipeline:
        """Return a copy in which a stage reads the rows that it keeps through a filter."""
        spec = self[stage].spec
        base = spec.base_node(self)
        ids = tuple((key.column, quote(key.column)) for key in self._keys_of(base))
        given = ProjectSpec(name, (base,), as_asset(name, None), ids, where, True)
        upstream = tuple(name if node == base else node for node in spec.upstream)
        if isinstance(spec, JoinSpec):
            taken = {name if node == base else node: each for node, each in spec.columns.items()}
            spec = replace(spec, columns=taken)
        new = [given, replace(spec, upstream=upstream)]
        other = self._of_specs(
            s for each in self for s in (new if each.name == stage else [each.spec])
        )
        other._checks = {**self._checks, name: ()}
        return other

    def _snapshot(self) -> Pipeline:
        """Return a copy of the pipeline to which nothing is added later."""
        return self._of_specs(stage.spec for stage in self)

    def _of_specs(self, specs: Iterable[StageSpec]) -> Pipeline:
        """Return a copy of the pipeline with other stages."""
        other = copy.copy(self)
        other.pipeline = other
        other._stages, other._keys = {}, {SOURCE: self._keys[SOURCE]}
        for spec in specs:
            other._stages[spec.name] = Stage(other, spec)
            other._keys[spec.name] = spec.row_keys(other)
        return other

    def _with_schema(self, stage: str, schema: pa.Schema) -> Pipeline:
        """Return a copy of the pipeline in which a stage has its inferred schema."""
        spec = self[stage].spec
        assert spec.runs_udf
        return self._with_spec(spec.with_schema(self, schema))

    def _checks_of(self, stage: str) -> tuple[Check, ...]:
        """Return the checks of a stage that are evaluated when a partition is committed."""
        return tuple(check for check in self._checks[stage] if not check._is_alone)

    def _reproducible(self, stage: str) -> tuple[Check, ...]:
        """Return the checks of a stage that recompute rows, each time they are executed."""
        return tuple(check for check in self._checks[stage] if check._is_alone)

    @adds_stage
    def join(
        self,
        name: str,
        *stages: Stage,
        how: JoinHow = "inner",
        columns: Mapping[str, Sequence[str] | Mapping[str, str]] | None = None,
        source_columns: Sequence[str] = (),
        children: JoinChildren | None = None,
        asset: Asset | None = None,
    ) -> Stage:
        """Add a stage that joins stages by id, fragment by fragment, without a shuffle.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            *stages: Two or more stages of this pipeline, or one with `source_columns`. Rows keep
                the order of the first.
            how: "inner" keeps the rows that every stage has; "left" keeps the rows of the first
                stage, with nulls where another stage has no row.
            columns: The columns to take from each stage, by the stage's name: a list of columns, or
                a mapping of output column to column. Default: all. If two stages have a column with
                the same name, rename it here.
            source_columns: Columns of the source to include.
            children: How to join a stage that has many rows for one row of another. "rows": one
                output row per child, with the parent's columns repeated. "list": one output row per
                parent, with a list of structs named after the stage of the children. An inner join
                drops a parent without children; a left join gives it an empty list. The list is
                null if the children are missing because rows were quarantined: the parent itself,
                or all of its children.
            asset: See `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If a stage belongs to another pipeline, there are too few stages, or
                their rows have no id in common.
        """
        location = self._location(name)
        for stage in stages:
            if not isinstance(stage, Stage) or stage.pipeline is not self:
                raise DefinitionError(
                    f"{location}: {stage!r} is not a stage of pipeline {self.name!r}; only stages "
                    "of one pipeline share its fragments and id"
                )
        upstream = tuple(dict.fromkeys(stage.name for stage in stages))
        carried = list_of_names(location, "source_columns", source_columns) or ()
        if len(upstream) + bool(carried) < 2 or len(upstream) != len(stages) or not upstream:
            raise DefinitionError(
                f"{location}: joins {names(s.name for s in stages)}; expected two or more "
                "different stages, or one stage with source_columns"
            )
        chosen = {
            node: selection(location, f"columns[{node!r}]", listed)
            for node, listed in mapping(location, "columns", columns).items()
        }
        if unknown := [node for node in chosen if node not in upstream]:
            raise DefinitionError(
                f"{location}: columns names {names(unknown)}; the stages joined are "
                f"{names(upstream)}"
            )
        if carried:
            upstream = (*upstream, SOURCE)
            chosen[SOURCE] = tuple((column, column) for column in carried)
        one_of(location, "how", how, ("inner", "left"))
        if children is not None:
            one_of(location, "children", children, ("rows", "list"))
        own = as_asset(location, asset)
        return self._add(JoinSpec(name, upstream, own, how, children, chosen))

    def _add_udf(self, spec: MapBatchesSpec) -> Stage:
        """Add a stage that runs user code or calls a model."""
        if not spec.is_inferred:
            spec.check_schema(self._location(spec.name))
        return self._add(spec.with_reuse(self))

    def _location(self, name: str) -> str:
        return f"stage '{self.name}/{name}'"

    def _add(self, spec: StageSpec) -> Stage:
        location = self._location(spec.name)
        check_name(location, spec.name)
        if spec.name == SOURCE:
            raise DefinitionError(f"{location}: {SOURCE!r} is the name of the pipeline's source")
        execution, former = _execution(), self._executions.get(spec.name)
        replaced: set[str] = set()
        if former is not None and execution != former:
            replaced = {one for one in self._stages if spec.name in with_upstream(self, one)}
        kept = {name: stage for name, stage in self._stages.items() if name not in replaced}
        if spec.name.lower() in map(str.lower, kept):
            raise DefinitionError(
                f"{location}: the pipeline already has a stage with this name, or one that differs "
                "only in case; choose another name"
            )
        inputs = [name for name in spec.upstream if name != SOURCE]
        if gone := [name for name in inputs if name not in kept]:
            raise DefinitionError(
                f"{location}: reads {names(gone)}, which was removed because it, or one of its "
                "upstream stages, was declared again; execute its cell again, or choose another "
                "name for this stage"
            )
        if writes := [name for name in inputs if kept[name].spec.publishes]:
            raise DefinitionError(
                f"{location}: reads {writes[0]!r}, a write stage, which no stage can read; read "
                "the stage that is published instead"
            )
        targets = {s.spec.target.url: s.name for s in kept.values() if s.spec.publishes}
        if spec.publishes and (other := targets.get(spec.target.url)):
            raise DefinitionError(
                f"{location}: {other!r} already publishes to {spec.target.url!r}, so readers would "
                "get the rows of both; give each stage its own target"
            )
        # Nothing is changed in place: neither by a stage that is refused, nor below built assets.
        draft = copy.copy(self)
        draft._stages, draft._keys = kept, {**self._keys, spec.name: spec.row_keys(self)}
        tables = draft._tables()
        made = spec.outputs(draft, {name: tables[name] for name in spec.upstream})
        check_column_names([*made.fields], location)
        checks = _stage_checks(draft, spec, location)
        if removed := sorted(replaced - {spec.name}):
            warnings.warn(
                f"{location} was declared again, and replaced; {names(removed)}, which read it, "
                "were removed: execute their cells again",
                stacklevel=4,
            )
        stage = Stage(self, spec)
        self._keys = draft._keys
        self._checks = {**self._checks, spec.name: checks}
        self._executions = {**self._executions, spec.name: execution}
        _count_declaring_code()
        self._stages = {**kept, spec.name: stage}
        return stage


def _execution() -> int | None:
    """Return IPython's number of the cell's execution; None outside of IPython."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if shell is None else int(shell.execution_count)


def _count_declaring_code() -> None:
    """Let the code of the package that declares a stage count as the user's."""
    frame = sys._getframe()
    while frame.f_globals.get("__name__", "").startswith("vane_dagster.") and frame.f_back:
        frame = frame.f_back
    count_as_own(frame.f_globals.get("__name__", ""))


def _stage_checks(pipeline: Pipeline, spec: StageSpec, location: str) -> tuple[Check, ...]:
    """Return the checks of a stage: its defaults, merged with the checks that the user declares."""
    known, rate = spec.made_schema(pipeline), spec.failures.max_error_rate
    checks = merge(defaults_for(known, spec.kind, rate), spec.asset.checks, location)
    if rate is not None and ErrorRate(rate) not in findings_of(checks):
        raise DefinitionError(
            f"{location}: max_error_rate={rate} sets the limit of the check 'error_rate', which "
            "checks= replaces or turns off. Leave one of them out, or give the check another name="
        )
    if spec.publishes and (late := [check for check in checks if check._is_alone]):
        raise DefinitionError(
            f"{location}: check {late[0].name!r} computes rows again, but a write stage computes "
            "none; add the check to the stage that is published"
        )
    for check in checks:
        other = check.stage_of(pipeline.name) if isinstance(check, Compared) else ""
        if other and other not in pipeline._stages:
            raise DefinitionError(
                f"{location}: check {check.name!r} compares with {other!r}, which is not declared "
                f"yet; the pipeline has {names(pipeline._stages)}. Declare it first"
            )
    if spec.runs_udf and not spec.is_inferred and not spec.include:  # else at the plan
        ids = pipeline._key_columns(spec.name)
        carried = [pa.field(id, pa.null()) for id in ids if id not in spec.schema.names]
        for check in checks:
            check.fit(pa.schema([*carried, *spec.schema]), location)
    return checks
