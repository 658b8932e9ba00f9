"""A pipeline as a Dagster component: what differs between deployments, in ``defs.yaml``.

Dagster inspects annotations at runtime, so this module does not postpone their evaluation.
"""

import importlib
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import resolve_name
from typing import Annotated, Any, Literal

import dagster as dg
from dagster.components.resolved.core_models import OpSpec
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field, create_model

from vane_dagster._arguments import parse_workers
from vane_dagster._keywords import similar
from vane_dagster.errors import DefinitionError, names
from vane_dagster.orchestration import assets as built
from vane_dagster.orchestration.asset_specs import stage_spec
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.pipeline import Pipeline
from vane_dagster.orchestration.resources import Compute, LocalCluster, RayCompute
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.pipeline import Stage

_SHARED: list[Any] = []
"""Resources, each once. Dagster refuses two that are equal but not the same object."""


def _in_yaml(resource: Any, kind: type, **nested: Any) -> dg.Resolver:
    """Return a resolver of a resource: its arguments, or a template that is one of a kind."""
    model = _model(resource, nested)

    def resolve(context: dg.ResolutionContext, given: Any) -> Any:
        if isinstance(given, str):
            if isinstance(resolved := context.resolve_value(given), kind):
                return resolved
            raise DefinitionError(
                f"{given!r} is {type(resolved).__name__}; expected the arguments of "
                f"{resource.__name__}, as {{name: value}}, or a template that is a resource"
            )
        arguments = model.resolve_from_model(context, given).model_dump(exclude_unset=True)
        if (cluster := arguments.get("cluster")) is not None:
            arguments["cluster"] = LocalCluster(**cluster)
        made = resource(**arguments)
        if made not in _SHARED:
            _SHARED.append(made)
        return _SHARED[_SHARED.index(made)]

    return dg.Resolver(resolve, model_field_type=model.model())


