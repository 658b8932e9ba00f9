"""The public `Pipeline`: a user's declaration and the Dagster assets built from it.

Importing this module or declaring a pipeline does not import Dagster; building its assets does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline import pipeline as declared
from vane_dagster.pipeline.records import Asset, as_asset
from vane_dagster.pipeline.stage_kind import SOURCE

if TYPE_CHECKING:
    import dagster as dg
    import pyarrow as pa

    from vane_dagster.pipeline.preview import Preview
    from vane_dagster.planning.forecast import Forecast
    from vane_dagster.storage.adoptions import Adoption


class Pipeline(declared.Pipeline):
    """A DAG of stages over one partitioned source, keyed by an id.

    Args:
        name: First component of the stages' asset keys.
        source: The source of the rows, such as `parquet`; a stage of another pipeline; an ordinary
            asset with rows in the store; or `stored` with the key of such an asset.
        id: A column that is unique and not null within a partition; every stage keeps it. A list of
            columns is joined into a text column `id`, or, as ``{"key": ["doc", "page"]}``, into one
            with another name. For rows without an id, use `row_id`. Default: the path, for sources
            of files.
        partitions_def: A Dagster partitions definition; None for an unpartitioned pipeline.
        backfill_policy: How Dagster divides a backfill into runs. Default: one run for all
            partitions, which share their warm models.
        fragment_rows: Maximum rows per fragment. Default: derived from the stages' batch sizes in
            the first run and kept in the store.
        group_name: Dagster group of the source, and of stages without `group_name`. Default: the
            pipeline's name.
        pool: Dagster concurrency pool of the step.
        retry_policy: Dagster retry policy of the step. Errors that a retry would repeat, such as
            a failed blocking check, a refused schema or a used budget, are not retried.
        op_tags: Dagster tags of the step.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    def source_schema(self, store: Any = None) -> pa.Schema:
        """Return the source's columns and types, from the last of its files.

        Args:
            store: The store, as for `plan`. It has the types of CSV and JSON columns, once a run or
                a plan has inferred them.

        Raises:
            SourceError: If there is no file, or no footer is readable.
            DefinitionError: If the source is another asset's rows in a store.
        """
        from vane_dagster.orchestration.read import open_store

        location = f"pipeline {self.name!r}"
        schema = self.source.bind(open_store(store, location)).schema(location)
        return self.id_rule.schema(schema, location) if self.id_rule else schema

    def _preview(self, stage: str, *given: Any) -> Preview:
        """See `Stage.preview`."""
        from vane_dagster.orchestration.preview import preview

        return preview(self, stage, *given)

    def _adopt(self, stage: str, *given: Any) -> Adoption:
        """See `Stage.adopt`."""
        from vane_dagster.orchestration.adopt import adopt

        return adopt(self, stage, *given)

    @known_keywords("Pipeline.plan")
    def plan(
        self,
        partitions: str | Sequence[str] | None = None,
        *,
        select: str | Sequence[str] | None = None,
        store: Any = None,
        compute: Any = None,
        force: bool = False,
        retry_quarantined: bool = False,
        rows: bool = False,
        sample: int | None = None,
    ) -> Forecast:
        """Return what a run would compute, why, and what it would cost.

        A plan calls no code of a stage, commits nothing, and starts no cluster. A source that is
        copied into the store, such as CSV files or rows in memory, is copied now. Costs are
        intervals. They range from the fastest to the slowest tenth of the stored rows of each
        stage, widened by 10 to 35%: the fewer fragments are stored, the wider.

        Args:
            partitions: A partition key, "first..last", or several of these. Default: all.
            select: Names of stages, with ``+`` as in Dagster: "embedding+" also selects all
                downstream stages, "+embedding" all upstream stages. Default: all.
            store: A `FragmentStore` or the URL of a store's root. Default:
                ``$VANE_DAGSTER_STORE``, else a folder of this user.
            compute: The compute resource of the run, for its prices, and to check whether workers
                fit, unless this would start a cluster. With `sample`, rows are computed there.
                Default: no prices and no check; samples are computed in subprocesses.
            force: Whether the run would compute everything again.
            retry_quarantined: Whether the run would compute failed rows again.
            rows: Whether to read the inputs of changed fragments and count the rows without a
                stored result. The count is exact if all inputs are stored, or can be computed from
                stored ones by SQL. It is an upper bound downstream of stages whose rows are not
                computed yet.
            sample: Compute this many of the first input rows of each new or edited stage, to
                measure its cost. Downstream of a stage that is not stored, the rows that its sample
                made are used. This calls the stages' code.

        Returns:
            The forecast of each stage. It prints, and has `to_dict`.

        Raises:
            DefinitionError: If a stage or partition does not exist.
        """
        from vane_dagster.orchestration.forecasts import make_forecast

        return make_forecast(
            self, partitions, select, store, force, retry_quarantined, compute, rows, sample
        )

    @known_keywords("Pipeline.run")
    def run(
        self,
        partitions: str | Sequence[str] | None = None,
        *,
        select: str | Sequence[str] | None = None,
        store: Any = None,
        compute: Any = None,
        force: bool = False,
        retry_quarantined: bool = False,
        max_gpu_hours: float | None = None,
        max_cost: float | None = None,
        wait: bool = False,
    ) -> None:
        """Bring stages up to date in a notebook or script, without Dagster's events.

        It computes, checks and commits like a Dagster run, in the same store. A later Dagster run
        uses the results and reports them. Progress and a summary are printed.

        Args:
            partitions: As for `plan`.
            select: As for `plan`.
            store: As for `plan`.
            compute: A `RayCompute`, or a `LocalCompute`, the default.
            force: Whether to compute everything again, even if it is stored.
            retry_quarantined: Whether to compute failed rows again.
            max_gpu_hours: Compute nothing if the upper end of `plan` has more GPU hours.
            max_cost: The same limit for the cost of tokens, for models with prices.
            wait: Whether to wait for the answers of batches, for models with ``mode="batch"``.
                Otherwise the run submits them and ends, and a later run continues.

        Raises:
            BudgetError: If the run may exceed a limit.
            VaneError: If a partition or a blocking check fails; other partitions are committed.
        """
        from vane_dagster.orchestration.plain_run import run

        options = {"force": force, "retry_quarantined": retry_quarantined, "wait": wait}
        limits = {"max_gpu_hours": max_gpu_hours, "max_cost": max_cost}
        run(self, partitions, select, store, compute, **options, **limits)

    def build_assets(self) -> dg.AssetsDefinition:
        """Build one Dagster `multi_asset` with a selectable asset per stage.

        It requires the resources ``compute`` (`RayCompute` or `LocalCompute`) and ``store``
        (`FragmentStore`).

        Raises:
            DefinitionError: If the pipeline has no stages, or code has no identity.
        """
        from vane_dagster.orchestration.assets import build_assets

        return build_assets(self)

    def build_plan_job(self) -> dg.JobDefinition:
        """Build a Dagster job, ``<pipeline>_plan``, that reports what a run would compute.

        Its metadata has the text of `plan`. It requires the resource ``store``.
        """
        from vane_dagster.orchestration.assets import build_plan_job

        return build_plan_job(self)

    def build_batch_sensor(self) -> dg.SensorDefinition:
        """Build a Dagster sensor, ``<pipeline>_batches``, for models with ``mode="batch"``.

        Every five minutes it checks the batches in flight, stores the answers of batches that have
        ended, and requests the runs that continue them. It requires the resource ``store``, and
        the provider's API key in the environment of the code location.

        Raises:
            DefinitionError: If no stage uses batches.
        """
        from vane_dagster.orchestration.assets import build_batch_sensor

        return build_batch_sensor(self)

    @known_keywords("build_source")
    def build_source(self, asset: Asset | None = None) -> dg.AssetsDefinition:
        """Build the source as an observable Dagster asset, ``<pipeline>/source``.

        An observation lists the source once and reports each partition with new, deleted or changed
        files. From these reports Dagster marks stale assets and automation conditions request runs.
        A run of the pipeline reports its listing too.

        Args:
            asset: Additional attributes of the source's asset. Observe it by a schedule, whose runs
                have no partition and list all partitions. With an ``automation_condition`` there is
                a run for each partition, with ``AutomationCondition.on_cron`` only one for the
                latest time window.

        Raises:
            DefinitionError: If the source is another asset, or names the asset that writes it: that
                asset reports its own versions.
        """
        location = self._location(SOURCE)
        if self.source.asset:
            raise DefinitionError(
                f"{location}: the asset {self.source.asset!r} writes the source and reports its "
                "own versions; observe that one, or declare vd.parquet without asset="
            )
        from vane_dagster.orchestration.assets import build_source

        options = as_asset(location, asset)
        if self.partitions_def is not None and options.automation_condition is not None:
            warnings.warn(
                f"{location}: automation_condition requests a run for each partition, and on_cron "
                "one for the latest time window only. Observe the source by a schedule of a job, "
                "whose runs have no partition and list all: dg.define_asset_job('observe', "
                "selection=[source.key])",
                stacklevel=3,
            )
        return build_source(self, options)
