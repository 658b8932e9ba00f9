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
        source: The source of the rows: `parquet` files, a stage of another pipeline, an ordinary
            asset with rows in the store, or `stored` with the key of one.
        id: A column that is unique and not null inside a partition; every stage keeps it. A list of
            columns identifies rows by all of them, in a text column `id`, or in one with a name as
            ``{"key": ["doc", "page"]}``; `row_id` identifies rows that no column identifies.
            Default: the path, for sources of files.
        partitions_def: A Dagster partitions definition; None for an unpartitioned pipeline.
        backfill_policy: How Dagster divides a backfill into runs. Default: one run for all
            partitions, which share their warm models.
        fragment_rows: Maximum rows per fragment. Default: derived from the stages' batch sizes in
            the first run and kept in the store.
        group_name: Dagster group of the source, and of stages without `group_name`. Default: the
            pipeline's name.
        pool: Dagster concurrency pool of the step.
        retry_policy: Dagster retry policy of the step.
        op_tags: Dagster tags of the step.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    def source_schema(self, store: Any = None) -> pa.Schema:
        """Return the source's columns and types, from the last of its files.

        Args:
            store: The store, as for `plan`. CSV and JSON columns have the types that it keeps, once
                a run or a plan has found them.

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

        No code of a stage is called, nothing is committed, and no cluster is started. A source that
        is copied into the store, such as CSV files or rows in memory, is copied now. Costs are
        intervals by the stored rows of each stage: what the fastest and the slowest tenth of them
        took, wider by 10 to 35%, the more the fewer fragments are stored.

        Args:
            partitions: A partition key, "first..last", or several of these. Default: all.
            select: Names of stages, with ``+`` as in Dagster: "embedding+" selects those downstream
                too, "+embedding" those upstream. Default: all.
            store: A `FragmentStore` or the URL of a store's root. Default:
                ``$VANE_DAGSTER_STORE``, else a folder of this user.
            compute: The compute resource of the run, for its prices, and to see whether workers fit
                if that starts no cluster. With `sample`, rows are computed there. Default: nothing
                of it is known, and samples are computed in subprocesses.
            force: Whether the run would compute everything again.
            retry_quarantined: Whether it would compute rows again that failed.
            rows: Whether to read the inputs of changed fragments and count the rows that have no
                stored result: exact where all inputs are stored or follow from stored ones by SQL,
                an upper bound below stages whose rows are not computed yet.
            sample: Compute so many of the first input rows of each stage that is new or was edited,
                and measure by them; below a stage that is not stored, those that its sample made.
                Code is called then.

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

        It computes, checks and commits as a run of Dagster does, in the same store: a run of
        Dagster that follows finds the results and reports them. Progress and a summary are printed.

        Args:
            partitions: As for `plan`.
            select: As for `plan`.
            store: As for `plan`.
            compute: A `RayCompute`, or a `LocalCompute`, the default.
            force: Whether to compute everything again, even if it is stored.
            retry_quarantined: Whether to compute rows again that failed.
            max_gpu_hours: Compute nothing if `plan` expects that more GPU hours are possible.
            max_cost: Likewise for the price of tokens, of models that have prices.
            wait: Whether to wait for the answers of batches, of models with ``mode="batch"``.
                Otherwise the run submits them and ends, and a later one goes on.

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

        It looks at the batches in flight every five minutes, stores the answers of those that have
        ended, and requests the runs that go on with them. It requires the resource ``store``, and
        the key of the provider in the environment of the code location.

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
            asset: Further attributes of the source's asset. Observe it by a schedule, whose runs
                have no partition and list all. An ``automation_condition`` makes a run for each
                partition, and ``AutomationCondition.on_cron`` one for the latest time window only.

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
