"""`Pipeline`: the DAG of stages that a user builds, call by call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vane_dagster.declare.arguments import (
    list_of_names,
    mapping,
    one_of,
    parse_concurrency,
    positive,
)
from vane_dagster.declare.schema import SchemaLike, parse_schema
from vane_dagster.declare.source import ParquetSource, check_url
from vane_dagster.declare.sql import as_columns, is_column, quote, referenced_columns
from vane_dagster.declare.stage import (
    SOURCE,
    AssetOptions,
    BatchFormat,
    Cardinality,
    JoinHow,
    JoinSpec,
    MapBatchesSpec,
    ProjectSpec,
    Resources,
    StageSpec,
    WriteSpec,
)
from vane_dagster.declare.udf import make_udf
from vane_dagster.errors import DefinitionError, names

if TYPE_CHECKING:
    import dagster as dg

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Rows:
    """What stages can be added to: a pipeline's source, or a stage."""

    pipeline: Pipeline
    _node: str

    def project(
        self,
        name: str,
        columns: Mapping[str, str] | Sequence[str],
        *,
        where: str | None = None,
        **asset: Any,
    ) -> Stage:
        """Adds a stage of columns and SQL expressions, run by DuckDB.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            columns: Column names, or output column to SQL expression over one row. The id is
                carried along where it is left out.
            where: SQL condition; rows for which it is not true are filtered out.
            **asset: What `dg.AssetSpec` takes: description, group_name, owners, tags, kinds,
                metadata, deps, automation_condition, freshness_policy.

        Raises:
            DefinitionError: If an expression does not parse or looks beyond its row.
        """
        culprit = self.pipeline._culprit(name)
        pairs = as_columns(columns, culprit)
        if where is not None:
            referenced_columns(where, f"{culprit}, where")
        id = self.pipeline.id
        if not is_column(dict(pairs).get(id, quote(id)), id, culprit):
            raise DefinitionError(
                f"{culprit}: the id {id!r} is computed, {dict(pairs)[id]!r}; ids pass through "
                "unchanged, so that each row leads back to the source. Leave it out, and give what "
                "is computed another name"
            )
        if id not in dict(pairs):
            pairs = ((id, quote(id)), *pairs)
        options = _asset_options(culprit, asset)
        return self.pipeline._add(ProjectSpec(name, (self._node,), options, pairs, where))

    def map_batches(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        schema: SchemaLike,
        columns: Sequence[str] | None = None,
        batch_format: BatchFormat = "pyarrow",
        batch_size: int | None = None,
        cardinality: Cardinality = "one_to_one",
        concurrency: int | tuple[int, int] | None = None,
        max_concurrency: int = 16,
        num_cpus: float = 0,
        gpus: float = 0,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        fn_args: Sequence[Any] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        version: str | None = None,
        env_vars: Sequence[str] = (),
        **asset: Any,
    ) -> Stage:
        """Adds a stage that runs a function, or a class constructed once in a worker, over batches.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            fn: A function (stateless), or a class with ``__call__`` (stateful, stays warm). Either
                may return, yield, or be async.
            schema: Output columns: name to SQL type, or a `pyarrow.Schema`. The id's type is the
                input's where it is left out. Columns that `fn` returns beyond it are dropped.
            columns: Input columns that `fn` reads; the id comes too. Default: all.
            batch_format: "pyarrow" (`pyarrow.Table`), "numpy" (dict of arrays) or "pandas".
            batch_size: Rows a call; the last batch of a fragment may be smaller. Default: as many
                as a worker is given at once.
            cardinality: "one_to_one", every row must come back, or "filter", rows may be dropped.
            concurrency: Workers, or (min, max) by what the cluster has. Default: 1 for a class, up
                to the cluster's CPUs for a function.
            max_concurrency: Batches in flight in one worker, for an async `fn`.
            num_cpus: CPUs that a worker reserves. Default: none.
            gpus: GPUs that a worker reserves; fractions share one. For a class only.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: Kind of GPU, as Ray names it.
            resources: Custom resources of the cluster that a worker reserves.
            fn_args: Passed to each call after the batch.
            fn_kwargs: Passed to each call.
            fn_constructor_args: Passed to the class.
            fn_constructor_kwargs: Passed to the class.
            version: Stands for the code in fragment keys, where its identity can't be found.
            env_vars: Names of environment variables whose values go to the worker with each run;
                never stored, keyed or logged.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If `fn` is an instance, or an argument does not fit.
            SchemaError: If a type is unknown.
        """
        culprit = self.pipeline._culprit(name)
        udf = make_udf(
            culprit,
            fn,
            args=fn_args,
            kwargs=fn_kwargs,
            constructor_args=fn_constructor_args,
            constructor_kwargs=fn_constructor_kwargs,
            version=version,
        )
        needs = Resources(
            num_cpus, gpus, memory, accelerator_type, mapping(culprit, "resources", resources)
        )
        needs.validate(culprit)
        if gpus and not udf.stateful:
            raise DefinitionError(
                f"{culprit}: gpus={gpus} for function {udf.name}, which would load its model for "
                "each batch; make it a class that loads the model in __init__"
            )
        workers = parse_concurrency(culprit, concurrency)
        spec = MapBatchesSpec(
            name=name,
            upstream=(self._node,),
            asset=_asset_options(culprit, asset),
            udf=udf,
            schema=parse_schema(schema, culprit),
            columns=list_of_names(culprit, "columns", columns),
            batch_format=one_of(culprit, "batch_format", batch_format, _FORMATS),
            batch_size=positive(culprit, "batch_size", batch_size),
            cardinality=one_of(culprit, "cardinality", cardinality, _CARDINALITIES),
            concurrency=workers or ((1, 1) if udf.stateful else None),
            max_concurrency=positive(culprit, "max_concurrency", max_concurrency, 16),
            resources=needs,
            env_vars=list_of_names(culprit, "env_vars", env_vars) or (),
        )
        return self.pipeline._add(spec)

    def write(
        self,
        name: str,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
        **asset: Any,
    ) -> Stage:
        """Adds a stage that publishes the rows as a plain folder of Parquet.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            url: A folder, as a path or fsspec URL, with ``{partition_key}`` where the pipeline is
                partitioned. Files of others in it are left alone.
            storage_options: Options of the fsspec file system.
            compression: A Parquet codec.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If the URL does not tell partitions apart, or there is no stage above.
        """
        culprit = self.pipeline._culprit(name)
        if self._node == SOURCE:
            raise DefinitionError(
                f"{culprit}: would publish the source as it is; add a project, and write that"
            )
        check_url(culprit, url)
        self.pipeline._check_placeholders(culprit, ParquetSource(url))
        codecs = ("zstd", "snappy", "lz4", "gzip", "none")
        spec = WriteSpec(
            name=name,
            upstream=(self._node,),
            asset=_asset_options(culprit, asset),
            url=url,
            storage_options=dict(storage_options or {}),
            compression=one_of(culprit, "compression", compression, codecs),
        )
        return self.pipeline._add(spec)