def _model(resource: Any, nested: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {
        name: (info.annotation, Field(None, description=info.description))
        for name, info in resource.model_fields.items()
        if info.description  # the constraints are the resource's: a template is a text
    }
    bases = (dg.Model, dg.Resolvable)
    return create_model(f"{resource.__name__}Arguments", __base__=bases, **fields, **nested)


_COMPUTE = _in_yaml(RayCompute, Compute, cluster=(_model(LocalCluster, {}) | None, None))
_STORE = _in_yaml(FragmentStore, FragmentStore)


class StageOverrides(dg.Model, dg.Resolvable):
    """What a deployment may change of a stage. Nothing of it counts in keys.

    See `vane_dagster.Workers` for what each field means.
    """

    gpus: float | None = None
    concurrency: int | list[int] | Literal["auto"] | None = None
    num_cpus: float | None = None
    memory: int | None = None
    accelerator_type: str | None = None
    resources: dict[str, float] | None = None
    max_concurrency: int | None = None
    startup_timeout_s: float | None = None
    max_batches: int | None = None
    max_rss: int | None = None
    env_vars: list[str] | None = None

    def of(self, location: str, spec: MapBatchesSpec) -> MapBatchesSpec:
        """Return a stage's spec with the changes; a null changes nothing."""
        given = self.model_dump(exclude_none=True)
        gpus, workers = given.pop("gpus", spec.gpus), spec.workers
        if "concurrency" in given:
            count = given.pop("concurrency")
            given["count"] = parse_workers(f"{location}: overrides", "concurrency", count)
        if "env_vars" in given:
            given["env_vars"] = [*workers.env_vars, *given["env_vars"]]
        try:
            workers = replace(workers, **given)
        except DefinitionError as error:
            raise DefinitionError(f"{location}: overrides: {error}") from None
        return spec.with_workers(f"{location}: overrides", gpus, workers)


def _load_pipeline(context: dg.ResolutionContext, path: str) -> Pipeline:
    """Return the pipeline at a Python path; one that begins with a dot is relative."""
    module, _, name = path.rpartition(".")
    if path.startswith("."):
        load = dg.ComponentLoadContext.from_resolution_context(context)
        module = resolve_name(module or ".", load.defs_relative_module_name(load.path))
    if not module or not name.isidentifier():
        raise DefinitionError(
            f"pipeline: {path!r}; expected a module and the name of a pipeline in it, such as "
            "'.pipeline.docs' or 'my_project.pipelines.docs'"
        )
    loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        near = similar(name, dir(loaded))
        raise DefinitionError(f"pipeline: the module {module} has no {name!r}. {near}".rstrip(". "))
    value = getattr(loaded, name)
    if callable(value):
        value = value()
    if not isinstance(value, Pipeline):
        raise DefinitionError(
            f"pipeline: {path!r} is {type(value).__name__}; expected a vd.Pipeline, or a function "
            f"without parameters that returns one, named {name!r} in the module {module}"
        )
    return value


class PipelineScaffolder(dg.Scaffolder[Any]):
    """Writes a component that runs on a laptop as it is."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write ``defs.yaml`` and ``pipeline.py``."""
        name = re.sub(r"[^a-z0-9_]", "_", request.target_path.name.lower())
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"pipeline_{name}"
        attributes = {"pipeline": f".pipeline.{name}", "compute": {}, "store": {}}
        dg.scaffold_component(request, attributes)
        text = _EXAMPLE.replace("NAME", name)
        (request.target_path / "pipeline.py").write_text(text, encoding="utf-8")


_EXAMPLE = '''"""The pipeline NAME."""

from typing import Any

import vane_dagster as vd


class Sentiment:
    """Stands for a model."""

    def __init__(self) -> None:
        """Load the weights: once in each worker process."""
        self.weights = {"great": 1.0, "good": 0.5, "slow": -0.5, "broken": -1.0}

    def __call__(self, batch: Any) -> dict[str, list[float]]:
        """Return the output columns of a batch, a pyarrow.Table of the columns named below."""
        texts = [text.lower().split() for text in batch["text"].to_pylist()]
        return {"score": [sum(self.weights.get(word, 0.0) for word in words) for words in texts]}


ROWS = [{"id": 1, "text": "Great screen and great sound"}, {"id": 2, "text": "Slow and broken"}]

NAME = vd.Pipeline("NAME", source=vd.table(ROWS), id="id")
NAME.map_batches(
    "sentiment", Sentiment, columns=["text"], schema={"score": "DOUBLE"}, include_columns=True
)
'''


@dg.scaffold_with(PipelineScaffolder)
@dataclass
class PipelineComponent(dg.Component, dg.Resolvable):
    """A pipeline as a Dagster component: its assets, its source and its jobs.

    Python declares the pipeline; ``defs.yaml`` has the settings that differ between deployments.

    ``dg scaffold defs vane_dagster.PipelineComponent docs`` writes ``defs.yaml`` and a
    ``pipeline.py`` that runs on a laptop. The component has the assets of the stages and of the
    source, the job ``docs_plan``, and the sensor ``docs_batches`` if a stage uses batches.
    ``dg check yaml`` reports unknown names, and ``dg check defs`` unknown stages. Commands of
    ``vane-dagster`` need neither ``-f`` nor ``-m`` in such a project. A subclass may override
    ``get_asset_spec(stage)`` and ``execute(context, pipeline, config, compute, store)``. A project
    has one resource ``compute`` and one ``store``: components that declare different ones are
    refused.

    Attributes:
        pipeline: Python path of a `Pipeline`, or of a function that returns one: ``.pipeline.docs``
            is ``docs`` in ``pipeline.py`` beside ``defs.yaml``.
        compute: The arguments of `RayCompute`, where ``cluster`` has those of `LocalCluster`.
            Default: the resource ``compute`` of the project.
        store: The arguments of `FragmentStore`. Default: the resource ``store`` of the project.
        translation: Attributes of the stages' assets, such as ``group_name``, ``tags``, ``owners``
            and ``description``. Key, dependencies, partitions and code version cannot be set.
            Templates may use ``stage``, such as ``{{ stage.name }}``, and ``spec``.
        op: The step's ``backfill_policy``, ``pool`` and ``tags``, instead of the pipeline's.
        overrides: By stage, the resources and numbers of its workers. They are not part of keys.
    """

    pipeline: Annotated[Pipeline, dg.Resolver(_load_pipeline, model_field_type=str)]
    compute: Annotated[Compute | None, _COMPUTE] = None
    store: Annotated[FragmentStore | None, _STORE] = None
    translation: (
        Annotated[
            TranslationFn[Stage], TranslationFnResolver[Stage](lambda stage: {"stage": stage})
        ]
        | None
    ) = None
    op: OpSpec | None = None
    overrides: dict[str, StageOverrides] = field(default_factory=dict)

    def get_asset_spec(self, stage: Stage) -> dg.AssetSpec:
        """Return the asset spec of a stage; a subclass may change what `translation` may."""
        spec = stage_spec(stage.pipeline, stage.spec)
        return self.translation(spec, stage) if self.translation else spec

    def execute(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        config: RunOptions,
        compute: Compute,
        store: FragmentStore,
    ) -> Iterator[Any]:
        """Execute a step and yield Dagster's events; a subclass may do something before or after.

        Args:
            context: The step's context.
            pipeline: The pipeline as this component configures it.
            config: The run's config, such as ``force``.
            compute: The compute resource.
            store: The store.
        """
        from vane_dagster.orchestration.steps import materialize_step

        yield from materialize_step(context, pipeline, config, compute, store)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the assets of the stages and of the source, the job, and the sensor of batches.

        Raises:
            DefinitionError: If a stage does not exist, or takes no such override.
        """
        pipeline = self._configured()
        given = {"compute": self.compute, "store": self.store}
        made: list[Any] = [built.build_assets(pipeline, self.get_asset_spec, self.execute)]
        if not pipeline.source.asset:
            made.append(pipeline.build_source())
        return dg.Definitions(
            assets=made,
            jobs=[pipeline.build_plan_job()],
            sensors=[pipeline.build_batch_sensor()] if built.uses_batches(pipeline) else [],
            resources={name: each for name, each in given.items() if each is not None},
        )

    def _configured(self) -> Any:
        """Return the pipeline with the overrides and the options of the step."""
        pipeline: Any = self.pipeline._snapshot()
        location = f"pipeline {pipeline.name!r}"
        for name, overrides in self.overrides.items():
            spec = pipeline[name].spec
            if not spec.runs_udf:
                raise DefinitionError(
                    f"{location}: overrides has {name!r}, a {spec.kind} stage, which has no "
                    "separate workers; leave it out"
                )
            pipeline = pipeline._with_spec(overrides.of(pipeline._location(name), spec))
        if self.op:
            if ignored := self.op.model_fields_set - {"backfill_policy", "pool", "tags"}:
                raise DefinitionError(
                    f"{location}: op has {names(sorted(ignored))}; expected backfill_policy, pool "
                    "or tags. The step is named after the pipeline"
                )
            pipeline.backfill_policy = self.op.backfill_policy or pipeline.backfill_policy
            pipeline.pool = self.op.pool or pipeline.pool
            pipeline.op_tags = {**pipeline.op_tags, **(self.op.tags or {})}
        return pipeline