_FORMATS = ("pyarrow", "numpy", "pandas")
_CARDINALITIES = ("one_to_one", "filter")


class Stage(_Rows):
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
    def key(self) -> dg.AssetKey:
        """Key of the stage's Dagster asset, for the deps of other assets."""
        import dagster as dg

        return dg.AssetKey([self.pipeline.name, self.name])

    def __repr__(self) -> str:
        return f"<Stage {self.pipeline.name}/{self.name} ({self.spec.kind})>"


class Pipeline(_Rows):
    """A DAG of stages over one partitioned source, keyed by one id column.

    Args:
        name: First part of the stages' asset keys.
        source: Where the rows come from; see `parquet`.
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
        source: ParquetSource,
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
        if not isinstance(source, ParquetSource):
            raise DefinitionError(
                f"{culprit}: source is a {type(source).__name__}; expected vd.parquet(url)"
            )
        if not isinstance(id, str) or not id:
            raise DefinitionError(f"{culprit}: id is {id!r}; expected the name of the id column")
        check_url(culprit, source.url)
        self.name = name
        self.source = source
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
        self._check_placeholders(culprit, source)

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

    def join(self, name: str, *stages: Stage, how: JoinHow = "inner", **asset: Any) -> Stage:
        """Adds a stage that puts stages side by side by id, fragment by fragment, with no shuffle.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            *stages: Two or more stages of this pipeline. Rows keep the order of the first.
            how: "inner" keeps rows that every stage has; "left" keeps the rows of the first, with
                nulls where another stage has none.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If a stage is of another pipeline, or there are fewer than two.
        """
        culprit = self._culprit(name)
        for stage in stages:
            if not isinstance(stage, Stage) or stage.pipeline is not self:
                raise DefinitionError(
                    f"{culprit}: {stage!r} is not a stage of pipeline {self.name!r}; only stages "
                    "of one pipeline share its fragments and id"
                )
        upstream = tuple(dict.fromkeys(stage.name for stage in stages))
        if len(upstream) < 2 or len(upstream) != len(stages):
            raise DefinitionError(
                f"{culprit}: joins {names(s.name for s in stages)}; expected two or more different "
                "stages"
            )
        one_of(culprit, "how", how, ("inner", "left"))
        return self._add(JoinSpec(name, upstream, _asset_options(culprit, asset), how))

    def build_assets(self) -> dg.AssetsDefinition:
        """The pipeline as one Dagster `multi_asset`, any subset of whose stages can be selected.

        Its resources are ``compute`` (`RayCompute` or `LocalCompute`) and ``store``
        (`FragmentStore`).

        Raises:
            DefinitionError: If there are no stages, or code has no identity.
        """
        from vane_dagster.orchestrate.assets import build_assets

        return build_assets(self)

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
        self._stages[spec.name] = stage = Stage(self, spec)
        return stage

    def _check_placeholders(self, culprit: str, target: ParquetSource) -> None:
        if self.partitions_def is None and target.fields:
            raise DefinitionError(
                f"{culprit}: {target.url!r} has {{{target.fields[0]}}}, but the pipeline has no "
                "partitions_def; give it one, or take the placeholder out"
            )
        if self.partitions_def is not None and not target.fields:
            raise DefinitionError(
                f"{culprit}: {target.url!r} has no {{partition_key}}, so that every partition "
                "would have the same files; put it in, or leave partitions_def out"
            )
        dimensions = [f.partition(".")[2] for f in target.fields if "." in f]
        known = [d.name for d in getattr(self.partitions_def, "partitions_defs", ())]
        if unknown := [d for d in dimensions if d not in known]:
            raise DefinitionError(
                f"{culprit}: {target.url!r} names the dimension {unknown[0]!r}; the partitions "
                f"have {names(known)}"
            )


def _asset_options(culprit: str, options: dict[str, Any]) -> AssetOptions:
    try:
        return AssetOptions(**options)
    except TypeError:
        unknown = sorted(set(options) - set(AssetOptions.__dataclass_fields__))
        raise DefinitionError(
            f"{culprit}: unknown argument {names(unknown)}; beside its own arguments a stage takes "
            f"{', '.join(AssetOptions.__dataclass_fields__)}"
        ) from None
